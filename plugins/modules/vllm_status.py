#!/usr/bin/python
"""Ansible module: what is on this host and what it serves, from its own records; changes nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: vllm_status
short_description: Read a host's releases, patches and service
description: [Reads the records that the roles keep and asks systemd; changes nothing.]
options:
  root: {type: path, default: /opt/vllm, description: Folder of the releases and of the current link.}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_status: {}
"""
RETURN = "vllm_status: {type: dict, returned: always, description: 'host, decisions, releases, serving.'}"


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/vllm"},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
        supports_check_mode=True,
    )
    root, state = Path(module.params["root"]), Path(module.params["state"])
    host = _read(state / "host.json")
    module.exit_json(
        changed=False,
        vllm_status={
            "decisions": host.get("decisions", []),
            "releases": _releases(root, state),
            "serving": _serving(state),
        },
    )


def _releases(root: Path, state: Path) -> list[dict[str, Any]]:
    current = (root / "current").resolve()
    found = []
    for path in sorted((root / "releases").glob("*/release.json")):
        record = _read(path)
        keys = ("name", "build_id", "method", "distribution", "version", "torch", "cuda", "warnings")
        patch = _read(state / "patches" / f"{record.get('build_id')}.json")
        found.append(
            {
                **{key: record.get(key) for key in keys},
                "current": path.parent.resolve() == current,
                "patch": {key: patch.get(key) for key in ("outcome", "reason")} if patch else None,
            }
        )
    return found


def _serving(state: Path) -> dict[str, Any]:
    record = _read(state / "service.json")
    done = subprocess.run(
        [
            "systemctl",
            "show",
            "vllm.service",
            "--property=ActiveState,SubState,NRestarts,ExecMainStartTimestamp",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    unit = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    return {**record, "active": unit.get("ActiveState") == "active", "unit": unit}


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


if __name__ == "__main__":
    main()
