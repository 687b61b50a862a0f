"""Command lines and environments of every process of the machine, containers' too, looked at without a pause."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from bench.leaks.canaries import Hit, Hunter


class Sampler:
    """Looks all through a `with` block; a process is read again only once it is another program."""

    def __init__(self, hunter: Hunter, is_planted: Callable[[str, bytes], bool]) -> None:
        """`is_planted` tells of a kind (`arguments`, `environment`) and its bytes whether the hunt put it there."""
        self._hunter = hunter
        self._is_planted = is_planted
        self._over = threading.Event()
        self._seen: set[tuple[str, bytes, bytes]] = set()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self.hits: list[Hit] = []
        self.processes = 0
        self.rounds = 0

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(0.02):
            self.look()

    def look(self) -> None:
        """One look at every process."""
        now: set[tuple[str, bytes, bytes]] = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                started = (folder / "stat").read_bytes().rpartition(b")")[2].split()[19]
                arguments = (folder / "cmdline").read_bytes()
                if not arguments:
                    continue
                key = (folder.name, started, arguments)
                now.add(key)
                if key not in self._seen:
                    self._take(folder, arguments)
        self._seen = now
        self.rounds += 1

    def _take(self, folder: Path, arguments: bytes) -> None:
        self.processes += 1
        program = arguments.split(b"\0")[0].decode(errors="replace")
        environment = (folder / "environ").read_bytes()
        for kind, data in (("arguments", arguments), ("environment", environment)):
            if not self._is_planted(kind, data):
                self.hits += self._hunter.hits(data, f"process {folder.name} ({program}) {kind}")
