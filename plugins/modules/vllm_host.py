#!/usr/bin/python
"""Ansible module: reads the host, decides in words what it needs, refuses before anything is touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_decisions import Wishes, differences, house_form, make_plan, stable
from ansible.module_utils.host_probe import read_host, read_model, torch_cache

DOCUMENTATION = r"""
module: vllm_host
short_description: Read a host and plan what it needs
description: [Sets the facts vllm_host and vllm_plan. A plan with refusals fails, with nothing changed.]
options:
  host: {type: str, required: true, description: Name of the host in messages.}
  method: {type: str, choices: [auto, wheel, source], default: auto, description: How vLLM comes to the host.}
  capability: {type: str, default: auto, description: Capability of a builder without a GPU.}
  capabilities: {type: list, elements: str, required: true, description: Capabilities with a plan.}
  cuda: {type: str, default: '', description: CUDA that the driver must speak.}
  torch_prefixes: {type: list, elements: str, required: true, description: Environments in which torch may be.}
  model: {type: str, default: '', description: "Model, a folder on the host or a name on the hub."}
  checkpoint_bytes: {type: int, default: 0, description: Largest file of a checkpoint that is not here yet.}
  swap_margin_mib: {type: int, default: 1024, description: "Room beside the checkpoint, MiB."}
  swapfile: {type: str, default: '', description: "This project's own swapfile."}
  writes: {type: list, elements: dict, required: true, description: "path, wheel_mib, source_mib, inodes, exec."}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_host: {host: one, capabilities: ['7.5'], torch_prefixes: [/opt/pytorch], writes: []}
"""
RETURN = (
    "plan: {type: dict, returned: always, description: 'capability, method, dtype, swap_mib, decisions, refusals.'}"
)


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "method": {"type": "str", "choices": ["auto", "wheel", "source"], "default": "auto"},
            "capability": {"type": "str", "default": "auto"},
            "capabilities": {"type": "list", "elements": "str", "required": True},
            "cuda": {"type": "str", "default": ""},
            "torch_prefixes": {"type": "list", "elements": "str", "required": True},
            "model": {"type": "str", "default": ""},
            "checkpoint_bytes": {"type": "int", "default": 0},
            "swap_margin_mib": {"type": "int", "default": 1024},
            "swapfile": {"type": "str", "default": ""},
            "writes": {"type": "list", "elements": "dict", "required": True},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    state = Path(p["state"])
    paths = [write["path"] for write in p["writes"]] + ([p["swapfile"]] if p["swapfile"] else [])
    host = read_host(paths, p["torch_prefixes"], p["swapfile"], state / "torch.json")
    wishes = Wishes(
        method=p["method"],
        capability=p["capability"],
        capabilities=tuple(p["capabilities"]),
        cuda=p["cuda"],
        checkpoint_bytes=p["checkpoint_bytes"],
        swap_margin_mib=p["swap_margin_mib"],
        swapfile_path=p["swapfile"],
        writes=tuple(p["writes"]),
        # A host that holds a release already has spent the room that a release wants.
        disk_enforced=not any(Path("/opt/vllm/releases").glob("*/release.json")),
    )
    plan = make_plan(host, read_model(p["model"], p["checkpoint_bytes"]), wishes)
    facts = plan.facts()
    if plan.refusals:
        module.fail_json(msg=house_form(plan.refusals, p["host"]), plan=facts, refused=True)
    record = {**stable(host, facts), "decisions": facts["decisions"]}
    changes = _keep(state / "host.json", record, module.check_mode)
    _keep(state / "torch.json", torch_cache(host), module.check_mode)
    module.exit_json(
        changed=bool(changes),
        differences=changes,
        plan=facts,
        ansible_facts={"vllm_host": host, "vllm_plan": facts},
    )


def _keep(path: Path, record: dict[str, Any], check_mode: bool) -> list[str]:
    """Writes the record where it differs in what does not move by itself; the differences."""
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        before = {}
    still = {key: value for key, value in record.items() if key != "decisions"}
    changes: list[str] = differences({key: value for key, value in before.items() if key != "decisions"}, still)
    if changes and not check_mode:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        part.chmod(0o644)
        part.replace(path)
    return changes


if __name__ == "__main__":
    main()
