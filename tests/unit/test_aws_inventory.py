"""The inventory of EC2 with the real plugin, and why it came to nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from moto.core import DEFAULT_ACCOUNT_ID as ACCOUNT_ID
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import Instance
from moto.ec2.responses.instances import InstanceResponse

from fleet import aws_inventory
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT
from tests.unit.local_aws import Local, local_aws

BIN = Path(sys.executable).parent
FILE = PROJECT / "inventory" / "aws_ec2.yml"
WEST = "us-west-2"
VLLM = {"vllm-fleet": "main", "vllm-fleet-role": "vllm"}


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    """A local AWS that this process finds."""
    with local_aws() as local:
        for name, value in local.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_REGION", raising=False)
        yield local


def start(
    local: Local, kind: str = "g5g.4xlarge", tags: dict[str, str] | None = None, region: str = "us-east-1", **more: Any
) -> str:
    """One running instance of the type's architecture."""
    image = next(iter(ec2_backends[ACCOUNT_ID][region].amis))
    made = local.client("ec2", region).run_instances(
        ImageId=image, InstanceType=kind, MinCount=1, MaxCount=1, TagSpecifications=tagged(tags), **more
    )
    instance_id = str(made["Instances"][0]["InstanceId"])
    # The local AWS takes it from the image, and has none of the other kind.
    instance = ec2_backends[ACCOUNT_ID][region].get_instance(instance_id)
    instance.architecture = "arm64" if kind.split(".")[0] in ("g5g", "c7g") else "x86_64"
    return instance_id


def tagged(tags: dict[str, str] | None) -> list[dict[str, Any]]:
    """Tags as RunInstances takes them."""
    given = [{"Key": key, "Value": value} for key, value in (VLLM if tags is None else tags).items()]
    return [{"ResourceType": "instance", "Tags": given}] if given else []


def listed(local: Local, path: Path = FILE, python: Path = BIN, **environment: str) -> subprocess.CompletedProcess[str]:
    """What ansible-inventory says."""
    return subprocess.run(
        [str(python / "ansible-inventory"), "-i", str(path), "--list"], cwd=PROJECT, capture_output=True, text=True,
        env={**os.environ, **local.environment, **environment}, check=False, timeout=120,
    )  # fmt: skip


def groups_of(inventory: dict[str, Any], host: str) -> set[str]:
    """The groups that name the host."""
    return {name for name, group in inventory.items() if host in group.get("hosts", [])}


def plain(value: Any) -> Any:
    """A value without the mark of text that is no template."""
    if isinstance(value, dict):
        return (
            value["__ansible_unsafe"] if set(value) == {"__ansible_unsafe"} else {k: plain(v) for k, v in value.items()}
        )
    return value


def two_regions(folder: Path) -> Path:
    """The inventory with a list of regions, as a user writes it."""
    path = folder / "both.aws_ec2.yml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(FILE.read_text()), "regions": ["us-east-1", WEST]}))
    return path


