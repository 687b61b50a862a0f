"""What a launch is to be: names checked, network chosen, and how many instances of the name are missing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet import aws_errors
from fleet.deep_learning_images import Image, choose_image, instance_architecture
from fleet.errors import ExitCode, FleetError

FLEET_TAG, ROLE_TAG, CAPABILITY_TAG = "vllm-fleet", "vllm-fleet-role", "vllm-fleet-capability"
PROFILE = "vllm-fleet-host"
# Beside what the image itself fills: 41 GiB is what preflight wants for a build from source (preflight_writes), 20 GiB
# a second release beside the first, 32 GiB a model that fills a GPU of 16 GiB and the swap to load it; rounded up.
ROOM_GIB = 100
_PROFILE_MEND = "the commands in docs/launch.md"
ALIVE = ("pending", "running", "stopping", "stopped")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_CAPABILITY = re.compile(r"\d{1,2}\.\d")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asks for; an empty text or 0 GiB leaves it to the launch."""

    name: str
    instance_type: str
    region: str
    fleet: str = "vllm"
    role: str = "vllm"
    capability: str = ""
    count: int = 1
    spot: bool = False
    subnet: str = ""
    image: str = ""
    volume_gib: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch that may go ahead; nothing is missing where `missing` is 0."""

    wanted: Wanted
    present: tuple[str, ...]
    stopped: tuple[str, ...]
    other_type: tuple[str, ...]
    missing: int
    image: Image | None = None
    vpc: str = ""
    subnet: str = ""
    volume_gib: int = 0

    @property
    def group_name(self) -> str:
        """The fleet's own security group, one for each VPC."""
        return f"vllm-fleet-{self.wanted.fleet}"


def check_name(name: str, option: str) -> None:
    """A name that is fit for tags, groups and host patterns; FleetError else."""
    if not _NAME.fullmatch(name):
        raise FleetError(
            f"{name!r} is no fit name, and up to 63 of a-z, 0-9 and - are wanted", where=option,
            mend="./runner.py launch vllm-1 --type g5g.4xlarge",
        )  # fmt: skip


def plan(wanted: Wanted, ec2: Any, ssm: Any, iam: Any) -> Plan:
    """Reads what AWS has and decides; changes nothing. Raises FleetError for what cannot be launched."""
    check_name(wanted.name, "NAME")
    check_name(wanted.fleet, "--fleet")
    if wanted.capability and not _CAPABILITY.fullmatch(wanted.capability):
        raise FleetError(
            f"{wanted.capability!r} is no compute capability", where="--capability", mend="--capability 7.5"
        )
    with aws_errors.told(wanted.region):
        found = named(ec2, wanted.fleet, [wanted.name])
        ids = tuple(one["InstanceId"] for one in found)
        stopped = tuple(one["InstanceId"] for one in found if one["State"]["Name"] in ("stopping", "stopped"))
        other = tuple(one["InstanceId"] for one in found if one["InstanceType"] != wanted.instance_type)
        if wanted.count <= len(found):
            return Plan(wanted, ids, stopped, other, 0)
        architecture = instance_architecture(ec2, wanted.instance_type, wanted.role, wanted.region)
        image = choose_image(ec2, ssm, wanted.image, architecture, wanted.region)
        check_profile(iam)
        vpc, subnet = network(ec2, wanted)
        refuse_inbound(ec2, f"vllm-fleet-{wanted.fleet}", vpc)
    volume = wanted.volume_gib or image.gib + ROOM_GIB
    if volume < image.gib:
        raise FleetError(
            f"a volume of {volume} GiB does not hold the image's {image.gib} GiB", where="--volume-gib",
            mend=f"--volume-gib {image.gib + ROOM_GIB}",
        )  # fmt: skip
    return Plan(wanted, ids, stopped, other, wanted.count - len(found), image, vpc, subnet, volume)


