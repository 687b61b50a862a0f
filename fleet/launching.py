"""What a launch is to be: names and type checked, image chosen, and how many instances of the name are missing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet import aws_errors
from fleet.errors import ExitCode, FleetError

FLEET_TAG, ROLE_TAG = "vllm-fleet", "vllm-fleet-role"
PROFILE = "vllm-fleet-host"
UBUNTU = "24.04"
# Beside what the image itself fills: 41 GiB is what preflight wants for a build from source (preflight_writes), 20 GiB
# a second release beside the first, 32 GiB a model that fills a GPU of 16 GiB and the swap to load it; rounded up.
ROOM_GIB = 100
ALIVE = ("pending", "running", "stopping", "stopped")
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_PARAMETER = re.compile(
    r".*/oss-nvidia-driver-gpu-pytorch-(\d+(?:\.\d+)*)-ubuntu-" + re.escape(UBUNTU) + "/latest/ami-id"
)
_IMAGE_NAMES = {
    "arm64": f"Deep Learning ARM64 AMI OSS Nvidia Driver GPU PyTorch * (Ubuntu {UBUNTU}) *",
    "x86_64": f"Deep Learning OSS Nvidia Driver AMI GPU PyTorch * (Ubuntu {UBUNTU}) *",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asks for; an empty text or 0 GiB leaves it to the launch."""

    name: str
    instance_type: str
    region: str
    fleet: str = "vllm"
    role: str = "vllm"
    count: int = 1
    spot: bool = False
    subnet: str = ""
    image: str = ""
    volume_gib: int = 0


@dataclass(frozen=True, slots=True)
class Image:
    """An image, and by which way and why it was chosen."""

    id: str
    name: str
    root_device: str
    gib: int
    way: str
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch that may go ahead; nothing is missing where `missing` is 0."""

    wanted: Wanted
    present: tuple[str, ...]
    stopped: tuple[str, ...]
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
    with aws_errors.told(wanted.region):
        found = named(ec2, wanted.fleet, [wanted.name])
        ids = tuple(one["InstanceId"] for one in found)
        stopped = tuple(one["InstanceId"] for one in found if one["State"]["Name"] in ("stopping", "stopped"))
        if wanted.count <= len(found):
            return Plan(wanted, ids, stopped, 0)
        architecture = instance_architecture(ec2, wanted)
        image = choose_image(ec2, ssm, wanted, architecture)
        check_profile(iam)
        vpc, subnet = network(ec2, wanted)
        refuse_inbound(ec2, f"vllm-fleet-{wanted.fleet}", vpc)
    volume = wanted.volume_gib or image.gib + ROOM_GIB
    if volume < image.gib:
        raise FleetError(
            f"a volume of {volume} GiB does not hold the image's {image.gib} GiB", where="--volume-gib",
            mend=f"--volume-gib {image.gib + ROOM_GIB}",
        )  # fmt: skip
    return Plan(wanted, ids, stopped, wanted.count - len(found), image, vpc, subnet, volume)


def named(ec2: Any, fleet: str, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Instances of the fleet with these names that are not ended, oldest first."""
    filters = [
        {"Name": f"tag:{FLEET_TAG}", "Values": [fleet]},
        {"Name": "tag:Name", "Values": list(names)},
        {"Name": "instance-state-name", "Values": list(ALIVE)},
    ]
    pages = ec2.get_paginator("describe_instances").paginate(Filters=filters)
    found = [one for page in pages for group in page["Reservations"] for one in group["Instances"]]
    return sorted(found, key=lambda one: (str(one["LaunchTime"]), one["InstanceId"]))


def instance_architecture(ec2: Any, wanted: Wanted) -> str:
    """`arm64` or `x86_64`; refuses a type that is unknown, not offered, or has no GPU for a server."""
    kind = wanted.instance_type
    try:
        told = ec2.describe_instance_types(InstanceTypes=[kind])["InstanceTypes"]
    except Exception as error:
        if aws_errors.code_of(error) not in ("InvalidInstanceType", "InvalidParameterValue"):
            raise
        told = []
    if not told:
        raise FleetError(
            f"{wanted.region} has no instance type {kind!r}", where="--type",
            mend=f"aws ec2 describe-instance-type-offerings --region {wanted.region} --output table",
        )  # fmt: skip
    gpus = (told[0].get("GpuInfo") or {}).get("Gpus", [])
    if wanted.role == "vllm" and not any(gpu.get("Manufacturer") == "NVIDIA" for gpu in gpus):
        raise FleetError(
            f"{kind} has no NVIDIA GPU, and a server wants one", where="--type",
            mend="--type g5g.4xlarge, or --role builder",
        )  # fmt: skip
    for architecture in told[0]["ProcessorInfo"]["SupportedArchitectures"]:
        if architecture in _IMAGE_NAMES:
            return str(architecture)
    raise FleetError(f"{kind} is neither arm64 nor x86_64", where="--type", mend="--type g5g.4xlarge")


