#!/usr/bin/env python3
"""Takes up at boot what was being built when the host went down: `resume_builds.py BUILDS [--ended]`.

A build says in `start.json` how it is started. One that was cancelled, has failed or is done is left alone, and so is
one that three boots in a row have not brought to an end: it may be what takes the host down. Where nothing is left
to take up the boot unit goes: at boot, and with `--ended` when a build has ended, which is all that word asks for.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from job import write_whole
from transient_unit import at_work

UNIT = Path("/etc/systemd/system/vllm-fleet-builds.service")
BOOTS = 3


def resume(builds: Path) -> list[str]:
    """Starts every build that was cut off; the names of the units that were started."""
    started = []
    for start in sorted(builds.glob("*/start.json")):
        home, unit = start.parent, _read(start)
        status = _read(home / "status.json")
        if not cut_off(home) or at_work(unit["unit"]):
            continue
        boots = int(_read(home / "boots.json").get("boots", 0)) + 1
        if boots > BOOTS:
            told = {
                "what": f"{BOOTS} boots took it up, and none brought it to an end: it may be what takes the host down",
                "where": str(home / "build.log"),
                "mend": f"journalctl --list-boots; tail -50 {home / 'build.log'}; then converge again",
            }
            write_whole(home / "status.json", {**status, "state": "failed", **told})
            continue
        write_whole(home / "boots.json", {"boots": boots})
        subprocess.run(unit["argv"], check=False)
        started.append(str(unit["unit"]))
    return started


def cut_off(home: Path) -> bool:
    """Whether a build was at work when it ended, though it had said nothing yet, and nobody has cancelled it."""
    ended = _read(home / "status.json").get("state") in ("done", "failed", "cancelled")
    return not ended and not (home / "cancelled.json").is_file()


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def main() -> None:
    """Resumes what was cut off, and takes the boot unit away where nothing is."""
    builds = Path(sys.argv[1])
    if "--ended" not in sys.argv[2:]:
        resume(builds)
    if not any(cut_off(start.parent) for start in builds.glob("*/start.json")):
        subprocess.run(["systemctl", "disable", "-q", UNIT.name], check=False)
        UNIT.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
