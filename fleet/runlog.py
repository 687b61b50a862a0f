"""One JSON-lines log per run: what happened, in order, without any task's full result."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from fleet.events import Event, HostResult, HostStarted, Outcome
from fleet.paths import state_dir
from fleet.redaction import redacted

# Of what is waited for, how far it is.
_PROGRESS = ("release", "stage", "units", "eta_s", "memory_mib")


class RunLog:
    """Writes one line per event; message texts and how far a build is are kept, results are not."""

    def __init__(self, command: str) -> None:
        folder = state_dir() / "logs"
        folder.mkdir(exist_ok=True, mode=0o700)
        self.path: Path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{command.replace(' ', '-')}.jsonl"
        self._file = self.path.open("w")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __call__(self, event: Event) -> None:
        """Appends one event; a task's beginning is logged once, not once per host."""
        if isinstance(event, HostStarted):
            return
        line: dict[str, Any] = {"at": round(time.time(), 3), "role": event.role, "task": event.task}
        if isinstance(event, HostResult):
            line |= {"host": event.host, "outcome": event.outcome, "seconds": event.seconds}
            line |= {"message": event.message} if event.message else {}
            if event.outcome is Outcome.RETRY and (progress := event.result.get("progress")):
                line["progress"] = {key: progress[-1][key] for key in _PROGRESS if key in progress[-1]}
        self._file.write(redacted(json.dumps(line)) + "\n")
        self._file.flush()
