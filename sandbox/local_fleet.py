"""The sandbox's hosts as a fleet of the local AWS: what `-i local-aws` stands for."""

from __future__ import annotations

import os

import boto3

from fleet.paths import PROJECT
from fleet.run_command import document
from fleet.steps import Steps
from sandbox import world
from sandbox.standins import aws
from sandbox.world import World

HOSTS = 3


def up(steps: Steps) -> World:
    """Starts the sandbox with the fleet's three hosts, its document installed; this process then asks the local AWS."""
    found = world.up(steps, hosts=HOSTS)
    use(found)
    document.install(boto3.client("ssm"), aws.REGION)
    return found


def use(found: World) -> None:
    """Makes this process, and what it starts, ask the local AWS and nothing else."""
    os.environ.update(environment(found))
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION"):
        os.environ.pop(name, None)


def environment(found: World) -> dict[str, str]:
    """How the tools of AWS find it; the keys are good for nothing elsewhere."""
    host = found.aws_url.split("//")[1].split(":")[0]
    return {
        "AWS_ENDPOINT_URL": found.aws_url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": aws.REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SESSION_MANAGER_PLUGIN": str(PROJECT / "sandbox" / "standins" / "session-manager-plugin"),
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), host])),
        "no_proxy": ",".join(filter(None, [os.environ.get("no_proxy"), host])),
    }
