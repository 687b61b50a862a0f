"""What an inventory holds, as Ansible reads it: its groups, their members, and what a limit leaves of these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.inventory.manager import InventoryManager
from ansible.parsing.dataloader import DataLoader

from fleet import aws_inventory
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT
from fleet.requests import Request


def listed(request: Request) -> dict[str, Any]:
    """`ansible-inventory --list`, as a push run would read it. Raises FleetError where it cannot be read."""
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


def grouped(found: dict[str, Any]) -> dict[str, list[str]]:
    """The members of every group, those of the groups below it among them, in the inventory's order."""
    return {group: _members(found, group) for group in sorted(set(found) - {"_meta", "all"})}


def within(limit: str | None, groups: Mapping[str, Sequence[str]]) -> list[str]:
    """The hosts that a limit leaves, by Ansible's own reading of it; `groups` has those that it leaves out too."""
    manager = InventoryManager(loader=DataLoader(), sources=None, parse=False)
    for group, members in groups.items():
        manager.add_group(group)
        for name in members:
            manager.add_host(name, group)
    manager.reconcile_inventory()
    manager.subset(limit)
    return [str(host.name) for host in manager.get_hosts()]


def hosts_of(request: Request, group: str) -> list[str]:
    """The hosts of a group that the request's limit leaves. Raises FleetError where none is left."""
    groups = grouped(listed(request))
    names = [name for name in within(request.limit, groups) if name in groups.get(group, [])]
    if not names:
        aws_inventory.explain(request.inventories, request.limit)
        raise FleetError(
            f"no host of the group {group} is left{f' by --limit {request.limit}' if request.limit else ''}",
            where=", ".join(str(path) for path in request.inventories),
            mend=f".venv/bin/ansible-inventory -i {request.inventories[0]} --graph",
        )
    return names


def _members(found: dict[str, Any], group: str) -> list[str]:
    here = found.get(group, {})
    below = [name for child in here.get("children", []) for name in _members(found, child)]
    return list(dict.fromkeys([*here.get("hosts", []), *below]))