def newest_parameter(parameters: Iterable[Mapping[str, str]]) -> tuple[str, str] | None:
    """Name and image of the parameter with the highest PyTorch; those of old versions stay behind."""
    fit = [(match[1], one) for one in parameters if (match := _PARAMETER.fullmatch(one["Name"]))]
    if not fit:
        return None
    best = max(fit, key=lambda pair: [int(part) for part in pair[0].split(".")])[1]
    return best["Name"], best["Value"]


def choose_image(ec2: Any, ssm: Any, wanted: Wanted, architecture: str) -> Image:
    """The image asked for, else the newest by AWS's public parameter, else the newest by name."""
    if wanted.image:
        return _checked(_images(ec2, ImageIds=[wanted.image]), architecture, "asked", "--image names it", wanted.region)
    reason = "AWS has no public parameter for it here"
    pages = ssm.get_paginator("get_parameters_by_path").paginate(
        Path=f"/aws/service/deeplearning/ami/{architecture}", Recursive=True
    )
    newest = newest_parameter(one for page in pages for one in page["Parameters"])
    if newest:
        found = _images(ec2, ImageIds=[newest[1]])
        if any(_usable(one, architecture) for one in found):
            return _checked(found, architecture, "parameter", f"highest PyTorch: {newest[0]}", wanted.region)
        reason = f"{newest[0]} names {newest[1]}, which is not available"
    found = _images(
        ec2,
        Owners=["amazon"],
        Filters=[
            {"Name": "name", "Values": [_IMAGE_NAMES[architecture]]},
            {"Name": "state", "Values": ["available"]},
            {"Name": "architecture", "Values": [architecture]},
        ],
    )
    return _checked(found, architecture, "search", f"newest by CreationDate; {reason}", wanted.region)


def _images(ec2: Any, **query: Any) -> list[Mapping[str, Any]]:
    try:
        return list(ec2.describe_images(**query)["Images"])
    except Exception as error:
        if aws_errors.code_of(error).startswith("InvalidAMIID"):
            return []
        raise


def _usable(image: Mapping[str, Any], architecture: str) -> bool:
    return bool(image["State"] == "available" and image["Architecture"] == architecture)


def _checked(found: list[Mapping[str, Any]], architecture: str, way: str, why: str, region: str) -> Image:
    fit = [one for one in found if _usable(one, architecture)]
    if not fit:
        raise FleetError(
            f"no available {architecture} image ({way}: {why})", where=region, mend="--image ami-...",
        )  # fmt: skip
    best = max(fit, key=lambda one: (str(one["CreationDate"]), one["ImageId"]))
    root = str(best["RootDeviceName"])
    sizes = [
        one["Ebs"].get("VolumeSize", 0)
        for one in best["BlockDeviceMappings"]
        if one.get("DeviceName") == root and "Ebs" in one
    ]
    return Image(best["ImageId"], best.get("Name", ""), root, max(sizes, default=0), way, why)


def check_profile(iam: Any) -> None:
    """The instance profile must be there: the launch makes no rights of its own."""
    try:
        iam.get_instance_profile(InstanceProfileName=PROFILE)
    except Exception as error:
        if aws_errors.code_of(error) != "NoSuchEntity":
            raise
        raise FleetError(
            f"there is no instance profile {PROFILE}", where="IAM",
            mend=f"aws iam create-instance-profile --instance-profile-name {PROFILE}",
        ) from error  # fmt: skip


def network(ec2: Any, wanted: Wanted) -> tuple[str, str]:
    """VPC and subnet: the one asked for, else a default one in a zone that offers the type."""
    if wanted.subnet:
        one = ec2.describe_subnets(SubnetIds=[wanted.subnet])["Subnets"][0]
        return one["VpcId"], one["SubnetId"]
    offers = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [wanted.instance_type]}]
    )["InstanceTypeOfferings"]
    zones = {one["Location"] for one in offers}
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
            "vllm-fleet-image": image.name[:256],
            "vllm-fleet-image-chosen": f"{image.way}: {image.why}"[:256],
        },
    }
