"""Gathers from a run's events what its summary needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fleet.events import Event, HostResult, Outcome
from fleet.requests import ROLES

_VALIDATION = "Validating arguments against arg spec"


@dataclass(slots=True)
class RoleDone:
    """What one role did on all hosts together; seconds are the sum of its tasks."""

    changed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ran: bool = False
    seconds: float = 0.0


class Collector:
    """What each role did, and each host's own state."""

    def __init__(self) -> None:
        self.roles: dict[str, RoleDone] = {role: RoleDone() for role in ROLES}
        self.status: dict[str, dict[str, Any]] = {}

    def __call__(self, event: Event) -> None:
        """Takes one event."""
        if not isinstance(event, HostResult):
            return
        if "vllm_status" in event.result:
            self.status[event.host] = event.result["vllm_status"]
        role = self.roles.get(event.role)
        if role is None or event.outcome in (Outcome.SKIPPED, Outcome.RETRY):
            return
        # Arguments are validated for roles, too, whose tags were not asked for.
        role.ran = role.ran or not event.task.startswith(_VALIDATION) or event.outcome is Outcome.FAILED
        role.seconds += event.seconds
        if event.outcome is Outcome.CHANGED:
            role.changed.append(event.task)
        elif event.outcome in (Outcome.FAILED, Outcome.UNREACHABLE):
            role.failed.append(event.task)
