"""Launch and terminate against the local AWS: real boto3, real HTTP, real Ansible."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.amis import Ami
from typer.testing import CliRunner

from fleet import launching
from fleet.deep_learning_images import choose_image, newest_parameter
from fleet.errors import ExitCode, FleetError
from fleet.launch_cli import app
from fleet.paths import PROJECT
from sandbox.standins import aws
from tests.unit.local_aws import REGION, Local, local_aws
from tests.unit.policies import compared

LINE = "/aws/service/deeplearning/ami/arm64/oss-nvidia-driver-gpu-pytorch-{}-ubuntu-{}/latest/ami-id"


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    with local_aws() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        aws.profile_of_hosts(found.client("iam"))
        aws.publish_images(REGION)
        found.cloud.calls.clear()
        yield found


def run(*words: str, ok: bool = True) -> dict[str, Any]:
    done = CliRunner().invoke(app, [*words, "--json"])
    if ok and done.exception:
        raise done.exception
    if isinstance(done.exception, FleetError):
        return {"error": done.exception.as_dict()}
    return dict(json.loads(done.stdout))


def test_the_highest_pytorch_of_this_ubuntu_is_the_newest() -> None:
    given = [("2.9", "24.04", "ami-9"), ("2.11", "24.04", "ami-11"), ("2.12", "22.04", "ami-12")]
    parameters = [{"Name": LINE.format(torch, ubuntu), "Value": image} for torch, ubuntu, image in given]
    assert newest_parameter(parameters) == (LINE.format("2.11", "24.04"), "ami-11")
    assert newest_parameter([]) is None


def test_an_image_of_somebody_elses_with_the_name_is_not_taken(local: Local) -> None:
    ec2, name = (
        local.client("ec2"),
        "Deep Learning ARM64 AMI OSS Nvidia Driver GPU PyTorch 2.99 (Ubuntu 24.04) 20991231",
    )
    images = ec2_backends[DEFAULT_ACCOUNT_ID][REGION]
    # As on AWS: whoever publishes an image may give it any name, and the newest of a name would be his.
    images.amis["ami-stranger"] = Ami(
        images, "ami-stranger", name=name, owner_id="111122223333", public=True, architecture="arm64",
        root_device_type="ebs", virtualization_type="hvm",
        region_name=f"{REGION}a", creation_date=datetime(2099, 12, 31),
    )  # fmt: skip
    listed = ec2.describe_images(Filters=[{"Name": "name", "Values": [name]}])["Images"]
    assert [(one["OwnerId"], one["Architecture"]) for one in listed] == [("111122223333", "arm64")]

    class NoParameters:
        def get_paginator(self, _: str) -> NoParameters:
            return self

        def paginate(self, **_: Any) -> list[dict[str, Any]]:
            return [{"Parameters": []}]

    found = choose_image(ec2, NoParameters(), "", "arm64", REGION)
    assert (found.way, found.name != name) == ("search", True)
    assert "PyTorch 2." in found.name


@pytest.mark.parametrize("name", ["", "A", "-a", "a_b", "a" * 64, "a*"])
def test_an_unfit_name_is_refused(name: str) -> None:
    with pytest.raises(FleetError):
        launching.check_name(name, "NAME")


@pytest.mark.parametrize(
    "words", [["--type", "zz.huge"], ["--type", "m6g.large"], ["--type", "g5g.4xlarge", "--volume-gib", "1"]]
)
def test_bad_input_changes_nothing(local: Local, words: list[str]) -> None:
    assert run("launch", "a", *words, ok=False)["error"]["code"] == ExitCode.BAD_INPUT
    assert not [call for call in local.cloud.calls if call.operation.startswith(("Create", "Run"))]


def test_a_launch_is_made_once_raised_and_ended(local: Local) -> None:
    words = ("launch", "a", "--type", "g5g.4xlarge")
    first = run(*words)
    assert (first["changed"], len(first["launched"])) == (True, 1)
    sent = next(call.parameters for call in local.cloud.calls if call.operation == "RunInstances")
    assert sent["ClientToken"]
    assert not {"UserData", "KeyName"} & set(sent)
    assert sent["InstanceInitiatedShutdownBehavior"] == "stop"
    assert sent["MetadataOptions.HttpTokens"] == "required"
    assert sent["MetadataOptions.HttpPutResponseHopLimit"] == "1"
    assert sent["BlockDeviceMapping.1.Ebs.Encrypted"].lower() == "true"
    assert sent["BlockDeviceMapping.1.Ebs.VolumeType"] == "gp3"
    ec2 = local.client("ec2")
    one = ec2.describe_instances(InstanceIds=first["launched"])["Reservations"][0]["Instances"][0]
    tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
    assert (tags["vllm-fleet"], tags["vllm-fleet-role"], tags["Name"]) == ("vllm", "vllm", "a")
    assert tags["vllm-fleet-image-chosen"].startswith("parameter: highest PyTorch")
    group = ec2.describe_security_groups(GroupIds=[one["SecurityGroups"][0]["GroupId"]])["SecurityGroups"][0]
    assert (group["GroupName"], group["IpPermissions"]) == ("vllm-fleet-vllm", [])

    again = run(*words)
    assert (again["changed"], again["present"]) == (False, first["launched"])
    ec2.authorize_security_group_ingress(
        GroupId=group["GroupId"], IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="0.0.0.0/0"
    )
    assert run(*words, "--count", "2", ok=False)["error"]["code"] == ExitCode.REFUSED
    assert local.cloud.asked("RunInstances") == 1

    assert run("terminate", "a", "--fleet", "other", "--yes") == {"changed": False, "ended": []}
    assert run("terminate", "a", "--yes") == {"changed": True, "ended": first["launched"]}
    assert run("terminate", "a", "--yes") == {"changed": False, "ended": []}


def test_spot_builders_are_raised_ended_and_asked_for_by_the_policy(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "LAUNCHER")
    words = ("launch", "b", "--type", "g5g.4xlarge", "--spot", "--role", "builder", "--capability", "8.9")
    checked = run(*words, "--check")
    assert (checked["missing"], checked["launched"]) == (1, [])
    assert not [call for call in local.cloud.calls if not call.operation.startswith(("Describe", "Get"))]
    first = run(*words)["launched"]
    ec2 = local.client("ec2")
    ec2.stop_instances(InstanceIds=first)
    second = run(*words, "--count", "2")
    assert (second["stopped"], second["present"], len(second["launched"])) == (first, first, 1)
    assert local.cloud.asked("RunInstances") == 2
    listed = json.loads(
        subprocess.run(
            [str(Path(sys.executable).parent / "ansible-inventory"), "-i", "inventory/aws_ec2.yml", "--list"],
            cwd=PROJECT, capture_output=True, check=True,
        ).stdout
    )  # fmt: skip
    assert listed["spot"]["hosts"] == listed["builder"]["hosts"] == second["launched"]
    [variables] = listed["_meta"]["hostvars"].values()
    # What comes from outside is marked so in the JSON.
    assert variables["ec2_tags"]["vllm-fleet-capability"] == {"__ansible_unsafe": "8.9"}
    assert set(run("terminate", "b", "--yes")["ended"]) == {*first, *second["launched"]}
    calls = [call for call in local.cloud.calls if call.principal == "LAUNCHER"]
    # A role that an instance takes is passed by RunInstances, and tags given with what is made make no call either.
    assert compared(calls, "launch") == (
        set(),
        {"iam:PassRole arn:aws:iam::ACCOUNT:role/vllm-fleet-host", "ec2:CreateTags *"},
    )


@pytest.mark.parametrize(
    ("refusal", "code"),
    [("InsufficientInstanceCapacity", ExitCode.UNREACHABLE), ("VcpuLimitExceeded", ExitCode.REFUSED)],
)
def test_capacity_and_quota(
    local: Local, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal: str, code: ExitCode
) -> None:
    # amazon.aws asks again for minutes where there is no capacity, and has no setting for it: its waits are cut short.
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nold = time.sleep\ntime.sleep = lambda s: old(min(s, 0.05))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    local.cloud.refuse["RunInstances"] = refusal
    error = run("launch", "a", "--type", "g5g.4xlarge", ok=False)["error"]
    assert (error["code"], refusal in error["what"]) == (code, True)
    assert error["mend"]


def test_no_instance_profile(local: Local) -> None:
    iam = local.client("iam")
    iam.remove_role_from_instance_profile(InstanceProfileName=launching.PROFILE, RoleName=launching.PROFILE)
    iam.delete_instance_profile(InstanceProfileName=launching.PROFILE)
    error = run("launch", "a", "--type", "g5g.4xlarge", ok=False)["error"]
    assert (error["code"], error["what"]) == (ExitCode.BAD_INPUT, f"there is no instance profile {launching.PROFILE}")
    assert local.cloud.asked("CreateSecurityGroup") == 0
