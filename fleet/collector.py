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
    """What each role did, and of each host: its own state, its patches, whether its server was started anew.

    `patches` are the records of the releases whose patch did not fail, `restarted` the hosts whose server was started
    anew (in check mode: would be), `launch_shapes` what a search on the host's own GPU found, `builds` those a host has
    begun, `host_checks` what an audit saw there. What a run has planned stands before what an earlier one wrote down: a
    check writes nothing.
    """

    def __init__(self) -> None:
        self.roles: dict[str, RoleDone] = {role: RoleDone() for role in ROLES}
        self.status: dict[str, dict[str, Any]] = {}
        self.patches: dict[str, list[dict[str, Any]]] = {}
        self.restarted: set[str] = set()
        self.launch_shapes: dict[str, dict[str, Any]] = {}
        self.builds: dict[str, list[dict[str, Any]]] = {}
        self.host_checks: dict[str, list[dict[str, str]]] = {}
        self._decisions: dict[str, list[dict[str, str]]] = {}

    def __call__(self, event: Event) -> None:
        """Takes one event."""
        if not isinstance(event, HostResult):
            return
        if plan := (event.result.get("ansible_facts") or {}).get("vllm_plan"):
            self._decisions[event.host] = plan["decisions"]
        if "vllm_status" in event.result:
            planned = self._decisions.get(event.host)
            self.status[event.host] = event.result["vllm_status"] | ({"decisions": planned} if planned else {})
        if "patches" in event.result:
            self.patches[event.host] = event.result["patches"]
        if event.result.get("restarted"):
            self.restarted.add(event.host)
        if "launch_shapes" in event.result:
            self.launch_shapes[event.host] = event.result["launch_shapes"]
        if "host_checks" in event.result:
            self.host_checks[event.host] = event.result["host_checks"]
        if event.task == "Builds of the host" and "builds" in event.result:
            self.builds[event.host] = event.result["builds"]
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
