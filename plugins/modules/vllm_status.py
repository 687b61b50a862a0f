#!/usr/bin/python
"""Ansible module: what is on this host and what it serves, from its own records; changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.records import read_json
from ansible.module_utils.service_state import Service
from ansible.module_utils.systemd_unit import Unit

DOCUMENTATION = r"""
module: vllm_status
short_description: Read a host's releases, patches and service
description:
  - Reads the records that the roles keep and asks systemd; changes nothing. Under serving, drift lists where the
    service differs from what last passed its gate, as what, found and wanted; it is empty where it serves as proven.
  - Its token says whether the server holds the token that lies on the host (none, missing, unused, current, older).
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
_WATCHDOG = Path("/run/vllm-watchdog/state.json")


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
    host = read_json(state / "host.json")
    module.exit_json(
        changed=False,
        vllm_status={
            "decisions": host.get("decisions", []),
            "releases": _releases(root, state),
            "serving": _serving(root, state),
        },
    )


def _releases(root: Path, state: Path) -> list[dict[str, Any]]:
    current = (root / "current").resolve()
    found = []
    for path in sorted((root / "releases").glob("*/release.json")):
        record = read_json(path)
        keys = ("name", "build_id", "method", "distribution", "version", "torch", "cuda", "warnings")
        patch = read_json(state / "patches" / f"{record.get('build_id')}.json")
        found.append(
            {
                **{key: record.get(key) for key in keys},
                "current": path.parent.resolve() == current,
                "patch": {key: patch.get(key) for key in ("outcome", "reason")} if patch else None,
            }
        )
    return found


def _serving(root: Path, state: Path) -> dict[str, Any]:
    service = Service(root, state)
    record = service.record()
    unit = service.unit.show("ActiveState", "SubState", "NRestarts", "ExecMainStartTimestamp")
    shown = {name: value for name, value in record.items() if name != "unit_text"}
    seen = read_json(_WATCHDOG)
    return {
        **shown,
        "active": unit.get("ActiveState") == "active",
        "unit": unit,
        "drift": service.drift(record),
        "token": service.token(),
        "watchdog": {
            "on": Unit("vllm-watchdog.timer").is_on(),
            **{name: seen.get(name) for name in ("verdict", "detail", "failures")},
        },
    }


if __name__ == "__main__":
    main()
