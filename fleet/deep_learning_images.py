"""Which image an instance type is to start: its architecture, and the newest Deep Learning AMI for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fleet import aws_errors
from fleet.errors import FleetError

UBUNTU = "24.04"
_PARAMETER = re.compile(
    r".*/oss-nvidia-driver-gpu-pytorch-(\d+(?:\.\d+)*)-ubuntu-" + re.escape(UBUNTU) + "/latest/ami-id"
)
# NVIDIA's open kernel modules, which these images carry, need Turing or newer; names as DescribeInstanceTypes has them.
_BEFORE_TURING = ("K80", "M60", "V100")
_NAMES = {
    "arm64": f"Deep Learning ARM64 AMI OSS Nvidia Driver GPU PyTorch * (Ubuntu {UBUNTU}) *",
    "x86_64": f"Deep Learning OSS Nvidia Driver AMI GPU PyTorch * (Ubuntu {UBUNTU}) *",
}


@dataclass(frozen=True, slots=True)
class Image:
    """An image, and by which way and why it was chosen."""

    id: str
    name: str
    root_device: str
    gib: int
    way: str
    why: str


def instance_architecture(ec2: Any, kind: str, role: str, region: str) -> str:
    """`arm64` or `x86_64`; refuses a type that is unknown, not offered, or has no GPU for a server."""
    try:
        told = ec2.describe_instance_types(InstanceTypes=[kind])["InstanceTypes"]
    except Exception as error:
        if aws_errors.code_of(error) not in ("InvalidInstanceType", "InvalidParameterValue"):
            raise
        told = []
    if not told:
        raise FleetError(
            f"{region} has no instance type {kind!r}", where="--type",
            mend=f"aws ec2 describe-instance-type-offerings --region {region} --output table",
        )  # fmt: skip
    gpus = (told[0].get("GpuInfo") or {}).get("Gpus", [])
    if role == "vllm" and not any(gpu.get("Manufacturer") == "NVIDIA" for gpu in gpus):
        raise FleetError(
            f"{kind} has no NVIDIA GPU, and a server wants one", where="--type",
            mend="--type g5g.4xlarge, or --role builder",
        )  # fmt: skip
    old = sorted({gpu["Name"] for gpu in gpus if gpu.get("Name") in _BEFORE_TURING})
    if role == "vllm" and old:
        raise FleetError(
            f"{kind} has {', '.join(old)}, and the image's open driver wants Turing or newer", where="--type",
            mend="--type g5g.4xlarge",
        )  # fmt: skip
    for architecture in told[0]["ProcessorInfo"]["SupportedArchitectures"]:
        if architecture in _NAMES:
            return str(architecture)
    raise FleetError(f"{kind} is neither arm64 nor x86_64", where="--type", mend="--type g5g.4xlarge")


def newest_parameter(parameters: Iterable[Mapping[str, str]]) -> tuple[str, str] | None:
    """Name and image of the parameter with the highest PyTorch; those of old versions stay behind."""
    fit = [(match[1], one) for one in parameters if (match := _PARAMETER.fullmatch(one["Name"]))]
    if not fit:
        return None
    best = max(fit, key=lambda pair: [int(part) for part in pair[0].split(".")])[1]
    return best["Name"], best["Value"]


def choose_image(ec2: Any, ssm: Any, asked: str, architecture: str, region: str) -> Image:
    """The image asked for, else the newest by AWS's public parameter, else the newest by name."""
    if asked:
        return _checked(_images(ec2, ImageIds=[asked]), architecture, "asked", "--image names it", region)
    reason = "AWS has no public parameter for it here"
    pages = ssm.get_paginator("get_parameters_by_path").paginate(
        Path=f"/aws/service/deeplearning/ami/{architecture}", Recursive=True
    )
    newest = newest_parameter(one for page in pages for one in page["Parameters"])
    if newest:
        found = _images(ec2, ImageIds=[newest[1]])
        if any(_usable(one, architecture) for one in found):
            return _checked(found, architecture, "parameter", f"highest PyTorch: {newest[0]}", region)
        reason = f"{newest[0]} names {newest[1]}, which is not available"
    found = _images(
        ec2,
        Owners=["amazon"],
        Filters=[
            {"Name": "name", "Values": [_NAMES[architecture]]},
            {"Name": "state", "Values": ["available"]},
            {"Name": "architecture", "Values": [architecture]},
        ],
    )
    return _checked(found, architecture, "search", f"newest by CreationDate; {reason}", region)


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
