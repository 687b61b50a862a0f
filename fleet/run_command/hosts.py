"""The hosts of a run by Systems Manager: from the inventory, with all that Ansible resolved for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleet import aws_inventory
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT
from fleet.requests import Request

# The groups that the playbooks run on.
_ROLES = ("vllm", "builder")


@dataclass(frozen=True, slots=True)
class Host:
    """One instance: its id, region and architecture (uname's word), its groups, its variables."""

    instance_id: str
    region: str
    architecture: str
    groups: tuple[str, ...]
    variables: dict[str, Any]


def resolved(request: Request) -> list[Host]:
    """The request's hosts; raises FleetError for an inventory that does not parse, or that has hosts not on EC2."""
    listed = _listed(request)
    variables = listed.get("_meta", {}).get("hostvars", {})
    groups: dict[str, list[str]] = {}
    for group in sorted(set(listed) - {"_meta", "all"}):
        for name in _members(listed, group):
            groups.setdefault(name, []).append(group)
    names = [name for name, found in groups.items() if set(found) & set(_ROLES)]
    others = [name for name in names if "aws_ec2" not in groups[name]]
    if others:
        raise FleetError(
            f"{', '.join(others)} and {len(names) - len(others)} EC2 instances in one run",
            where=", ".join(str(path) for path in request.inventories),
            mend=f"{request.again()} --limit aws_ec2; then the others by themselves",
        )
    return [_host(name, tuple(groups[name]), variables.get(name, {})) for name in names]


def _host(name: str, groups: tuple[str, ...], variables: dict[str, Any]) -> Host:
    try:
        region = str(_plain(variables["placement"]["region"]))
        found = str(_plain(variables["architecture"]))
        architecture = {"arm64": "aarch64"}.get(found, found)
        instance_id = str(_plain(variables["instance_id"]))
    except (KeyError, TypeError):
        raise FleetError(
            "no instance_id, architecture or placement.region, and all are wanted",
            where=f"{name} variables of the inventory",
            mend="use inventory/aws_ec2.yml",
        ) from None
    return Host(instance_id, region, architecture, groups, variables)


def _plain(value: Any) -> Any:
    """A value without Ansible's mark of what came from outside; hosts get their variables with it."""
    return value["__ansible_unsafe"] if isinstance(value, dict) and "__ansible_unsafe" in value else value


def _members(listed: dict[str, Any], group: str) -> list[str]:
    """The hosts of a group and of those below it."""
    here = listed.get(group, {})
    below = [name for child in here.get("children", []) for name in _members(listed, child)]
    return list(dict.fromkeys([*here.get("hosts", []), *below]))


def _listed(request: Request) -> dict[str, Any]:
    """`ansible-inventory --list`, as a push run would read it."""
    argv = [
        str(Path(sys.executable).parent / "ansible-inventory"),
        "--list",
        "--playbook-dir",
        str(PROJECT / "playbooks"),
    ]
    argv += [word for path in request.inventories for word in ("-i", str(path))]
    argv += ["--limit", request.limit] if request.limit else []
    done = subprocess.run(
        argv, cwd=PROJECT, env={**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        aws_inventory.explain(request.inventories, request.limit)
        raise FleetError(
            f"the inventory cannot be read: {done.stderr.strip()[-900:]}",
            where=", ".join(str(path) for path in request.inventories),
            mend=f".venv/bin/ansible-inventory -i {request.inventories[0]} --graph",
            code=ExitCode.BAD_INPUT,
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found
