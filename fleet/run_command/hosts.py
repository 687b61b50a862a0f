"""The hosts of a run by Systems Manager: from the inventory, with all that Ansible resolved for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet import aws_inventory, inventories
from fleet.errors import FleetError
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
    listed = inventories.listed(request)
    variables = listed.get("_meta", {}).get("hostvars", {})
    groups = inventories.grouped(listed)
    left = inventories.within(request.limit, groups)
    names = [name for name in left if any(name in groups.get(role, []) for role in _ROLES)]
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
