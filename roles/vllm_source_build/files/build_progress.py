"""How far a compilation is, read from its log while it runs: units, seconds left, memory."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import sizing

# Ninja's line for a step of ours; what CMake runs through ninja to fetch sources has other words.
_UNIT = re.compile(rb"^\[(\d+)/(\d+)\] (?:Building|Linking) ", re.M)
_EVERY_S = 2.0
_MIB = 1024 * 1024


class Units:
    """Units of one run of ninja: what a build that goes on finds compiled is not among them."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self._first: tuple[float, int] | None = None
        self._rest = b""

    def read(self, more: bytes, now: float) -> None:
        """Takes what came to the log since, at a time in seconds."""
        text = self._rest + more
        whole, _, self._rest = text.rpartition(b"\n")
        for done, total in _UNIT.findall(whole + b"\n"):
            if int(total) != self.total or int(done) < self.done:
                self._first = None
            self.done, self.total = int(done), int(total)
            self._first = self._first or (now, self.done)

    def left_s(self, now: float) -> int | None:
        """Seconds left at the pace so far; None before there is a pace."""
        if self._first is None or self.done <= self._first[1]:
            return None
        return round((now - self._first[0]) / (self.done - self._first[1]) * (self.total - self.done))


class Follower:
    """Tells every two seconds, from a thread of its own, what a log and the memory of this unit say.

    Told are `units` (done and total, once there are any), `eta_s` (once there is a pace), `memory_mib` and
    `memory_peak_mib`.
    """

    def __init__(self, log: Path, tell: Callable[[dict[str, Any]], None]) -> None:
        self._log, self._tell = log, tell
        self._offset = log.stat().st_size
        self._units, self._peak = Units(), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        # What ended it says how far it came.
        self._look()

    def _follow(self) -> None:
        while not self._stop.wait(_EVERY_S):
            # A full disk ends the build with words of its own.
            with contextlib.suppress(OSError):
                self._look()

    def _look(self) -> None:
        with self._log.open("rb") as file:
            file.seek(self._offset)
            more = file.read()
        self._offset += len(more)
        now = time.monotonic()
        self._units.read(more, now)
        used, peak = memory_mib()
        self._peak = max(self._peak, used, peak)
        found: dict[str, Any] = {"memory_mib": used, "memory_peak_mib": self._peak}
        if self._units.total:
            found["units"] = {"done": self._units.done, "total": self._units.total}
        if (left := self._units.left_s(now)) is not None:
            found["eta_s"] = left
        with contextlib.suppress(OSError):
            self._tell(found)


def memory_mib() -> tuple[int, int]:
    """Memory in use and the most there was, MiB: of the unit's control group, else of the processes below this one."""
    group = next(sizing.groups(), None)
    if group is not None and group.name.endswith(".service"):
        used, peak = sizing.number(group, "used"), sizing.number(group, "peak")
        if used is not None:
            return used // _MIB, (peak or used) // _MIB
    used = sum(_resident(pid) for pid in below())
    return used // _MIB, used // _MIB


def below(pid: str = "self") -> list[str]:
    """Ids of a process and all that descend from it."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += (task / "children").read_text().split()
    return found


def _resident(pid: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Fields of statm are pages; the second is what is resident.
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    return 0
