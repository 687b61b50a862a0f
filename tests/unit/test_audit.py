"""The audit against the local AWS: what a launch makes passes, and each thing that is wrong is found by itself."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleet import running
from fleet.audits import roles
from fleet.cli import app
from fleet.collector import Collector
from fleet.errors import ExitCode
from fleet.execution import Finished
from fleet.paths import PROJECT
from fleet.requests import Request
from fleet.run_command import document
from sandbox.standins import aws
from sandbox.standins.agents import ManagedInstance
from tests.unit.doubles import with_sshd
from tests.unit.local_aws import REGION, Local, local_aws
from tests.unit.policies import compared

TOKEN = "hf_" + "x" * 34
TAGS = [{"Key": "vllm-fleet", "Value": "main"}, {"Key": "vllm-fleet-role", "Value": "vllm"}]
ARN, BUCKET = "arn:aws:s3:::", "vllm-fleet-audited"
SECRET = f"arn:aws:secretsmanager:{REGION}:123456789012:secret:vllm/hf-token-AbCdEf"
DOCUMENTED = json.loads((PROJECT / "docs" / "policies" / "instance.json").read_text().replace("BUCKET", BUCKET))


class Account:
    """A local AWS with the fleet's bucket, document and profile, and instances as they are asked for."""

    def __init__(self, local: Local, folder: Path) -> None:
        self.local = local
        self.folder = folder
        self.instances: list[ManagedInstance] = []
        self.ec2 = local.client("ec2")
        self.iam = local.client("iam")
        s3 = local.client("s3")
        s3.create_bucket(Bucket=BUCKET)
        s3.put_public_access_block(Bucket=BUCKET, PublicAccessBlockConfiguration=dict.fromkeys(
            ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
        ))  # fmt: skip
        document.install(local.client("ssm"), REGION)
        aws.profile_of_hosts(self.iam)
        self.iam.put_role_policy(RoleName=aws.PROFILE, PolicyName="vllm-fleet", PolicyDocument=json.dumps(DOCUMENTED))
        vpc = self.ec2.describe_vpcs()["Vpcs"][0]["VpcId"]
        self.group = self.ec2.create_security_group(GroupName="closed", Description="closed", VpcId=vpc)["GroupId"]

    def allow(self, statement: dict[str, Any]) -> None:
        """Gives the hosts' role another policy."""
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **statement}]}
        self.iam.put_role_policy(RoleName=aws.PROFILE, PolicyName="more", PolicyDocument=json.dumps(policy))

    def instance(self, **changes: Any) -> ManagedInstance:
        """An instance as a launch makes it, but for the changes, with its agent."""
        wanted: dict[str, Any] = {
            "ImageId": "ami-1", "MinCount": 1, "MaxCount": 1, "SecurityGroupIds": [self.group],
            "IamInstanceProfile": {"Name": aws.PROFILE},
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "BlockDeviceMappings": [{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8, "Encrypted": True}}],
            "TagSpecifications": [{"ResourceType": "instance", "Tags": TAGS}],
            **changes,
        }  # fmt: skip
        [made] = self.ec2.run_instances(**{name: value for name, value in wanted.items() if value})["Instances"]
        self.instances.append(self.local.add(self.folder / made["InstanceId"], instance_id=made["InstanceId"]))
        return self.instances[-1]

    def words(self) -> list[str]:
        """The command over EC2's own inventory, and what no instance of EC2's needs."""
        variables = {
            "vllm_fleet_bucket": BUCKET, "vllm_fleet_endpoint_url": self.local.url, "vllm_become": False,
            "ansible_python_interpreter": sys.executable,
        }  # fmt: skip
        more = self.folder / "more.json"
        hosts = {one.machine.instance_id: variables for one in self.instances}
        more.write_text(json.dumps({"aws_ec2": {"hosts": hosts}}))
        return ["audit", "-i", str(PROJECT / "inventory" / "aws_ec2.yml"), "-i", str(more)]

    def audit(self, *, code: ExitCode = ExitCode.OK) -> tuple[int, dict[str, dict[str, Any]], str]:
        """Exit code, findings by check, and the output as a person gets it; `code` is what the hosts' run comes to."""
        self.local.cloud.calls.clear()
        done = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(running, "shown", lambda request, _: ran(request, code))
            done = [CliRunner().invoke(app, [*self.words(), *words]) for words in ([], ["--json"])]
        assert done[1].stdout, done[1].exception
        checks = json.loads(done[1].stdout)["checks"]
        assert done[0].exit_code == done[1].exit_code
        assert all(check["ok"] == (not check["mend"]) for check in checks)
        return done[1].exit_code, {check["name"]: check for check in checks if not check["ok"]}, done[0].stdout

    def whole(self, *words: str) -> tuple[int, dict[str, Any], str]:
        """Exit code, JSON and what was said besides, of a command that reaches its hosts."""
        done = subprocess.run(
            [sys.executable, "-m", "fleet", *self.words(), "--json", *words], cwd=PROJECT, env=os.environ,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr


def ran(request: Request, code: ExitCode) -> running.Ran:
    """A run that saw nothing of any host."""
    return running.Ran(request, Finished(code, {}), Collector(), Path("log"), 0.0)


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Account]:
    with local_aws() as local:
        for name, value in local.environment.items():
            monkeypatch.setenv(name, value)
        yield Account(local, tmp_path)


