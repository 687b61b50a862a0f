"""The live view of a run: which host, which step, how long so far, what the step usually takes."""

from __future__ import annotations

import threading
import time

from rich.console import Console

from fleet.events import Event, HostResult, Outcome, TaskStarted
from fleet.steps import Durations, spell

_BEAT_S = 15.0
_COLORS = {Outcome.CHANGED: "yellow", Outcome.FAILED: "red", Outcome.UNREACHABLE: "red"}


class RunView:
    """Prints one line per role as it begins, per change and per failure, and a beat while a task takes long."""

    def __init__(
        self, console: Console, durations: Durations, *, verbose: bool = False, rehearsal: bool = False
    ) -> None:
        self._console = console
        self._durations = durations
        self._verbose = verbose
        self._rehearsal = rehearsal
        self._changed = False
        self._role = ""
        self._task = ""
        self._task_began = self._role_began = time.monotonic()
        self._progress = ""
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> RunView:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._close_role()

    def __call__(self, event: Event) -> None:
        """Takes one event."""
        if isinstance(event, TaskStarted):
            self._start(event)
        elif event.outcome is Outcome.RETRY:
            progress = event.result.get("progress") or [{}]
            self._progress = " ".join(str(progress[-1].get(key, "")) for key in ("release", "stage"))
        elif event.outcome in _COLORS or (self._verbose and event.outcome is Outcome.OK):
            self._result(event)

    def _start(self, event: TaskStarted) -> None:
        if event.role and event.role != self._role:
            self._close_role()
            self._role, self._role_began = event.role, time.monotonic()
            usual = self._durations.usual(f"role: {event.role}")
            self._say(f"[bold]{event.role}[/]" + (f" [dim](usually {spell(usual)})[/]" if usual else ""))
        self._task, self._task_began, self._progress = event.task, time.monotonic(), ""

    def _result(self, event: HostResult) -> None:
        color = _COLORS.get(event.outcome, "dim")
        took = f" in {spell(event.seconds)}" if event.seconds >= 1 else ""
        if event.outcome is Outcome.CHANGED and not self._rehearsal:
            self._changed = True
            self._durations.record(f"task: {event.role}: {event.task}", event.seconds)
        self._say(f"  [{color}]{event.outcome}[/] {event.host}: {event.task}{took}")

    def _close_role(self) -> None:
        # Only what did its work, for real, tells what the work takes.
        if self._role and self._changed:
            self._durations.record(f"role: {self._role}", time.monotonic() - self._role_began)
        self._role, self._changed = "", False

    def _beat(self) -> None:
        while not self._done.wait(_BEAT_S):
            so_far = time.monotonic() - self._task_began
            if self._task and so_far >= _BEAT_S - 1:
                usual = self._durations.usual(f"task: {self._role}: {self._task}")
                hint = f" (usually {spell(usual)})" if usual else ""
                doing = f" ({self._progress.strip()})" if self._progress.strip() else ""
                self._say(f"  [dim]… {self._task}{doing}: {spell(so_far)} so far{hint}[/]")

    def _say(self, text: str) -> None:
        self._console.print(f"[bold]converge [/] {text}", highlight=False, soft_wrap=True)
