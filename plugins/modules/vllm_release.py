#!/usr/bin/python
"""Ansible module: the releases a host should have are built, by detached units that outlive the connection."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.release_plan import Release, Torch, plan_release

DOCUMENTATION = r"""
module: vllm_release
short_description: Plan, build and wait for vLLM releases on a host
description:
  - C(planned) says which releases are there and which are missing. C(built) starts the missing ones' build as a
    transient systemd unit, one at a time, and returns after O(wait_seconds) at most; ask again until RV(finished).
options:
  releases: {type: list, elements: dict, required: true, description: The wanted releases.}
  torch: {type: dict, required: true, description: The torch that preflight found.}
  arch_list: {type: str, required: true, description: CUDA capabilities to compile for.}
  root: {type: path, required: true, description: Folder of the releases.}
  builds: {type: path, required: true, description: "Folder of the builds' progress, logs and sources."}
  tools: {type: path, required: true, description: Environment of the build's own tools.}
  builder: {type: path, required: true, description: The builder program on the host.}
  mib_per_job: {type: int, default: 2048, description: "Memory for each compile job, MiB."}
  wait_seconds: {type: int, default: 15, description: "Longest wait of one call, seconds."}
  state: {type: str, choices: [planned, built], default: planned, description: What to reach.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_release: {state: planned, releases: [], torch: {}, arch_list: '7.5'}
"""
RETURN = "missing: {type: list, returned: always, description: Names of releases not built yet.}"


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "releases": {"type": "list", "elements": "dict", "required": True},
            "torch": {"type": "dict", "required": True},
            "arch_list": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "builds": {"type": "path", "required": True},
            "tools": {"type": "path", "required": True},
            "builder": {"type": "path", "required": True},
            "mib_per_job": {"type": "int", "default": 2048},
            "wait_seconds": {"type": "int", "default": 15},
            "state": {"type": "str", "choices": ["planned", "built"], "default": "planned"},
        },
        supports_check_mode=True,
    )
    p = module.params
    found = p["torch"]
    torch = Torch(found["python"], found["site_packages"], found["version"], found.get("cuda"))
    host = {
        "architecture": platform.machine(),
        "python": ".".join(Path(found["site_packages"]).parent.name.removeprefix("python").split(".")[:2]),
        "arch_list": p["arch_list"],
    }
    releases = [plan_release(wanted, torch, host, Path(p["root"])) for wanted in p["releases"]]
    missing = [release for release in releases if release.record is None]
    progress: list[dict[str, Any]] = []
    if p["state"] == "built" and missing and not module.check_mode:
        for release in missing:
            progress.append(_advance(module, release, deadline=time.monotonic() + p["wait_seconds"]))
            if release.record is None:
                break
        missing = [release for release in releases if release.record is None]
    described = [_describe(release) for release in releases]
    module.exit_json(
        changed=False,
        ansible_facts={"vllm_releases": described},
        finished=not missing,
        missing=[release.name for release in missing],
        progress=progress,
        releases=described,
    )


def _describe(release: Release) -> dict[str, Any]:
    record = release.record
    known = {
        "name": release.name,
        "build_id": release.build_id,
        "path": str(release.path),
        "serve": release.serve,
    }
    if record is None:
        return {**known, "built": False}
    keys = (
        "python",
        "site_packages",
        "version",
        "method",
        "distribution",
        "target_device",
        "warnings",
        "seconds",
    )
    return {**known, "built": True, **{key: record[key] for key in keys}}


def _advance(module: AnsibleModule, release: Release, deadline: float) -> dict[str, Any]:
    """Starts the build where it is not running and waits for its end, until the deadline."""
    home = Path(module.params["builds"]) / release.build_id
    unit = f"vllm-build-{release.build_id}.service"
    if not _active(unit):
        _start(module, release, home, unit)
    while time.monotonic() < deadline:
        if not _active(unit):
            break
        time.sleep(0.5)
    status = _status(home)
    if not _active(unit) and release.record is None:
        what = status.get("what") or "the build ended without saying why (killed?)"
        where = status.get("where") or str(home / "build.log")
        mend = status.get("mend") or "converge again; it goes on with what is there"
        module.fail_json(
            msg=f"vllm_source_build: {release.name} was not built: {what}\n  where: {where}\n  mend:  {mend}",
            status=status,
        )
    return {"release": release.name, **status}


def _start(module: AnsibleModule, release: Release, home: Path, unit: str) -> None:
    home.mkdir(parents=True, exist_ok=True)
    spec = {**release.spec, "tools": module.params["tools"], "mib_per_job": module.params["mib_per_job"]}
    (home / "spec.json").write_text(json.dumps(spec, indent=1, sort_keys=True))
    (home / "status.json").unlink(missing_ok=True)
    module.run_command(["systemctl", "reset-failed", unit])
    module.run_command(
        [
            "systemd-run", f"--unit={unit}", "--collect", "--property=Type=exec", "--property=KillMode=control-group",
            "--property=Nice=5", "/usr/bin/python3", "-Es", module.params["builder"], str(home / "spec.json"),
        ],
        check_rc=True,
    )  # fmt: skip


def _active(unit: str) -> bool:
    done = subprocess.run(["systemctl", "is-active", "--quiet", unit], check=False)
    return done.returncode == 0


def _status(home: Path) -> dict[str, Any]:
    try:
        status: dict[str, Any] = json.loads((home / "status.json").read_text())
    except (OSError, ValueError):
        return {}
    return status


if __name__ == "__main__":
    main()
