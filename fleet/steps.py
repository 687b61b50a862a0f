"""Named steps of this machine: what each usually takes, and their showing."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from fleet.paths import state_dir
from fleet.progress import Progress, Row, spell

_SEED = Path(__file__).with_name("usual_durations.json")


class Durations:
    """Seconds that each named step took last time on this machine, else as measured for the project."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or state_dir() / "durations.json"
        self._seconds: dict[str, float] = {}
        for source in (_SEED, self._path):
            with contextlib.suppress(OSError, ValueError):
                self._seconds.update(json.loads(source.read_text()))
        self._lock = threading.Lock()

    def usual(self, name: str) -> float | None:
        """Seconds the step usually takes, or None where it never ran."""
        return self._seconds.get(name)

    def record(self, name: str, seconds: float) -> None:
        """Remembers what the step took; a record that cannot be written is not worth a failed run."""
        with self._lock:
            self._seconds[name] = round(seconds, 1)
            part = self._path.with_suffix(".part")
            with contextlib.suppress(OSError):
                part.write_text(json.dumps(self._seconds, indent=1, sort_keys=True))
                part.replace(self._path)


class Steps:
    """Shows steps as they run, and one line for each that has ended."""

    def __init__(self, console: Console, durations: Durations, where: str) -> None:
        self._console = console
        self._durations = durations
        self._where = where

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Times and shows the block; a failed block is not recorded."""
        usual = self._durations.usual(f"{self._where}: {name}")
        began = time.monotonic()
        with Progress(self._console, self._where) as progress:
            if not progress.moves:
                progress.say(name, f" (usually {spell(usual)})" if usual else "")
            progress.begin(Row("", name, usual))
            yield
            took = time.monotonic() - began
            # A step that found its work done says nothing of what the work takes.
            if took >= 1:
                self._durations.record(f"{self._where}: {name}", took)
            progress.say((f"{name}: done in {spell(took)}", "green"))

    def note(self, text: str) -> None:
        """Prints one line that is no step."""
        Progress(self._console, self._where).say(text)
