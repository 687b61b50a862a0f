#!/usr/bin/python
"""Ansible module: reads the host, decides in words what it needs, refuses before anything is touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.host_decisions import make_plan
from ansible.module_utils.host_plan import Wishes
from ansible.module_utils.host_probe import read_host, torch_cache
from ansible.module_utils.host_record import differences, stable
from ansible.module_utils.model_probe import read_model
from ansible.module_utils.package_index import Answer, ask_index, ask_repository
from ansible.module_utils.records import read_json
from ansible.module_utils.refusals import house_form
from ansible.module_utils.version_decisions import NEWEST

DOCUMENTATION = r"""
module: vllm_host
short_description: Read a host and plan what it needs
description:
  - Sets the facts vllm_host and vllm_plan. A plan with refusals fails, with nothing changed.
  - Keeps what it found in C(host.json); C(differences) is what the host no longer has in common with that.
options:
  host: {type: str, required: true, description: Name of the host in messages.}
  method: {type: str, choices: [auto, wheel, source], default: auto, description: How vLLM comes to the host.}
  capability: {type: str, default: auto, description: Capability of a builder without a GPU.}
  capabilities: {type: list, elements: str, required: true, description: Capabilities with a plan.}
  cuda: {type: str, default: '', description: CUDA that the driver must speak.}
  torch_prefixes: {type: list, elements: str, required: true, description: Environments in which torch may be.}
  model: {type: str, default: '', description: "Model, a folder on the host or a name on the hub."}
  hub_endpoint: {type: str, default: '', description: Address of the hub that is asked about a model; empty for none.}
  token_file: {type: str, default: '', description: File on the host that holds the hub's token.}
  checkpoint_bytes: {type: int, default: 0, description: Largest file of a checkpoint that cannot be asked for.}
  vllm_releases:
    type: list
    elements: dict
    default: []
    description: Wanted releases, as in C(vllm_source_build_releases); the version C(newest) is chosen here.
  host_compiler: {type: str, default: '', description: C++ compiler of a CUDA build.}
  rust_toolchain: {type: str, default: '', description: Rust toolchain that builds are held to.}
  arguments: {type: list, elements: str, default: [], description: Further arguments of vLLM's server.}
  swap_margin_mib: {type: int, default: 1024, description: "Room beside the checkpoint, MiB."}
  swapfile: {type: str, default: '', description: "This project's own swapfile."}
  writes:
    type: list
    elements: dict
    required: true
    description: Where builds and releases write, and what they need there.
    suboptions:
      path: {type: path, required: true, description: Folder that is written to.}
      wheel_mib: {type: int, default: 0, description: "Room wanted for a published wheel, MiB."}
      source_mib: {type: int, default: 0, description: "Room wanted for a source build, MiB."}
      inodes: {type: int, default: 0, description: Files that are made.}
      exec: {type: bool, default: false, description: What lies there is run.}
      model: {type: bool, default: false, description: A model from the hub is kept there too.}
  kernel_figures:
    type: dict
    required: true
    description: What the compiler said of the attention kernels, by capability, as in C(launch_shapes.json).
  releases: {type: path, required: true, description: Folder of the releases; one in place has had its room.}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_host:
    host: one
    capabilities: ['7.5']
    torch_prefixes: [/opt/pytorch]
    writes: []
    kernel_figures: {capabilities: {}}
    releases: /opt/vllm/releases
"""
RETURN = """
plan: {type: dict, returned: always, description: "capability, method, dtype, swap_mib, versions, decisions."}
recorded: {type: bool, returned: success, description: Whether an earlier run kept a record.}
differences: {type: list, returned: success, description: "What differs from that record, name, before and now."}
"""
_WRITES = {
    "path": {"type": "path", "required": True},
    "wheel_mib": {"type": "int", "default": 0},
    "source_mib": {"type": "int", "default": 0},
    "inodes": {"type": "int", "default": 0},
    "exec": {"type": "bool", "default": False},
    "model": {"type": "bool", "default": False},
}


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
            "hub_endpoint": {"type": "str", "default": ""},
            "token_file": {"type": "str", "default": "", "no_log": False},
            "checkpoint_bytes": {"type": "int", "default": 0},
            "vllm_releases": {"type": "list", "elements": "dict", "default": []},
            "host_compiler": {"type": "str", "default": ""},
            "rust_toolchain": {"type": "str", "default": ""},
            "arguments": {"type": "list", "elements": "str", "default": []},
            "swap_margin_mib": {"type": "int", "default": 1024},
            "swapfile": {"type": "str", "default": ""},
            "writes": {"type": "list", "elements": "dict", "required": True, "options": _WRITES},
            "kernel_figures": {"type": "dict", "required": True},
            "releases": {"type": "path", "required": True},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
        supports_check_mode=True,
    )
    p = module.params
    state = Path(p["state"])
    recorded = read_json(state / "host.json")
    paths = [write["path"] for write in p["writes"]] + ([p["swapfile"]] if p["swapfile"] else [])
    host = read_host(paths, p["torch_prefixes"], p["swapfile"], state / "torch.json")
    model = read_model(
        p["model"], p["hub_endpoint"], p["token_file"], p["checkpoint_bytes"], recorded.get("model") or {}
    )
    # A host that holds a release has spent the room that one wants, and has been given its packages.
    installs = not any(Path(p["releases"]).glob("*/release.json"))
    python = host["torch"]["python"] or sys.executable
    answers = _ask(python, p["vllm_releases"], installs)
    wishes = Wishes(
        method=p["method"],
        capability=p["capability"],
        capabilities=tuple(p["capabilities"]),
        cuda=p["cuda"],
        releases=tuple(p["vllm_releases"]),
        candidates={name: (answer.candidates, answer.error) for name, answer in answers.items()},
        versions_before=(recorded.get("plan") or {}).get("versions") or {},
        gcc=_compiler_version(p["host_compiler"]),
        rust_toolchain=p["rust_toolchain"],
        arguments=tuple(p["arguments"]),
        token_file=p["token_file"],
        swap_margin_mib=p["swap_margin_mib"],
        swapfile_path=p["swapfile"],
        writes=tuple(p["writes"]),
        disk_enforced=installs,
        kernel_figures=p["kernel_figures"],
        index_silence=next(((a.index, a.error) for a in answers.values() if a.index), ("", ""))
        if installs
        else ("", ""),
    )
    plan = make_plan(host, model, wishes)
    facts = plan.facts()
    if plan.refusals:
        module.fail_json(msg=house_form(plan.refusals, p["host"]), plan=facts, refused=True)
    found = stable(host, model, facts)
    before = {key: recorded[key] for key in found if key in recorded}
    changes: list[str] = differences(before, found)
    if changes and not module.check_mode:
        _write(state / "host.json", {**found, "decisions": facts["decisions"]})
    cache = torch_cache(host)
    if cache != read_json(state / "torch.json") and not module.check_mode:
        _write(state / "torch.json", cache)
    module.exit_json(
        changed=bool(changes),
        recorded=bool(recorded),
        differences=changes,
        diff={"before": _text(before) if before else "", "after": _text(found)},
        plan=facts,
        ansible_facts={"vllm_host": host, "vllm_plan": facts},
    )


def _ask(python: str, releases: list[dict[str, Any]], installs: bool) -> dict[str, Answer]:
    """What there is of each wanted release, by its name; asked where one is to be chosen or nothing is built yet."""
    asked: dict[tuple[str, str], Answer] = {}
    found = {}
    for entry in releases:
        distribution, repository = entry["distribution"], entry.get("repository") or ""
        if installs or entry["version"] == NEWEST:
            if (distribution, repository) not in asked:
                answer = ask_repository(repository) if repository else ask_index(python, distribution)
                asked[distribution, repository] = answer
            found[entry["name"]] = asked[distribution, repository]
    return found


def _compiler_version(compiler: str) -> str:
    try:
        argv = [compiler, "-dumpfullversion", "-dumpversion"]
        return subprocess.run(argv, cwd="/", capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _text(record: dict[str, Any]) -> str:
    return json.dumps(record, indent=1, sort_keys=True) + "\n"


def _write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(_text(record))
    part.chmod(0o644)
    part.replace(path)


if __name__ == "__main__":
    main()
