"""How the local AWS behaves, settable while it runs, and the ledger of what it was asked."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """One request: who (the access key's id), which service and operation by AWS's own names, its parameters."""

    principal: str
    service: str
    operation: str
    region: str
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Cloud:
    """Settings and ledger of one local AWS.

    `latency_ms` is added to each request, `lag_s` is how late an invocation becomes visible to reads (AWS is
    eventually consistent there), `throttle` counts the next requests of an operation that are turned away, and
    `refuse` names the error that each request of an operation ends in.
    """

    latency_ms: float = 0.0
    lag_s: float = 0.0
    throttle: dict[str, int] = field(default_factory=dict)
    refuse: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, call: Call) -> bool:
        """Enters the call in the ledger; True where it is turned away."""
        with self.lock:
            self.calls.append(call)
            left = self.throttle.get(call.operation, 0)
            if left:
                self.throttle[call.operation] = left - 1
            return left > 0

    def asked(self, operation: str) -> int:
        """How often the operation was asked for."""
        with self.lock:
            return sum(call.operation == operation for call in self.calls)
