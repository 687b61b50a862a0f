"""Says which long step is under way, how long so far, and what it usually takes."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from fleet.paths import state_dir

_SEED = Path(__file__).with_name("usual_durations.json")
_BEAT_S = 20.0


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


def spell(seconds: float) -> str:
    """`75.2` as `1m15s`."""
    whole = round(seconds)
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


class Steps:
    """Prints steps as they begin, beat and end. One line each, so that a log file reads as well."""

    def __init__(self, console: Console, durations: Durations, where: str) -> None:
        self._console = console
        self._durations = durations
        self._where = where

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Times the block, with a beat while it runs; a failed block is not recorded."""
        usual = self._durations.usual(f"{self._where}: {name}")
        hint = f" (usually {spell(usual)})" if usual else ""
        began = time.monotonic()
        done = threading.Event()

        def beat() -> None:
            while not done.wait(_BEAT_S):
                self._say(f"[dim]… {name}: {spell(time.monotonic() - began)} so far{hint}[/]")

        self._say(f"{name}{hint}")
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        took = time.monotonic() - began
        # A step that found its work done says nothing of what the work takes.
        if took >= 1:
            self._durations.record(f"{self._where}: {name}", took)
        self._say(f"[green]{name}: done in {spell(took)}[/]")

    def note(self, text: str) -> None:
        """Prints one line that is no step."""
        self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(f"[bold]{self._where:<9}[/] {text}", highlight=False, soft_wrap=True)
