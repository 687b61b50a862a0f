"""The hosts of a run by Systems Manager: from the inventory, with all that Ansible resolved for each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader

from fleet import aws_inventory
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT
from fleet.requests import Request

# The groups that the playbooks run on.
_ROLES = ("vllm", "builder")


@dataclass(frozen=True, slots=True)
class Host:
    """One instance: its id, region and architecture (uname's word), its variables."""

    instance_id: str
    region: str
    architecture: str
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Resolved:
    """The hosts of a run, and the members of every group of the inventory: a role may ask which hosts build."""

    hosts: tuple[Host, ...]
    groups: dict[str, list[str]]


def resolved(request: Request) -> Resolved:
    """The request's hosts; raises FleetError for an inventory that does not parse, or that has hosts not on EC2."""
    listed = _listed(request)
    variables = listed.get("_meta", {}).get("hostvars", {})
    groups = {group: _members(listed, group) for group in sorted(set(listed) - {"_meta", "all"})}
    names = [name for name in _within(request.limit, groups) if any(name in groups.get(role, []) for role in _ROLES)]
    if not names:
        aws_inventory.explain(request.inventories, request.limit)
    others = [name for name in names if name not in groups.get("aws_ec2", [])]
    if others:
        raise FleetError(
            f"{', '.join(others)} and {len(names) - len(others)} EC2 instances in one run",
            where=", ".join(str(path) for path in request.inventories),
            mend=f"{request.again()} --limit aws_ec2; then the others by themselves",
        )
    hosts = {name: _host(name, variables.get(name, {})) for name in names}
    # On a host the instances' ids are the names.
    ids = {name: host.instance_id for name, host in hosts.items()}
    return Resolved(
        tuple(hosts.values()), {group: [ids.get(name, name) for name in found] for group, found in groups.items()}
    )


def _within(limit: str | None, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The hosts that a limit leaves, by Ansible's own reading of it; `groups` has those that it leaves out too."""
    manager = InventoryManager(loader=DataLoader(), sources=None, parse=False)
    for group, members in groups.items():
        manager.add_group(group)
        for name in members:
            manager.add_host(name, group)
    manager.reconcile_inventory()
    manager.subset(limit)
    return [str(host.name) for host in manager.get_hosts()]


def _host(name: str, variables: dict[str, Any]) -> Host:
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
    return Host(instance_id, region, architecture, variables)


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
