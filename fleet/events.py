"""What happens during a run, typed; everything but the adapter sees these and nothing of ansible-runner."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Outcome(StrEnum):
    """How a task ended on one host."""

    OK = "ok"
    CHANGED = "changed"
    SKIPPED = "skipped"
    RETRY = "retry"
    FAILED = "failed"
    UNREACHABLE = "unreachable"


@dataclass(frozen=True, slots=True)
class TaskStarted:
    """A task begins on all hosts of its play."""

    role: str
    task: str


@dataclass(frozen=True, slots=True)
class HostStarted:
    """A task begins on one host."""

    host: str
    role: str
    task: str


@dataclass(frozen=True, slots=True)
class HostResult:
    """A task ended (or is tried again) on one host; `seconds` is the task's own duration."""

    host: str
    role: str
    task: str
    outcome: Outcome
    seconds: float
    message: str = ""
    result: dict[str, Any] = field(default_factory=dict)


Event = TaskStarted | HostStarted | HostResult


@dataclass(slots=True)
class HostTally:
    """Counts of one host's outcomes, and the first failure's message."""

    ok: int = 0
    changed: int = 0
    failed: int = 0
    unreachable: int = 0
    refused: bool = False
    bad_input: bool = False
    message: str = ""

    def add(self, event: HostResult) -> None:
        """Counts one result."""
        match event.outcome:
            case Outcome.OK:
                self.ok += 1
            case Outcome.CHANGED:
                self.ok += 1
                self.changed += 1
            case Outcome.FAILED:
                self.failed += 1
                self.refused = self.refused or bool(event.result.get("refused"))
                self.bad_input = self.bad_input or "argument_errors" in event.result
            case Outcome.UNREACHABLE:
                self.unreachable += 1
            case Outcome.SKIPPED | Outcome.RETRY:
                return
        if event.outcome in (Outcome.FAILED, Outcome.UNREACHABLE) and not self.message:
            self.message = event.message