def test_every_running_host_of_the_fleet_is_in_its_groups(cloud: Local, tmp_path: Path) -> None:
    g5g = start(cloud, Placement={"AvailabilityZone": "us-east-1b"})
    spot = start(cloud, "g6e.xlarge", region=WEST, InstanceMarketOptions={"MarketType": "spot"})
    builder = start(
        cloud, "c7g.4xlarge", {"vllm-fleet": "other", "vllm-fleet-role": "builder", "vllm-fleet-capability": "7.5"}
    )
    plain_cpu = start(cloud, "m5.large")
    others = [start(cloud, tags={}), start(cloud, tags={"vllm-fleet-role": "vllm"}), start(cloud)]
    cloud.client("ec2").stop_instances(InstanceIds=[others[2]])
    done = listed(cloud, two_regions(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["aws_ec2"]["hosts"]) == {g5g, spot, builder, plain_cpu}
    assert groups_of(found, g5g) == {
        "aws_ec2", "vllm", "fleet_main", "architecture_aarch64", "instance_type_g5g_4xlarge", "capability_7_5",
        "zone_us_east_1b", "on_demand",
    }  # fmt: skip
    assert groups_of(found, spot) == {
        "aws_ec2", "vllm", "fleet_main", "architecture_x86_64", "instance_type_g6e_xlarge", "capability_8_9",
        "zone_us_west_2a", "spot",
    }  # fmt: skip
    assert groups_of(found, builder) == {
        "aws_ec2", "builder", "fleet_other", "architecture_aarch64", "instance_type_c7g_4xlarge", "capability_7_5",
        "zone_us_east_1a", "on_demand",
    }  # fmt: skip
    assert not any(name.startswith("capability") for name in groups_of(found, plain_cpu))
    values = plain(found["_meta"]["hostvars"][spot])
    assert (values["ansible_host"], values["instance_id"], values["placement"]["region"]) == (spot, spot, WEST)
    assert values["ec2_tags"] == VLLM
    # One request a region: nothing is asked twice.
    assert cloud.cloud.asked("DescribeInstances") == 2


# Families of AWS's accelerated instance types, and the capabilities that NVIDIA lists for their GPUs.
@pytest.mark.parametrize(
    ("family", "capability"),
    [
        ("p3", "7.0"), ("p3dn", "7.0"), ("g4dn", "7.5"), ("g5g", "7.5"), ("p4d", "8.0"), ("p4de", "8.0"), ("g5", "8.6"),
        ("g6", "8.9"), ("gr6", "8.9"), ("g6f", "8.9"), ("gr6f", "8.9"), ("g6e", "8.9"), ("p5", "9.0"), ("p5e", "9.0"),
        ("p5en", "9.0"), ("p6-b200", "10.0"), ("p6e-gb200", "10.0"), ("p6-b300", "10.3"), ("g7", "12.0"),
        ("g7e", "12.0"), ("g4ad", ""), ("m5", ""), ("inf2", ""),
    ],
)  # fmt: skip
def test_a_family_has_its_gpus_capability(family: str, capability: str) -> None:
    expression = yaml.safe_load(FILE.read_text())["compose"]["gpu_capability"]
    templar = Templar(
        loader=DataLoader(), variables={"instance_type": f"{family}.48xlarge", "ec2_tags": {}, "tags": {}}
    )
    assert templar.evaluate_expression(trust_as_template(expression)) == capability


@pytest.mark.parametrize(
    ("zone", "region"),
    [
        ("us-east-1a", "us-east-1"), ("ap-southeast-2c", "ap-southeast-2"), ("us-gov-west-1b", "us-gov-west-1"),
        ("us-west-2-lax-1a", "us-west-2"), ("us-east-1-wl1-bos-wlz-1", "us-east-1"),
    ],
)  # fmt: skip
def test_a_zone_has_its_region_also_a_local_zone(zone: str, region: str) -> None:
    expression = yaml.safe_load(FILE.read_text())["compose"]["placement"]
    templar = Templar(loader=DataLoader(), variables={"placement": {"availability_zone": zone}})
    assert templar.evaluate_expression(trust_as_template(expression))["region"] == region


def test_more_than_a_page_and_hosts_without_private_names(cloud: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [start(cloud) for _ in range(3)]
    param = InstanceResponse._get_param

    def pages_of_one(self: InstanceResponse, name: str, *default: Any) -> Any:
        return 1 if name == "MaxResults" else param(self, name, *default)

    monkeypatch.setattr(InstanceResponse, "_get_param", pages_of_one)
    monkeypatch.setattr(Instance, "private_dns_name", "")
    done = listed(cloud)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(found["aws_ec2"]["hosts"]) == sorted(hosts)
    assert {plain(values)["private_dns_name"] for values in found["_meta"]["hostvars"].values()} == {""}
    assert cloud.cloud.asked("DescribeInstances") == len(hosts)


def test_each_reason_for_no_host_is_told(cloud: Local) -> None:
    def told(limit: str | None = None) -> FleetError:
        with pytest.raises(FleetError) as raised:
            aws_inventory.explain([FILE], limit)
        assert raised.value.code is ExitCode.BAD_INPUT
        assert "us-east-1" in raised.value.where
        return raised.value

    start(cloud, tags={})
    assert told().what == "no instance has the tag vllm-fleet, and one at least is wanted"
    stopped, gone = start(cloud), start(cloud)
    cloud.client("ec2").stop_instances(InstanceIds=[stopped])
    cloud.client("ec2").terminate_instances(InstanceIds=[gone])
    error = told()
    assert error.what == (
        "2 with the tag vllm-fleet (1 stopped, 1 terminated), and none of them has instance-state-name running"
    )
    assert error.mend == f"aws ec2 start-instances --instance-ids {stopped}"
    lost = start(cloud, tags={"vllm-fleet": "main", "vllm-fleet-role": "gpu"})
    error = told()
    assert error.what == f"1 of 1 running instances have no tag vllm-fleet-role with vllm or builder: {lost}"
    assert lost in error.mend
    strict = listed(cloud)
    assert strict.returncode != 0 and lost in strict.stderr
    assert "the tag vllm-fleet-role must be vllm or builder" in strict.stderr
    cloud.client("ec2").create_tags(Resources=[lost], Tags=[{"Key": "vllm-fleet-role", "Value": "vllm"}])
    assert told("i-0").what == f"--limit i-0 matches none of the fleet's 1 running instances: {lost}"
    # There are hosts: the reason is another, and Ansible's own words stand.
    aws_inventory.explain([FILE], None)


@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("RequestExpired", ExitCode.BAD_INPUT, "credentials"),
        ("AuthFailure", ExitCode.BAD_INPUT, "credentials"),
        ("UnauthorizedOperation", ExitCode.REFUSED, "does not allow"),
    ],
)
def test_a_refusal_is_told_with_its_code(cloud: Local, code: str, exit_code: ExitCode, words: str) -> None:
    cloud.cloud.refuse["DescribeInstances"] = code
    with pytest.raises(FleetError, match=words) as raised:
        aws_inventory.explain([FILE], None)
    assert (raised.value.code, raised.value.where) == (exit_code, "us-east-1")


