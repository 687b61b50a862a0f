#!/usr/bin/env python3
"""Says who else holds the GPU, and notes what is started: `prestart.py UNIT [KEY]`.

Before each start the unit runs it with its key, which goes to `started` in the unit's runtime directory: what runs can
then be compared with what should run. A process of an earlier start that still holds the GPU (vllm#55510) is named on
standard output, thus in the journal; a host without nvidia-smi has nothing to say. Never keeps a start from happening.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import subprocess
import sys
from pathlib import Path

_QUERY = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]


def orphans(unit: str) -> list[str]:
    """One line for each process on the GPU that is not in the unit's control group; memory in MiB."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = re.findall(r"^(\d+), *(\S+)", done.stdout, re.M) if done.returncode == 0 else []
    found = []
    for pid, memory in rows:
        process = Path("/proc") / pid
        with contextlib.suppress(OSError, KeyError):
            if unit in re.split(r"[/\n]", (process / "cgroup").read_text()):
                continue
            user = pwd.getpwuid(process.stat().st_uid).pw_name
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            found.append(f"ORPHAN_GPU pid {pid} of user {user} holds {memory} MiB: {command[:120]}")
    return found


def main(unit: str, key: str = "") -> int:
    """Prints the lines, writes the key."""
    print("\n".join(orphans(unit)), end="")
    folder = os.environ.get("RUNTIME_DIRECTORY")
    if key and folder:
        (Path(folder) / "started").write_text(key + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:3]))
