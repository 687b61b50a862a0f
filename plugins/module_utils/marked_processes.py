"""Processes of a run, found by the mark that its playbooks put in their environment, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

# Cut off in the middle, a package manager leaves a host that needs mending by hand.
_PATIENT = ("dpkg", "apt-get", "dpkg-deb")


def mark_of(run: str) -> bytes:
    """What a run's processes carry."""
    return f"VLLM_FLEET_RUN={run}".encode()


def running(mark: bytes) -> list[tuple[int, str]]:
    """Processes that carry the mark: id and name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append((int(folder.name), (folder / "comm").read_text().strip()))
    return found


def end(mark: bytes, wait_seconds: float) -> None:
    """Asks them to end, then makes them; a package manager in the middle of its work is waited for that long."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        busy = time.monotonic() + wait_seconds
        while any(name in _PATIENT for _, name in running(mark)) and time.monotonic() < busy:
            time.sleep(0.5)
        for pid, _ in running(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        quiet = time.monotonic() + 10
        while running(mark) and time.monotonic() < quiet:
            time.sleep(0.2)