def test_regions_that_are_none_are_told(cloud: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    cloud.cloud.refuse["DescribeInstances"] = "AuthFailure"
    monkeypatch.setenv("AWS_REGION", "us-east-9")
    with pytest.raises(FleetError, match="no region 'us-east-9' is known") as raised:
        aws_inventory.explain([FILE], None)
    assert re.fullmatch(r"export AWS_REGION=us-(east|west)-\d", raised.value.mend)
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "")
    with pytest.raises(FleetError, match="no region: export AWS_REGION"):
        aws_inventory.explain([FILE], None)


def test_a_moment_of_throttling_does_not_show(cloud: Local) -> None:
    host = start(cloud)
    cloud.cloud.throttle["DescribeInstances"] = 1
    assert json.loads(listed(cloud).stdout)["aws_ec2"]["hosts"] == [host]


def test_throttling_that_goes_on_is_told(cloud: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.aws._READ_ATTEMPTS", 2)
    cloud.cloud.throttle["DescribeInstances"] = 10
    with pytest.raises(FleetError, match="slowed") as raised:
        aws_inventory.explain([FILE], None)
    assert raised.value.code is ExitCode.UNREACHABLE


@pytest.mark.parametrize("transport", ["run-command", "session"])
def test_no_host_is_a_failure_of_a_command(cloud: Local, transport: str) -> None:
    lost = start(cloud, tags={"vllm-fleet": "main"})
    done = []
    # An inventory that the plugin refuses, one that it leaves empty, and one that --limit does.
    steps: list[tuple[dict[str, str] | None, list[str]]] = [({}, []), (VLLM, ["--limit", "i-0"]), (None, [])]
    # What follows the transport is the same for both; the rest of the story is told once.
    for tags, words in steps if transport == "run-command" else steps[:1]:
        if tags is None:
            cloud.client("ec2").stop_instances(InstanceIds=[lost])
        elif tags:
            given = [{"Key": key, "Value": value} for key, value in VLLM.items()]
            cloud.client("ec2").create_tags(Resources=[lost], Tags=given)
        argv = [sys.executable, "-m", "fleet", "status", "-i", str(FILE), "--transport", transport, *words]
        environment = {**os.environ, **cloud.environment}
        told = subprocess.run(
            argv, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False, timeout=120
        )
        done.append((told.returncode, told.stderr.split("\n  where:")[0].splitlines()[-1]))
    wanted = [
        (2, f"runner: 1 of 1 running instances have no tag vllm-fleet-role with vllm or builder: {lost}"),
        (2, f"runner: --limit i-0 matches none of the fleet's 1 running instances: {lost}"),
        (2, "runner: 1 with the tag vllm-fleet (1 stopped), and none of them has instance-state-name running"),
    ]
    assert done == wanted[: len(done)]


def test_no_host_is_a_failure_of_the_playbook_itself(cloud: Local) -> None:
    play = subprocess.run(
        [str(BIN / "ansible-playbook"), "-i", str(FILE), "playbooks/site.yml"], cwd=PROJECT,
        env={**os.environ, **cloud.environment}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert play.returncode != 0 and "no host in the groups vllm and builder" in play.stderr
