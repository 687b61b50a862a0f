"""Who holds apt's and dpkg's locks, and waiting until nobody does."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

# In the order in which apt takes them. DPkg::Lock::Timeout makes apt-get wait for the first alone; dpkg and the
# update of the lists never wait.
LOCKS = (
    "/var/lib/dpkg/lock-frontend",
    "/var/lib/dpkg/lock",
    "/var/lib/apt/lists/lock",
    "/var/cache/apt/archives/lock",
)
# struct flock of 64-bit Linux: type, whence, start, length, pid.
_FLOCK = "hhqqi4x"


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a lock; pid 0 where it lives in another namespace."""

    lock: str
    pid: int
    command: str

    def __str__(self) -> str:
        return f"{self.lock} is held by process {self.pid} ({self.command})"


def holder_of(lock: str) -> Holder | None:
    """The holder of a lock file's record lock; None where nobody holds it, or there is no such file."""
    try:
        with Path(lock).open("rb") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except FileNotFoundError:
        return None
    if kind == fcntl.F_UNLCK:
        return None
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        words = ""
    return Holder(lock, pid, words[:120] or "unknown")


def wait(locks: Iterable[str], seconds: float, poll_seconds: float = 1.0) -> Holder | None:
    """Waits until no lock is held; the holder that was left when the time (seconds) was over, else None."""
    deadline = time.monotonic() + seconds
    while holder := next((found for lock in locks if (found := holder_of(lock))), None):
        if time.monotonic() >= deadline:
            return holder
        time.sleep(poll_seconds)
    return None
