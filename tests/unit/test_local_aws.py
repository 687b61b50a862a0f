"""What the local AWS's machines and agents go through, seen over real HTTP as AWS's documentation tells it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.exceptions import ClientError

from sandbox.standins.machines import Folder
from sandbox.standins.metadata import access_key
from tests.unit.local_aws import Local, local_aws
from tests.unit.test_run_command_standin import DOCUMENT, documented, ended, send, until


@pytest.fixture
def aws() -> Iterator[Local]:
    with local_aws() as local:
        documented(local, DOCUMENT)
        yield local


def status(aws: Local, command: str, instance: str) -> tuple[str, str]:
    found = aws.client("ssm").get_command_invocation(CommandId=command, InstanceId=instance)
    return found["Status"], found["StatusDetails"]


class SlowToBegin(Folder):
    """A machine that takes its time to begin a command, as a container at work does: until there is a file `go`."""

    def command(self, argv: Sequence[str], *, tty: bool = False) -> list[str]:
        """The command itself, later."""
        del tty
        slowly = ["sh", "-c", 'while [ ! -e go ]; do sleep 0.1; done; exec "$@"', "sh"]
        return [*(slowly if argv[0] == "setsid" else []), *argv]


def test_a_cancellation_reaches_what_has_only_just_begun(aws: Local, tmp_path: Path) -> None:
    one = aws.registry.add(lambda instance_id: SlowToBegin(instance_id, tmp_path)).machine.instance_id
    command = send(aws, "sleep 1000", [one])
    until(lambda: status(aws, command, one)[0] == "InProgress")
    aws.client("ssm").cancel_command(CommandId=command)
    time.sleep(1)
    (tmp_path / "go").touch()
    assert ended(aws, command, one)["Status"] == "Cancelled"


def test_a_lost_agent_hears_of_no_cancellation(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path)
    command = send(aws, "touch begun; sleep 1; touch ran", [one.machine.instance_id])
    until(lambda: (tmp_path / "begun").exists())
    one.online = False
    aws.client("ssm").cancel_command(CommandId=command)
    until(lambda: (tmp_path / "ran").exists())
    assert status(aws, command, one.machine.instance_id) == ("Cancelling", "Cancelling")


def test_a_cancellation_of_another_s_part_is_refused(aws: Local, tmp_path: Path) -> None:
    one, other = (aws.add(tmp_path).machine.instance_id for _ in range(2))
    command = send(aws, "true", [one])
    with pytest.raises(ClientError) as refused:
        aws.client("ssm").cancel_command(CommandId=command, InstanceIds=[other])
    assert refused.value.response["Error"]["Code"] == "InvalidInstanceId"


def test_an_agent_that_stays_lost_is_given_up(aws: Local, tmp_path: Path) -> None:
    """AWS's ExpiresAfter: then InProgress becomes DeliveryTimedOut as well."""
    one = aws.add(tmp_path)
    command = send(aws, "touch begun; sleep 0.3; touch ran", [one.machine.instance_id])
    until(lambda: (tmp_path / "begun").exists())
    one.online = False
    until(lambda: (tmp_path / "ran").exists())
    sent = aws.registry.run_command.commands[command]
    assert sent.expires == sent.requested_at + 3600 + 60
    sent.delivery_s = -60.0
    found = ended(aws, command, one.machine.instance_id)
    assert (found["Status"], found["StatusDetails"]) == ("TimedOut", "DeliveryTimedOut")


def test_what_was_never_delivered_is_no_error(aws: Local, tmp_path: Path) -> None:
    lost, one = aws.add(tmp_path, online=False).machine.instance_id, aws.add(tmp_path).machine.instance_id
    command = send(aws, "touch ran", [lost, one], MaxConcurrency="1", MaxErrors="0")
    until(lambda: command in aws.registry.run_command.commands)
    aws.registry.run_command.commands[command].delivery_s = 0.2
    assert ended(aws, command, lost)["StatusDetails"] == "DeliveryTimedOut"
    assert ended(aws, command, one)["Status"] == "Success"
    shown = aws.client("ssm").list_commands(CommandId=command)["Commands"][0]
    assert (shown["ErrorCount"], shown["DeliveryTimedOutCount"], shown["CompletedCount"]) == (0, 1, 2)


def test_each_region_has_its_own_instances(aws: Local, tmp_path: Path) -> None:
    west = aws.add(tmp_path, region="us-west-2").machine.instance_id
    known = aws.client("ssm", "us-west-2").describe_instance_information()["InstanceInformationList"]
    assert [found["InstanceId"] for found in known] == [west]
    assert aws.client("ssm").describe_instance_information()["InstanceInformationList"] == []
    with pytest.raises(ClientError) as refused:
        send(aws, "touch ran", [west])
    assert refused.value.response["Error"]["Code"] == "InvalidInstanceId"
    assert not (tmp_path / "ran").exists()


def test_agents_come_in_pages_of_ten(aws: Local, tmp_path: Path) -> None:
    ids = {aws.add(tmp_path, online=n > 0).machine.instance_id for n in range(12)}
    pages = list(aws.client("ssm").get_paginator("describe_instance_information").paginate())
    assert [len(page["InstanceInformationList"]) for page in pages] == [10, 2]
    assert {found["InstanceId"] for page in pages for found in page["InstanceInformationList"]} == ids
    filters: list[dict[str, Any]] = [{"Key": "PingStatus", "Values": ["ConnectionLost"]}]
    lost = aws.client("ssm").describe_instance_information(Filters=filters)["InstanceInformationList"]
    assert len(lost) == 1
    assert lost[0]["LastPingDateTime"].timestamp() <= time.time()
    with pytest.raises(ClientError) as refused:
        aws.client("ssm").describe_instance_information(MaxResults=51)
    assert refused.value.response["Error"]["Code"] == "ValidationException"


