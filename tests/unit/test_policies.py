"""The policies in docs/policies are what is really asked for: nothing used that is not granted, nothing beyond."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from fleet.paths import PROJECT
from fleet.run_command.transport import execute
from sandbox.standins.cloud import Call
from sandbox.standins.metadata import access_key
from tests.unit.fleet_on_ec2 import BUCKET, SOON, fleet
from tests.unit.local_aws import REGION, local_aws

# By AWS's "Actions defined by Amazon S3" a HEAD of an object is GetObject's right, and both of these are ListBucket's.
_RIGHTS = {"HeadObject": "GetObject", "HeadBucket": "ListBucket", "ListObjectsV2": "ListBucket"}


def granted(*names: str) -> dict[str, list[str]]:
    """Action to resources, over the policies of these names."""
    found: dict[str, list[str]] = {}
    for name in names:
        for statement in json.loads((PROJECT / "docs" / "policies" / f"{name}.json").read_text())["Statement"]:
            assert statement["Effect"] == "Allow"
            for action in as_list(statement["Action"]):
                found.setdefault(action, []).extend(as_list(statement["Resource"]))
    return found


def as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def used(calls: Iterable[Call]) -> set[tuple[str, str]]:
    """Action and resource of each call, as IAM would ask for them."""
    found = set()
    for call in calls:
        if call.service == "s3":
            key = f"/{call.parameters['Key']}" if call.parameters["Key"] else ""
            found.add((f"s3:{_RIGHTS.get(call.operation, call.operation)}", f"arn:aws:s3:::BUCKET{key}"))
        else:
            found.add((f"{call.service}:{call.operation}", "*"))
    return found


def compared(calls: Iterable[Call], *policies: str) -> tuple[set[str], set[str]]:
    """What is used and not granted, and what is granted and not used."""
    rights = granted(*policies)
    asked = used(calls)
    missing = {
        f"{action} {resource}"
        for action, resource in asked
        if not any(resource == "*" or fnmatchcase(resource, pattern) for pattern in rights.get(action, []))
    }
    idle = {
        f"{action} {pattern}"
        for action, patterns in rights.items()
        for pattern in patterns
        if not any(
            action == name and (resource == "*" or ":s3:" not in pattern or fnmatchcase(resource, pattern))
            for name, resource in asked
        )
    }
    return missing, idle


def test_controller_and_instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(tmp_path, monkeypatch) as found:
        found.aws.cloud.calls.clear()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "CONTROLLER")
        pid = found.folder / "host0" / "pid"

        def end() -> None:
            until = time.monotonic() + 30
            while not pid.exists() and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(SOON.silence_s + 1)
            os.kill(os.getpid(), signal.SIGINT)

        # A run that puts, follows, looks at a host that says nothing, and is cancelled: all that a run can ask for.
        tasks = (
            "  - {name: waits, ansible.builtin.command: {argv: ['sh', '-c', 'echo $$ >{{ folder }}/pid; sleep 60']}}\n"
        )
        threading.Thread(target=end, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            execute(found.request(tasks), lambda _: None, SOON)
        os.kill(int(pid.read_text()), signal.SIGKILL)
        listed = subprocess.run(
            [str(Path(sys.executable).parent / "ansible-inventory"), "-i", "inventory/aws_ec2.yml", "--list"],
            cwd=PROJECT, capture_output=True, check=False,
        )  # fmt: skip
        assert listed.returncode == 0
        instance = access_key(found.machines[0].machine.instance_id)
        calls = found.aws.cloud.calls
        assert {call.principal for call in calls} == {"CONTROLLER", instance}
        assert compared((call for call in calls if call.principal == "CONTROLLER"), "controller") == (set(), set())
        assert compared((call for call in calls if call.principal == instance), "instance") == (set(), set())
    assert not [action for action in granted("controller") if action.startswith("secretsmanager:")]


def test_install(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_aws() as aws:
        for name, value in aws.environment.items():
            monkeypatch.setenv(name, value)
        s3 = aws.client("s3")
        s3.create_bucket(Bucket=BUCKET)

        def install(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "fleet", "ssm", "install", *words],
                cwd=PROJECT, capture_output=True, text=True, check=False,
            )  # fmt: skip

        aws.cloud.calls.clear()
        refused = install("--bucket", BUCKET)
        assert refused.returncode == 6 and "put-public-access-block" in refused.stderr
        assert aws.cloud.asked("CreateDocument") == 0
        s3.put_public_access_block(
            Bucket=BUCKET,
            PublicAccessBlockConfiguration=dict.fromkeys(
                ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
            ),
        )
        calls = [call for call in aws.cloud.calls if call.operation != "PutBucketPublicAccessBlock"]
        aws.cloud.calls.clear()
        made = install("--bucket", BUCKET)
        assert (made.returncode, made.stdout) == (0, f"{REGION} document vllm-fleet-run: created\n"), made.stderr
        assert install().stdout == f"{REGION} document vllm-fleet-run: unchanged\n"
        ssm = aws.client("ssm")
        content = ssm.get_document(Name="vllm-fleet-run")["Content"]
        ssm.update_document(
            Name="vllm-fleet-run", Content=content.replace("One run", "A run"), DocumentVersion="$LATEST"
        )
        ssm.update_document_default_version(Name="vllm-fleet-run", DocumentVersion="2")
        assert install().stdout == f"{REGION} document vllm-fleet-run: updated\n"
        missing, idle = compared([*calls, *aws.cloud.calls], "install")
        # Tags are given with the document, which asks for this right and makes no call of its own.
        assert (missing, idle) == (set(), {"ssm:AddTagsToResource arn:aws:ssm:*:ACCOUNT:document/vllm-fleet-run"})
        wrong = install("--bucket", "no-such-bucket")
        assert wrong.returncode != 0 and "no-such-bucket" in wrong.stderr and "\n  mend:  " in wrong.stderr
