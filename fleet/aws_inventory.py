"""Why an inventory of EC2 came to nothing: EC2 itself is asked, filter by filter, once Ansible has found no host."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template

from fleet import aws, aws_errors
from fleet.errors import FleetError

PLUGIN = "amazon.aws.aws_ec2"
ROLE_TAG = "vllm-fleet-role"
ROLES = ("vllm", "builder")
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Source:
    """What an inventory file asks EC2 for: regions and filters, in the file's order."""

    path: Path
    regions: tuple[str, ...]
    filters: dict[str, tuple[str, ...]]

    @property
    def where(self) -> str:
        """The file and its regions, for errors."""
        return f"{self.path} in {', '.join(self.regions)}"


def is_ec2(path: Path) -> bool:
    """Whether the inventory is EC2's."""
    return path.name.endswith(("aws_ec2.yml", "aws_ec2.yaml")) and _read(path).get("plugin") == PLUGIN


def explain(inventories: Iterable[Path], limit: str | None) -> None:
    """Says why no host came; returns where EC2 does have hosts for these inventories, or none of them is EC2's.

    Raises:
        FleetError: what emptied the inventory, or what AWS refuses.
    """
    sources = [_source(path) for path in inventories if is_ec2(path)]
    found = [instance for source in sources for instance in _asked(source)]
    if found and limit:
        raise FleetError(
            f"--limit {limit} matches none of the fleet's {len(found)} running instances: {_some(_ids(found))}",
            where="; ".join(source.where for source in sources),
            mend=f".venv/bin/ansible-inventory -i {sources[0].path} --graph",
        )


def _asked(source: Source) -> list[dict[str, Any]]:
    """The instances that all filters leave, each with a role."""
    left: list[dict[str, Any]] = []
    filters: dict[str, tuple[str, ...]] = {}
    for name, values in source.filters.items():
        before, matched = left, dict(filters)
        filters[name] = values
        left = [instance for region in source.regions for instance in _instances(region, filters)]
        if not left:
            raise _emptied(source, matched, (name, values), before)
    without = [instance for instance in left if _tag(instance, ROLE_TAG) not in ROLES]
    if without:
        first = without[0]["InstanceId"]
        raise FleetError(
            f"{len(without)} of {len(left)} running instances have no tag {ROLE_TAG} with vllm or builder: "
            f"{_some(_ids(without))}",
            where=source.where,
            mend=f"aws ec2 create-tags --resources {first} --tags Key={ROLE_TAG},Value=vllm",
        )
    return left


def _emptied(
    source: Source,
    matched: dict[str, tuple[str, ...]],
    by: tuple[str, tuple[str, ...]],
    before: Sequence[dict[str, Any]],
) -> FleetError:
    """The error that names the filter which left nothing, and how many there were before it."""
    name, values = _words(*by), f"Name={by[0]},Values={','.join(by[1])}"
    look = f"aws ec2 describe-instances --region {source.regions[0]}"
    if not matched:
        return FleetError(
            f"no instance has {name}, and one at least is wanted",
            where=source.where,
            mend=f"export AWS_REGION=REGION of the fleet, or tag instances: {look} --filters {values}",
        )
    states = Counter(str(instance["State"]["Name"]) for instance in before)
    counted = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    had = " and ".join(_words(*item) for item in matched.items())
    start = by[0] == "instance-state-name" and states.get("stopped")
    stopped = [instance["InstanceId"] for instance in before if instance["State"]["Name"] == "stopped"]
    return FleetError(
        f"{len(before)} with {had} ({counted}), and none of them has {name}",
        where=source.where,
        mend=f"aws ec2 start-instances --instance-ids {' '.join(stopped)}" if start else f"{look} --filters {values}",
    )


def _words(name: str, values: tuple[str, ...]) -> str:
    if name == "tag-key":
        return f"the tag {' or '.join(values)}"
    return f"{name} {' or '.join(values)}"


def _instances(region: str, filters: dict[str, tuple[str, ...]]) -> Iterator[dict[str, Any]]:
    asked = [{"Name": name, "Values": list(values)} for name, values in filters.items()]
    try:
        with aws_errors.told(region, who="inventory"):
            for page in aws.client("ec2", region).get_paginator("describe_instances").paginate(Filters=asked):
                for reservation in page["Reservations"]:
                    yield from reservation["Instances"]
    except FleetError:
        known = _regions()
        if region in known:
            raise
        near = difflib.get_close_matches(region, known, 1) or ["us-east-1"]
        raise FleetError(
            f"no region {region!r} is known (nearest: {near[0]})",
            where=region,
            mend=f"export AWS_REGION={near[0]}",
            who="inventory",
        ) from None


def _regions() -> set[str]:
    session = boto3.session.Session()
    return {name for part in session.get_available_partitions() for name in session.get_available_regions("ec2", part)}


def _source(path: Path) -> Source:
    """The file's regions and filters, its templates read as Ansible reads them.

    Raises FleetError where a template has no value (no region), or where the file leaves out what is asked for here.
    """
    options = _read(path)
    templar = Templar(loader=DataLoader())
    try:
        regions = [str(templar.template(trust_as_template(str(word)))) for word in options.get("regions") or []]
        filters = {
            name: tuple(
                str(templar.template(trust_as_template(str(word))))
                for word in (value if isinstance(value, list) else [value])
            )
            for name, value in (options.get("filters") or {}).items()
        }
    except AnsibleError as error:
        raise FleetError(
            " ".join(str(error).split()), where=str(path), mend="export AWS_REGION=us-east-1", who="inventory"
        ) from error
    if not regions:
        raise FleetError("no regions are listed, and one at least is wanted", where=str(path), mend=f"edit {path}")
    return Source(path, tuple(dict.fromkeys(regions)), filters)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _ids(instances: Iterable[dict[str, Any]]) -> list[str]:
    return [str(instance["InstanceId"]) for instance in instances]


def _tag(instance: dict[str, Any], name: str) -> str | None:
    return next((tag["Value"] for tag in instance.get("Tags", []) if tag["Key"] == name), None)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