def named(ec2: Any, fleet: str, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Instances of the fleet with these names that are not ended, oldest first."""
    found = _alive(ec2, names, {"Name": f"tag:{FLEET_TAG}", "Values": [fleet]})
    return sorted(found, key=lambda one: (str(one["LaunchTime"]), one["InstanceId"]))


def refuse_untagged(ec2: Any, names: Sequence[str]) -> None:
    """An instance of these names that carries no fleet's tag is somebody else's, and is told before anything ends."""
    strays = [
        str(one["InstanceId"])
        for one in _alive(ec2, names)
        if not any(tag["Key"] == FLEET_TAG for tag in one.get("Tags", []))
    ]
    if strays:
        raise FleetError(
            f"{', '.join(strays)} lacks the tag {FLEET_TAG}, and only a fleet's instances are ended; nothing ended",
            where=", ".join(names),
            mend=f"aws ec2 describe-instances --instance-ids {' '.join(strays)}",
            code=ExitCode.REFUSED,
        )


def _alive(ec2: Any, names: Sequence[str], *more: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    filters = [
        {"Name": "tag:Name", "Values": list(names)}, {"Name": "instance-state-name", "Values": list(ALIVE)}, *more,
    ]  # fmt: skip
    pages = ec2.get_paginator("describe_instances").paginate(Filters=filters)
    return [one for page in pages for group in page["Reservations"] for one in group["Instances"]]


def check_profile(iam: Any) -> None:
    """The instance profile must be there, with its role: the launch makes no rights of its own."""
    try:
        found = iam.get_instance_profile(InstanceProfileName=PROFILE)["InstanceProfile"]
    except Exception as error:
        if aws_errors.code_of(error) != "NoSuchEntity":
            raise
        raise FleetError(
            f"there is no instance profile {PROFILE}", where="IAM",
            mend=_PROFILE_MEND,
        ) from error  # fmt: skip
    if not found["Roles"]:
        raise FleetError(f"the instance profile {PROFILE} has no role", where="IAM", mend=_PROFILE_MEND)


def network(ec2: Any, wanted: Wanted) -> tuple[str, str]:
    """VPC and subnet: the one asked for, else a default one in a zone that offers the type."""
    offers = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [wanted.instance_type]}]
    )["InstanceTypeOfferings"]
    zones = {one["Location"] for one in offers}
    if wanted.subnet:
        one = _subnet(ec2, wanted)
        if one["AvailabilityZone"] not in zones:
            offering = ", ".join(sorted(zones)) or "none"
            raise FleetError(
                f"{one['AvailabilityZone']} does not offer {wanted.instance_type}, and {offering} does",
                where=f"--subnet {wanted.subnet}", mend="--subnet with one of those zones, or none",
            )  # fmt: skip
        return one["VpcId"], one["SubnetId"]
    subnets = ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
    fit = sorted(
        (one["AvailabilityZone"], one["VpcId"], one["SubnetId"]) for one in subnets if one["AvailabilityZone"] in zones
    )
    if not fit:
        raise FleetError(
            f"no default subnet is in a zone that offers {wanted.instance_type} ({', '.join(sorted(zones)) or 'none'})",
            where=wanted.region, mend="--subnet subnet-...",
        )  # fmt: skip
    return fit[0][1], fit[0][2]


def _subnet(ec2: Any, wanted: Wanted) -> Mapping[str, Any]:
    try:
        return dict(ec2.describe_subnets(SubnetIds=[wanted.subnet])["Subnets"][0])
    except Exception as error:
        if not aws_errors.code_of(error).startswith("InvalidSubnetI"):
            raise
        raise FleetError(
            f"{wanted.region} has no subnet {wanted.subnet!r}", where="--subnet",
            mend=f"aws ec2 describe-subnets --region {wanted.region} --output table",
        ) from error  # fmt: skip


def refuse_inbound(ec2: Any, name: str, vpc: str) -> None:
    """The fleet's group lets nothing in; a rule that somebody added is told, and nothing is launched behind it."""
    groups = ec2.describe_security_groups(
        Filters=[{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc]}]
    )["SecurityGroups"]
    for group in groups:
        if group["IpPermissions"]:
            raise FleetError(
                f"{len(group['IpPermissions'])} inbound rules, and none is wanted",
                where=f"{name} ({group['GroupId']})",
                mend=f"aws ec2 describe-security-group-rules --filters Name=group-id,Values={group['GroupId']}",
                code=ExitCode.REFUSED,
            )  # fmt: skip


def variables(made: Plan) -> dict[str, Any]:
    """The playbook's variables. Raises AssertionError where nothing is to launch."""
    assert made.image is not None  # noqa: S101
    wanted, image = made.wanted, made.image
    return {
        "launch_region": wanted.region,
        "launch_group": made.group_name,
        "launch_vpc": made.vpc,
        "launch_subnet": made.subnet,
        "launch_type": wanted.instance_type,
        "launch_image": image.id,
        "launch_count": made.missing,
        "launch_profile": PROFILE,
        "launch_root_device": image.root_device,
        "launch_volume_gib": made.volume_gib,
        "launch_spot": wanted.spot,
        "launch_tags": {
            "Name": wanted.name,
            FLEET_TAG: wanted.fleet,
            ROLE_TAG: wanted.role,
            **({CAPABILITY_TAG: wanted.capability} if wanted.capability else {}),
            "vllm-fleet-image": image.name[:256],
            "vllm-fleet-image-chosen": f"{image.way}: {image.why}"[:256],
        },
    }