def test_what_a_launch_makes_passes_with_the_documented_rights(account: Account) -> None:
    document_of = json.dumps(DOCUMENTED)
    attached = account.iam.create_policy(PolicyName="vllm-fleet", PolicyDocument=document_of)["Policy"]["Arn"]
    account.iam.attach_role_policy(RoleName=aws.PROFILE, PolicyArn=attached)
    account.allow({"Action": "secretsmanager:GetSecretValue", "Resource": SECRET})
    for _ in range(2):
        account.instance()
    code, findings, said = account.audit()
    assert (code, findings) == (ExitCode.OK, {}), findings
    assert "audit     16 checks of 4 things, 0 to mend" in said
    assert compared(account.local.cloud.calls, "audit") == (set(), set())


def test_each_thing_that_is_wrong_is_found_with_its_mend(account: Account) -> None:
    account.ec2.create_key_pair(KeyName="mine")
    account.ec2.authorize_security_group_ingress(
        GroupId=account.group,
        IpPermissions=[{"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}],
    )
    account.local.client("s3").delete_public_access_block(Bucket=BUCKET)
    account.local.client("ssm").delete_document(Name=document.NAME)
    account.allow({"Action": "s3:*", "Resource": "*"})
    bad = account.instance(
        KeyName="mine", UserData=f"#!/bin/sh\nexport HF_TOKEN={TOKEN}\n", MetadataOptions=None,
        BlockDeviceMappings=[{"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 8, "Encrypted": False}}],
    )  # fmt: skip
    bad.latest = False
    code, findings, said = account.audit()
    assert code == ExitCode.DRIFT
    found = {name: check["found"] for name, check in findings.items()}
    [volume] = [word for word in found.pop("volumes").split() if word.startswith("vol-")]
    assert volume
    assert found == {
        "inbound": f"{account.group}: tcp 22 from 0.0.0.0/0",
        "key pair": "mine",
        "metadata": "tokens optional, hop limit 1",
        "user data": "holds what looks like a secret",
        "role": "vllm-fleet-host may more than documented: s3:* on *",
        "agent": "3.3.0.0, Online, not the latest",
        "document": "the document vllm-fleet-run is not in this region",
        "public access": "not blocked (BlockPublicAcls, IgnorePublicAcls, BlockPublicPolicy, RestrictPublicBuckets), "
        "and results are private",
    }
    assert TOKEN not in said and "9 to mend" in said
    # Two of the mends by AWS's own words.
    revoke = findings["inbound"]["mend"]
    assert revoke.startswith(f"aws ec2 revoke-security-group-ingress --region {REGION} --group-id {account.group} ")
    rules = json.loads(revoke.split("--ip-permissions ")[1].strip("'"))
    account.ec2.revoke_security_group_ingress(GroupId=account.group, IpPermissions=rules)
    account.ec2.modify_instance_metadata_options(
        InstanceId=bad.machine.instance_id, HttpTokens="required", HttpPutResponseHopLimit=1
    )
    _, findings, _ = account.audit()
    assert "inbound" not in findings and "metadata" not in findings and "key pair" in findings


def test_packed_user_data_is_looked_into(account: Account) -> None:
    packed = gzip.compress(f"token: {TOKEN}".encode())
    one = account.instance(UserData=packed)
    _, findings, _ = account.audit()
    assert set(findings) == {"user data"}
    account.ec2.terminate_instances(InstanceIds=[one.machine.instance_id])
    account.instances.clear()
    account.instance(UserData="#!/bin/sh\necho hello\n")
    _, findings, _ = account.audit()
    assert findings == {}


def test_an_instance_without_role_or_agent(account: Account) -> None:
    one = account.instance(IamInstanceProfile=None)
    del account.local.agents[one.machine.instance_id]
    _, findings, _ = account.audit()
    assert {name: check["found"] for name, check in findings.items()} == {
        "role": "no instance profile", "agent": "Systems Manager does not know it",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("statement", "beyond"),
    [
        ({"Action": ["s3:GetObject"], "Resource": f"arn:aws:s3:::{BUCKET}/vllm-fleet/jobs/*"}, None),
        ({"Action": "s3:getobject", "Resource": f"arn:aws:s3:::{BUCKET}/vllm-fleet/jobs/one"}, None),
        ({"Action": "s3:GetObject", "Resource": f"{ARN}{BUCKET}/*"}, f"s3:GetObject on {ARN}{BUCKET}/*"),
        ({"Action": "s3:GetObject", "Resource": f"{ARN}*/vllm-fleet/*"}, f"s3:GetObject on {ARN}*/vllm-fleet/*"),
        ({"Action": "secretsmanager:GetSecretValue", "Resource": "*"}, "secretsmanager:GetSecretValue on *"),
        ({"Action": "secretsmanager:GetSecretValue", "Resource": SECRET[:-7] + "-??????"}, None),
        ({"Action": "secretsmanager:*", "Resource": SECRET}, f"secretsmanager:* on {SECRET}"),
        ({"NotAction": "iam:*", "Resource": "*"}, "* by NotAction"),
        ({"Action": "s3:PutObject", "NotResource": "arn:aws:s3:::other/*"}, "s3:PutObject by NotResource"),
        ({"Action": "kms:Decrypt", "Resource": "*"}, "kms:Decrypt on *"),
    ],
)  # fmt: skip
def test_a_role_that_may_more(account: Account, statement: dict[str, Any], beyond: str | None) -> None:
    account.allow(statement)
    assert roles.wider(account.iam, aws.PROFILE) == ([beyond] if beyond else [])


def test_a_managed_policy_is_read_in_its_current_version(account: Account) -> None:
    def policy(action: str) -> str:
        return json.dumps(
            {"Version": "2012-10-17", "Statement": {"Effect": "Allow", "Action": action, "Resource": "*"}}
        )

    arn = account.iam.create_policy(PolicyName="x", PolicyDocument=policy("ec2:*"))["Policy"]["Arn"]
    account.iam.attach_role_policy(RoleName=aws.PROFILE, PolicyArn=arn)
    assert roles.wider(account.iam, aws.PROFILE) == ["ec2:* on *"]
    account.iam.create_policy_version(PolicyArn=arn, PolicyDocument=policy("iam:*"), SetAsDefault=True)
    assert roles.wider(account.iam, aws.PROFILE) == ["iam:* on *"]


def test_hosts_are_looked_at_too_and_one_that_is_not_reached_is_told(account: Account) -> None:
    first, second = account.instance(), account.instance()
    first.variables["PATH"] = with_sshd(account.folder / "bin")
    account.local.cloud.calls.clear()
    code, told, said = account.whole()
    ids = {one.machine.instance_id for one in (first, second)}
    looked = {check["subject"] for check in told["checks"] if check["name"] == "reboot"}
    assert (looked, told["failed"]) == (ids, {}), said
    # Systems Manager is the way in there.
    findings = {(check["subject"], check["found"][:23]) for check in told["checks"] if not check["ok"]}
    assert (first.machine.instance_id, "tcp 0.0.0.0:22 sshd: wh") in findings
    assert {check["subject"] for check in told["checks"] if check["name"] == "inbound"} == ids
    assert code == (ExitCode.OK if all(check["ok"] for check in told["checks"]) else ExitCode.DRIFT)
    calls = [call for call in account.local.cloud.calls if call.principal == "testing"]
    assert compared(calls, "audit", "controller")[0] == set()
    # The other is looked at, and what AWS knows of both stands.
    del account.local.agents[second.machine.instance_id]
    code, told, said = account.whole()
    assert code == ExitCode.UNREACHABLE, said
    assert set(told["failed"]) == {second.machine.instance_id}
    assert [check["subject"] for check in told["checks"] if check["name"] == "reboot"] == [first.machine.instance_id]
    assert {check["subject"] for check in told["checks"] if check["name"] == "inbound"} == ids
    assert f"1 of 2 hosts left: {second.machine.instance_id}" in said


def test_a_run_that_is_refused_leaves_what_the_account_tells(account: Account) -> None:
    one = account.instance()
    account.local.client("ssm").delete_document(Name=document.NAME)
    code, told, said = account.whole()
    assert code == told["error"]["code"] == ExitCode.BAD_INPUT, said
    assert "document" in told["error"]["what"]
    assert {check["name"] for check in told["checks"] if not check["ok"]} == {"document"}
    assert {check["subject"] for check in told["checks"] if check["name"] == "inbound"} == {one.machine.instance_id}
