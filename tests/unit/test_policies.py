"""The policies in docs/policies are what is really asked for: nothing used that is not granted, nothing beyond."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fleet.paths import PROJECT
from fleet.run_command.transport import execute
from sandbox.standins.metadata import access_key
from tests.unit.fleet_on_ec2 import BUCKET, SOON, fleet
from tests.unit.local_aws import REGION, local_aws
from tests.unit.policies import compared, granted


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
