"""Transient units of systemd, which outlive the connection that started them."""

from __future__ import annotations

import subprocess

# One that is ending still has its last words to write, which `systemctl is-active` would not wait for.
_AT_WORK = ("active", "activating", "deactivating", "reloading")


def at_work(unit: str) -> bool:
    """Whether the unit has not come to its end."""
    said = subprocess.run(
        ["systemctl", "show", "-P", "ActiveState", unit], capture_output=True, text=True, check=False
    ).stdout.strip()
    return said in _AT_WORK
