"""Run Command of the local AWS keeps what AWS's documentation says of it, over real HTTP with real processes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.unit.local_aws import Local, local_aws

DOCUMENT = {
    "schemaVersion": "2.2",
    "description": "A script of the test's.",
    "parameters": {
        "Script": {"type": "String"},
        "Kind": {"type": "String", "default": "a", "allowedValues": ["a", "b"]},
        "Seconds": {"type": "String", "default": "60", "allowedPattern": "^[0-9]+$"},
    },
    "mainSteps": [
        {
            "action": "aws:runShellScript",
            "name": "run",
            "inputs": {"timeoutSeconds": "{{ Seconds }}", "runCommand": ["{{ Script }}", "echo {{Kind}} >>kinds"]},
        }
    ],
}


@pytest.fixture
def aws() -> Iterator[Local]:
    with local_aws() as local:
        documented(local, DOCUMENT)
        yield local


def documented(aws: Local, document: dict[str, Any]) -> None:
    """Makes it the document `script`."""
    content = json.dumps(document)
    aws.client("ssm").create_document(Content=content, Name="script", DocumentType="Command", DocumentFormat="JSON")


def send(aws: Local, script: str, ids: list[str], **more: Any) -> str:
    parameters = {"Script": [script], **more.pop("Parameters", {})}
    sent = aws.client("ssm").send_command(DocumentName="script", InstanceIds=ids, Parameters=parameters, **more)
    return str(sent["Command"]["CommandId"])


def ended(aws: Local, command: str, instance: str) -> dict[str, Any]:
    ssm = aws.client("ssm")
    found: dict[str, Any] = until(lambda: _over(ssm.get_command_invocation(CommandId=command, InstanceId=instance)))
    return found


def _over(found: dict[str, Any]) -> dict[str, Any] | None:
    return found if found["Status"] in ("Success", "Failed", "TimedOut", "Cancelled") else None


def until(found: Callable[[], Any], seconds: float = 20) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if got := found():
            return got
        time.sleep(0.05)
    raise AssertionError(f"nothing within {seconds} s")


def test_a_document_is_really_run(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path).machine.instance_id
    command = send(aws, "echo said; echo wrong >&2; pwd >place", [one], Parameters={"Kind": ["b"]})
    found = ended(aws, command, one)
    assert (found["Status"], found["ResponseCode"]) == ("Success", 0)
    assert (found["StandardOutputContent"], found["StandardErrorContent"]) == ("said\n", "wrong\n")
    assert (tmp_path / "place").read_text().strip() == str(tmp_path)
    assert (tmp_path / "kinds").read_text() == "b\n"
    failed = ended(aws, send(aws, "exit 7", [one]), one)
    assert (failed["Status"], failed["ResponseCode"]) == ("Failed", 7)


def test_outputs_are_cut_where_aws_cuts_them(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path).machine.instance_id
    command = send(aws, "head -c 30000 /dev/zero | tr '\\0' x", [one])
    assert len(ended(aws, command, one)["StandardOutputContent"]) == 24_000
    listed = aws.client("ssm").list_command_invocations(CommandId=command, Details=True)["CommandInvocations"]
    assert len(listed[0]["CommandPlugins"][0]["Output"]) == 2_500


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"InstanceIds": [f"i-{n:017x}" for n in range(51)]}, "ValidationException"),
        ({"InstanceIds": ["i-00000000000000000"]}, "InvalidInstanceId"),
        ({"DocumentName": "none"}, "InvalidDocument"),
        ({"Parameters": {"Script": ["true"], "Kind": ["c"]}}, "InvalidParameters"),
        ({"Parameters": {"Script": ["true"], "Seconds": ["x"]}}, "InvalidParameters"),
        ({"Parameters": {"Script": ["true"], "Other": ["x"]}}, "InvalidParameters"),
        ({"Parameters": {}}, "InvalidParameters"),
    ],
)
def test_refusals(aws: Local, tmp_path: Path, asked: dict[str, Any], code: str) -> None:
    one = aws.add(tmp_path).machine.instance_id
    good = {"DocumentName": "script", "InstanceIds": [one], "Parameters": {"Script": ["touch ran"]}}
    with pytest.raises(ClientError) as refused:
        aws.client("ssm").send_command(**(good | asked))
    assert refused.value.response["Error"]["Code"] == code
    assert not (tmp_path / "ran").exists()


def test_cancelled_processes_end(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path).machine.instance_id
    command = send(aws, "sh -c 'echo $$ >child; exec sleep 1000'", [one])
    child = until(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
    aws.client("ssm").cancel_command(CommandId=command)
    assert ended(aws, command, one)["Status"] == "Cancelled"
    until(lambda: not Path(f"/proc/{child}").exists())


def test_time_limits(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path)
    command = send(aws, "sleep 1000", [one.machine.instance_id], Parameters={"Seconds": ["1"]})
    found = ended(aws, command, one.machine.instance_id)
    assert (found["Status"], found["StatusDetails"]) == ("TimedOut", "ExecutionTimedOut")
    one.online = False
    command = send(aws, "touch ran", [one.machine.instance_id], TimeoutSeconds=30)
    # AWS takes 30 s at least: the time goes faster here.
    aws.registry.run_command.commands[command].delivery_s = 0.5
    found = ended(aws, command, one.machine.instance_id)
    assert (found["Status"], found["StatusDetails"]) == ("TimedOut", "DeliveryTimedOut")
    assert not (tmp_path / "ran").exists()


def test_a_lost_agent_tells_when_it_is_back(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path)
    command = send(aws, "touch begun; sleep 0.5; touch ran", [one.machine.instance_id])
    until(lambda: (tmp_path / "begun").exists())
    one.online = False
    until(lambda: (tmp_path / "ran").exists())
    ssm = aws.client("ssm")
    time.sleep(0.3)
    found = ssm.get_command_invocation(CommandId=command, InstanceId=one.machine.instance_id)
    assert found["Status"] == "InProgress"
    assert ssm.describe_instance_information()["InstanceInformationList"][0]["PingStatus"] == "ConnectionLost"
    one.online = True
    assert ended(aws, command, one.machine.instance_id)["Status"] == "Success"


def test_delivered_twice_runs_twice(aws: Local, tmp_path: Path) -> None:
    one = aws.add(tmp_path, deliveries=2)
    assert ended(aws, send(aws, "true", [one.machine.instance_id]), one.machine.instance_id)["Status"] == "Success"
    assert (tmp_path / "kinds").read_text() == "a\na\n"


def test_lists_lag_and_come_in_pages(aws: Local, tmp_path: Path) -> None:
    ids = [aws.add(tmp_path).machine.instance_id for _ in range(3)]
    aws.cloud.lag_s = 3600.0
    command = send(aws, "true", ids)
    ssm = aws.client("ssm")
    assert ssm.list_command_invocations(CommandId=command)["CommandInvocations"] == []
    with pytest.raises(ssm.exceptions.InvocationDoesNotExist):
        ssm.get_command_invocation(CommandId=command, InstanceId=ids[0])
    aws.cloud.lag_s = 0.0
    pages = list(ssm.get_paginator("list_command_invocations").paginate(CommandId=command, MaxResults=2))
    assert [len(page["CommandInvocations"]) for page in pages] == [2, 1]
    for one in ids:
        ended(aws, command, one)
    assert ssm.list_commands(CommandId=command)["Commands"][0]["CompletedCount"] == 3


def test_concurrency_and_errors_are_kept_to(aws: Local, tmp_path: Path) -> None:
    ids = [aws.add(tmp_path).machine.instance_id for _ in range(4)]
    script = "echo in >>log; sleep 0.3; echo out >>log"
    command = send(aws, script, ids[:2], MaxConcurrency="1")
    for one in ids[:2]:
        ended(aws, command, one)
    assert (tmp_path / "log").read_text().split() == ["in", "out"] * 2
    command = send(aws, "echo once >>failed; exit 1", ids, MaxConcurrency="1", MaxErrors="1")
    for one in ids:
        ended(aws, command, one)
    # As many errors as allowed, and the one that is too many: AWS sends to no further instance.
    assert (tmp_path / "failed").read_text().count("once") == 2


def test_targets_by_tag(aws: Local, tmp_path: Path) -> None:
    mine = aws.add(tmp_path, tags={"vllm-fleet": "mine"}).machine.instance_id
    aws.add(tmp_path, tags={"vllm-fleet": "other"})
    sent = aws.client("ssm").send_command(
        DocumentName="script",
        Targets=[{"Key": "tag:vllm-fleet", "Values": ["mine"]}],
        Parameters={"Script": ["true"]},
    )
    command = sent["Command"]["CommandId"]
    ended(aws, command, mine)
    listed = aws.client("ssm").list_command_invocations(CommandId=command)["CommandInvocations"]
    assert [found["InstanceId"] for found in listed] == [mine]


def test_throttling_is_told_as_aws_tells_it(aws: Local) -> None:
    aws.cloud.throttle["DescribeInstanceInformation"] = 1
    assert aws.client("ssm").describe_instance_information()["InstanceInformationList"] == []
    assert aws.cloud.asked("DescribeInstanceInformation") == 2
