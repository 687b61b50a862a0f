#!/usr/bin/env python3
"""Ansible inventory of the local sandbox: the hosts that `./runner.py sandbox up` recorded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sandbox import host_variables


def main() -> int:
    """Prints the inventory as JSON; no sandbox is an error, not an empty fleet."""
    world = host_variables.recorded()
    names = [host["name"] for host in world["hosts"]]
    variables = {
        host["name"]: {"ansible_host": host["name"], "sandbox_address": host["address"]} for host in world["hosts"]
    }
    groups: dict[str, dict[str, Any]] = {
        name: {"hosts": names} for name in ("vllm", "sandbox", "capability_7_5", _architecture())
    }
    if world.get("emulated"):
        # No server can run there: a host to try roles on, and none of the fleet's.
        groups["emulated"] = {"hosts": world["emulated"]}
        groups["sandbox"]["hosts"] = [*names, *world["emulated"]]
        groups["architecture_aarch64"] = {"hosts": world["emulated"]}
    groups["sandbox"]["vars"] = {
        "ansible_connection": "containers.podman.podman",
        "ansible_podman_executable": world["podman"],
        # A container's files may be mounted in a namespace of podman's own, where this plugin would not see them.
        "ansible_podman_mount_detection": False,
        **host_variables.variables(world),
    }
    json.dump({"_meta": {"hostvars": variables}, **groups}, sys.stdout, indent=1)
    return 0


def _architecture() -> str:
    return f"architecture_{os.uname().machine}"


if __name__ == "__main__":
    raise SystemExit(main())
