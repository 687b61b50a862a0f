#!/usr/bin/python
"""Ansible module: the builds that a host has begun, and the end of those that somebody cancels."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.records import read_json
from ansible.module_utils.transient_unit import at_work

DOCUMENTATION = r"""
module: vllm_build
short_description: Say or cancel the builds of a host
description:
  - A cancelled build ends with all its processes, keeps what it has compiled, and is not taken up at boot; the next
    converge starts it again.
options:
  builds: {type: path, required: true, description: Folder of the builds.}
  cancel: {type: bool, default: false, description: Whether to cancel what is at work.}
  release: {type: str, default: "", description: Name or build id of the one that is meant; empty for all.}
  who: {type: str, default: "", description: Who cancels.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_build: {builds: /var/lib/vllm-fleet/builds, cancel: true, who: somebody}
"""
RETURN = """
builds:
  type: list
  returned: always
  description: "Of each build: release, build_id, unit, active, and its status (state, stage, units, eta_s)."
cancelled: {type: list, returned: always, description: Build ids that this call has cancelled.}
"""
# Longer than the builds' own TimeoutStopSec.
_STOP_S = 60


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "builds": {"type": "path", "required": True},
            "cancel": {"type": "bool", "default": False},
            "release": {"type": "str", "default": ""},
            "who": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    folder, release = Path(module.params["builds"]), module.params["release"]
    meant = [build for build in begun(folder) if release in ("", build["release"], build["build_id"])]
    cancelled = []
    if module.params["cancel"]:
        for build in meant:
            if not build["active"] and build["state"] in ("", "done", "failed", "cancelled"):
                continue
            if not module.check_mode and not cancel(folder / build["build_id"], build, module.params["who"]):
                module.fail_json(
                    msg=f"vllm_build: {build['unit']} has not ended within {_STOP_S} s\n"
                    f"  where: {platform.node()} {build['unit']}\n  mend:  systemctl kill -s KILL {build['unit']}"
                )
            cancelled.append(build["build_id"])
    names = set(cancelled)
    after = [build for build in begun(folder) if build["build_id"] in {found["build_id"] for found in meant}]
    module.exit_json(changed=bool(names), builds=after, cancelled=cancelled)


def begun(folder: Path) -> list[dict[str, Any]]:
    """Every build that was begun on the host, with its status."""
    found = []
    for start in sorted(folder.glob("*/start.json")):
        status, unit = read_json(start.parent / "status.json"), str(read_json(start).get("unit"))
        named = {"release": read_json(start.parent / "spec.json").get("name", ""), "build_id": start.parent.name}
        found.append({"state": "", **status, **named, "unit": unit, "active": at_work(unit)})
    return found


def cancel(home: Path, build: dict[str, Any], who: str) -> bool:
    """Marks the build and ends its unit with all in it; whether it has ended."""
    mark = {"who": who or "somebody", "when": time.strftime("%Y-%m-%d %H:%M:%S %Z"), "at": time.time()}
    (home / "cancelled.json").write_text(json.dumps(mark))
    try:
        subprocess.run(["systemctl", "stop", build["unit"]], timeout=_STOP_S, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return False
    status = read_json(home / "status.json")
    if status.get("state") != "cancelled":
        # One that was not at work, or that was killed before it could say so.
        told = {"state": "cancelled", "what": f"the build was cancelled by {mark['who']} at {mark['when']}"}
        part = home / "status.part"
        part.write_text(json.dumps({**status, **told}, indent=1, sort_keys=True))
        part.replace(home / "status.json")
    return not at_work(build["unit"])


if __name__ == "__main__":
    main()
