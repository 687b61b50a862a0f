"""The view of a run: which host is at which step, for how long, and what has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from fleet import differences
from fleet.events import Event, HostResult, HostStarted, Outcome, TaskStarted
from fleet.progress import Progress, Row, spell
from fleet.steps import Durations

_COLORS = {Outcome.CHANGED: "yellow", Outcome.FAILED: "red", Outcome.UNREACHABLE: "red"}


class RunView:
    """Shows a row for each host that is at work, and a line per role, per change and per failure.

    Args:
        verbose: a line as well for each task that changed nothing.
        rehearsal: the run only says what it would do, so nothing is learned of durations.
        diff: what changes in files is shown.
    """

    def __init__(
        self,
        console: Console,
        durations: Durations,
        label: str,
        *,
        verbose: bool = False,
        rehearsal: bool = False,
        diff: bool = False,
    ) -> None:
        self._progress = Progress(console, label)
        self._durations = durations
        self._verbose = verbose
        self._rehearsal = rehearsal
        self._diff = diff
        self._changed = False
        self._role = ""
        self._role_began = time.monotonic()

    def __enter__(self) -> RunView:
        self._progress.say("reading the inventory")
        return self

    def __exit__(self, *trouble: object) -> None:
        if trouble[0] is None:
            self._close_role()
        self._progress.__exit__(*trouble)

    def __call__(self, event: Event) -> None:
        """Takes one event."""
        if isinstance(event, TaskStarted):
            self._open_role(event.role)
        elif isinstance(event, HostStarted):
            usual = self._durations.usual(f"task: {event.role}: {event.task}")
            self._progress.begin(Row(event.host, _named(event), usual))
        elif event.outcome is Outcome.RETRY:
            last = (event.result.get("progress") or [{}])[-1]
            self._progress.doing(event.host, f"{last.get('release', '')} {how_far(last)}".strip())
        else:
            self._progress.end(event.host)
            if event.outcome in _COLORS or (self._verbose and event.outcome is Outcome.OK):
                self._result(event)

    def stopping(self) -> None:
        """Says that the run is over and what it left on its hosts is being ended."""
        self._role = ""
        self._progress.stop()
        self._progress.say("stopping: ending what the run has left running on its hosts")

    def _open_role(self, role: str) -> None:
        if role == self._role:
            return
        self._close_role()
        self._role, self._role_began = role, time.monotonic()
        if role and not self._progress.moves:
            usual = self._durations.usual(f"role: {role}")
            self._progress.say((role, "bold"), (f" (usually {spell(usual)})" if usual else "", "dim"))

    def _close_role(self) -> None:
        if self._role:
            took = time.monotonic() - self._role_began
            # Only what did its work, for real, tells what the work takes.
            if self._changed:
                self._durations.record(f"role: {self._role}", took)
            self._progress.say((self._role, "bold"), f": done in {spell(took)}")
        self._role, self._changed = "", False

    def _result(self, event: HostResult) -> None:
        if event.outcome is Outcome.CHANGED and not self._rehearsal:
            self._changed = True
            self._durations.record(f"task: {event.role}: {event.task}", event.seconds)
        took = f" in {spell(event.seconds)}" if event.seconds >= 1 else ""
        color = _COLORS.get(event.outcome, "dim")
        self._progress.say("  ", (str(event.outcome), color), f" {event.host}: {_named(event)}{took}")
        if self._diff:
            for line, style in differences.lines(event.result.get("diff")):
                self._progress.say("    ", (line, style))


def how_far(status: Mapping[str, Any]) -> str:
    """Of a build's status: `build 12/60 units, 3 min left`, or the stage where nothing is compiled.

    One that waits for another host tells that host and how far it is there.
    """
    if status.get("state") == "waiting" and status.get("builder"):
        return f"waits for {status['builder']}: {how_far(status.get('progress') or {})}"
    units = status.get("units")
    if not units or status.get("stage") != "build_wheel":
        return str(status.get("stage", ""))
    left = status.get("eta_s")
    told = "" if left is None else f", {left} s left" if left < 60 else f", {round(left / 60)} min left"
    return f"build {units['done']}/{units['total']} units{told}"


def _named(event: HostStarted | HostResult) -> str:
    return f"{event.role}: {event.task}" if event.role else event.task
