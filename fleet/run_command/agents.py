"""What AWS knows of instances and their agents, asked in pages and only where something depends on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet import aws
from fleet.aws_errors import told

# DescribeInstanceInformation takes this many ids in a filter.
_IDS = 50


@dataclass(frozen=True, slots=True)
class Agent:
    """A managed instance: whether its agent pings, and its system by AWS's words."""

    online: bool
    platform: str
    version: str


def agents(region: str, ids: Sequence[str]) -> dict[str, Agent]:
    """The instances that Systems Manager manages."""
    return {
        name: Agent(item["PingStatus"] == "Online", item.get("PlatformName", ""), item.get("PlatformVersion", ""))
        for name, item in information(region, ids).items()
    }


def information(region: str, ids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """What Systems Manager tells of the instances that it manages, by AWS's own names."""
    found = {}
    pages = aws.client("ssm", region).get_paginator("describe_instance_information")
    with told(f"Systems Manager in {region}"):
        for begin in range(0, len(ids), _IDS):
            wanted = [{"Key": "InstanceIds", "Values": list(ids[begin : begin + _IDS])}]
            for page in pages.paginate(Filters=wanted):
                found.update({item["InstanceId"]: item for item in page["InstanceInformationList"]})
    return found


def states(region: str, ids: Sequence[str]) -> dict[str, str]:
    """The instances' states by EC2's words; one that EC2 no longer knows is left out."""
    pages = aws.client("ec2", region).get_paginator("describe_instances")
    wanted = [{"Name": "instance-id", "Values": list(ids)}]
    with told(f"EC2 in {region}"):
        return {
            instance["InstanceId"]: instance["State"]["Name"]
            for page in pages.paginate(Filters=wanted)
            for reservation in page["Reservations"]
            for instance in reservation["Instances"]
        }