def test_a_terminated_instance_ends_what_it_runs_and_is_known_no_more(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path).machine.instance_id
    command = send(aws, "echo $$ >pid; exec sleep 1000", [one])
    pid = until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    aws.client("ec2").terminate_instances(InstanceIds=[one])
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert aws.client("ssm").describe_instance_information()["InstanceInformationList"] == []
    # AWS goes on waiting: nobody is left to tell of the end.
    assert status(aws, command, one) == ("InProgress", "InProgress")
    with pytest.raises(ClientError) as refused:
        send(aws, "touch ran", [one])
    assert refused.value.response["Error"]["Code"] == "InvalidInstanceId"


def test_a_rebooted_instance_takes_its_command_up_again(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path)
    command = send(aws, "echo $$ >>pids; [ -e second ] || exec sleep 1000", [one.machine.instance_id])
    pid = until(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().strip())
    (tmp_path / "second").touch()
    aws.client("ec2").reboot_instances(InstanceIds=[one.machine.instance_id])
    assert ended(aws, command, one.machine.instance_id)["Status"] == "Success"
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert len((tmp_path / "pids").read_text().split()) == 2
    assert one.online


def test_what_ec2_refuses_takes_no_machine_down(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path)
    with pytest.raises(ClientError) as refused:
        aws.client("ec2").terminate_instances(InstanceIds=[one.machine.instance_id, "i-00000000000000000"])
    assert refused.value.response["Error"]["Code"] == "InvalidInstanceID.NotFound"
    assert not one.terminated


def test_settings_of_the_cloud_and_of_machines_over_http(aws: Local, tmp_path: Path) -> None:
    lost, gone = (aws.add(tmp_path, address=f"10.0.0.{n}") for n in (1, 2))
    machines = {lost.machine.instance_id: {"online": False}, gone.machine.instance_id: {"terminated": True}}
    asked = {"lag_s": 1.5, "throttle": {"SendCommand": 1}, "machines": machines}
    httpx.post(f"{aws.url}/stand-in/settings", json=asked, trust_env=False).raise_for_status()
    assert (aws.cloud.lag_s, aws.cloud.throttle, lost.online) == (1.5, {"SendCommand": 1}, False)
    found = aws.client("ec2").describe_instances(InstanceIds=[gone.machine.instance_id])
    assert found["Reservations"][0]["Instances"][0]["State"]["Name"] == "terminated"
    listed = httpx.get(f"{aws.url}/stand-in/machines", trust_env=False).json()
    assert [found["instance_id"] for found in listed] == [lost.machine.instance_id]


def test_each_machine_reads_metadata_of_its_own(aws: Local, tmp_path: Path) -> None:
    west = aws.add(tmp_path, region="us-west-2", instance_type="g5g.xlarge")
    other = aws.add(tmp_path)
    service = west.variables["AWS_EC2_METADATA_SERVICE_ENDPOINT"]
    ask = httpx.Client(base_url=service, trust_env=False)
    assert ask.get("/latest/meta-data/instance-id").status_code == 401
    token = ask.put("/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}).text
    ask.headers["X-aws-ec2-metadata-token"] = token
    read = {name: ask.get(f"/latest/meta-data/{name}").text for name in ("instance-id", "instance-type")}
    assert read == {"instance-id": west.machine.instance_id, "instance-type": "g5g.xlarge"}
    assert ask.get("/latest/meta-data/placement/region").text == "us-west-2"
    zone = aws.client("ec2", "us-west-2").describe_instances()["Reservations"][0]["Instances"][0]["Placement"]
    assert ask.get("/latest/meta-data/placement/availability-zone").text == zone["AvailabilityZone"]
    role = ask.get("/latest/meta-data/iam/security-credentials/").text
    key = ask.get(f"/latest/meta-data/iam/security-credentials/{role}").json()["AccessKeyId"]
    assert key.startswith("ASIA")
    assert key != access_key(other.machine.instance_id)
    assert ask.get("/latest/meta-data/spot/instance-action").status_code == 404
    west.spot_notice = '{"action": "terminate", "time": "2026-12-03T08:22:00Z"}'
    assert ask.get("/latest/meta-data/spot/instance-action").json()["action"] == "terminate"


def test_a_launched_instance_gets_its_machine_where_it_was_launched(aws: Local, tmp_path: Path) -> None:
    west = aws.client("ec2", "us-west-2")
    image = west.describe_images()["Images"][0]["ImageId"]
    made = west.run_instances(ImageId=image, InstanceType="g5g.2xlarge", MinCount=1, MaxCount=1)["Instances"][0]
    one = aws.add(tmp_path, instance_id=made["InstanceId"])
    assert (one.region, one.instance_type) == ("us-west-2", "g5g.2xlarge")
    known = aws.client("ssm", "us-west-2").describe_instance_information()["InstanceInformationList"]
    assert [found["InstanceId"] for found in known] == [made["InstanceId"]]
