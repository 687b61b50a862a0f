"""What launch and terminate refuse before anything is changed: real boto3 and HTTP, no play."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from fleet import launching
from fleet.errors import ExitCode, FleetError
from fleet.launch_cli import app
from fleet.paths import PROJECT
from sandbox.standins import aws
from tests.unit.local_aws import Local, local_aws


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    with local_aws() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        aws.seed(found.url)
        found.cloud.calls.clear()
        yield found
        # Nothing half done: the tests start their instances as another.
        assert {call.operation for call in found.cloud.calls if call.principal == "ASKING"} <= {
            "DescribeInstances", "DescribeInstanceTypes", "DescribeImages", "DescribeInstanceTypeOfferings",
            "DescribeSubnets", "DescribeSecurityGroups", "GetInstanceProfile", "GetParametersByPath",
        }  # fmt: skip


def refused(monkeypatch: pytest.MonkeyPatch, *words: str) -> FleetError:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ASKING")
    error = CliRunner().invoke(app, list(words)).exception
    assert isinstance(error, FleetError), error
    return error


def started(local: Local, **tags: str) -> str:
    ec2 = local.client("ec2")
    given = [{"Key": key.replace("_", "-"), "Value": value} for key, value in tags.items()]
    made = ec2.run_instances(
        ImageId="ami-00900000000000000", InstanceType="g5g.xlarge", MinCount=1, MaxCount=1,
        TagSpecifications=[{"ResourceType": "instance", "Tags": given}],
    )  # fmt: skip
    return str(made["Instances"][0]["InstanceId"])


@pytest.mark.usefixtures("local")
def test_a_gpu_before_turing(monkeypatch: pytest.MonkeyPatch) -> None:
    # NVIDIA's driver installation guide, "Kernel Modules": the open flavor is for Turing and newer; V100 is Volta.
    error = refused(monkeypatch, "launch", "a", "--type", "p3dn.24xlarge")
    assert (error.code, "V100" in error.what) == (ExitCode.BAD_INPUT, True)
    # Who only builds needs no GPU, and no driver.
    assert (
        not CliRunner()
        .invoke(app, ["launch", "a", "--type", "p3dn.24xlarge", "--role", "builder", "--check"])
        .exception
    )


@pytest.mark.parametrize("subnet", ["subnet-0123456789abcdef0", "nonsense"])
@pytest.mark.usefixtures("local")
def test_no_such_subnet(monkeypatch: pytest.MonkeyPatch, subnet: str) -> None:
    error = refused(monkeypatch, "launch", "a", "--type", "g5g.xlarge", "--subnet", subnet)
    assert (error.code, subnet in error.what) == (ExitCode.BAD_INPUT, True)


def test_a_subnet_whose_zone_does_not_offer_the_type(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    ec2 = local.client("ec2")
    offers = ec2.describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": ["g5g.xlarge"]}]
    )["InstanceTypeOfferings"]
    zones = {offer["Location"] for offer in offers}
    subnets = {one["AvailabilityZone"]: one["SubnetId"] for one in ec2.describe_subnets()["Subnets"]}
    without = sorted(subnets.keys() - zones)[0]
    error = refused(monkeypatch, "launch", "a", "--type", "g5g.xlarge", "--subnet", subnets[without])
    assert (error.code, error.what.startswith(f"{without} does not offer g5g.xlarge")) == (ExitCode.BAD_INPUT, True)
    good = subnets[sorted(zones & subnets.keys())[0]]
    assert not CliRunner().invoke(app, ["launch", "a", "--type", "g5g.xlarge", "--subnet", good, "--check"]).exception


def test_a_profile_without_a_role(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    local.client("iam").remove_role_from_instance_profile(
        InstanceProfileName=launching.PROFILE, RoleName=launching.PROFILE
    )
    error = refused(monkeypatch, "launch", "a", "--type", "g5g.xlarge")
    assert (error.code, error.what) == (ExitCode.BAD_INPUT, f"the instance profile {launching.PROFILE} has no role")


def test_another_type_of_the_name_is_told(local: Local) -> None:
    there = started(local, Name="a", vllm_fleet="vllm")
    done = CliRunner().invoke(app, ["launch", "a", "--type", "g4dn.xlarge"])
    assert f"of another type than g4dn.xlarge, and counted: {there}\nunchanged: {there}\n" in done.stdout


def test_what_lacks_the_tag_is_not_ended_nor_anything_beside_it(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    stray = started(local, Name="stray")
    started(local, Name="a", vllm_fleet="vllm")
    error = refused(monkeypatch, "terminate", "a", "stray", "--yes")
    assert (error.code, error.what.startswith(f"{stray} lacks the tag vllm-fleet,")) == (ExitCode.REFUSED, True)


def test_nobody_to_ask(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    started(local, Name="a", vllm_fleet="vllm")
    error = refused(monkeypatch, "terminate", "a")
    assert (error.code, error.mend) == (ExitCode.REFUSED, "--yes")


def test_no_is_no(local: Local) -> None:
    there = started(local, Name="a", vllm_fleet="vllm")
    code, said = answered(b"n\n", "terminate", "a")
    assert (code, f"End {there} of fleet vllm" in said, "nothing was done" in said) == (ExitCode.REFUSED, True, True)


def answered(answer: bytes, *words: str) -> tuple[int, str]:
    """Exit code and all that was said, of a real command at a terminal."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "ASKING"}
    with subprocess.Popen(
        [sys.executable, "-m", "fleet", *words], cwd=PROJECT, env=environment,
        stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        os.write(ours, answer)
        said, _ = process.communicate(timeout=60)
    os.close(ours)
    return process.returncode, said
