"""AWS's refusals end in the house form, each cause with its exit code."""

from __future__ import annotations

import boto3
import pytest
from botocore import exceptions
from botocore.config import Config
from botocore.exceptions import ClientError

from fleet import aws_errors
from fleet.errors import ExitCode, FleetError


# Causes by the codes in AWS's documentation (EC2 "Error codes", S3 "Error responses", IAM "Common errors").
@pytest.mark.parametrize(
    ("code", "exit_code", "words"),
    [
        ("ExpiredTokenException", ExitCode.BAD_INPUT, "credentials"),
        ("AuthFailure", ExitCode.BAD_INPUT, "credentials"),
        ("InvalidClientTokenId", ExitCode.BAD_INPUT, "credentials"),
        ("AccessDeniedException", ExitCode.REFUSED, "docs/policies"),
        ("UnauthorizedOperation", ExitCode.REFUSED, "docs/policies"),
        ("VcpuLimitExceeded", ExitCode.REFUSED, "quota"),
        ("ThrottlingException", ExitCode.UNREACHABLE, "later"),
        ("RequestLimitExceeded", ExitCode.UNREACHABLE, "later"),
        ("InsufficientInstanceCapacity", ExitCode.UNREACHABLE, "another zone"),
        ("PermanentRedirect", ExitCode.BAD_INPUT, "another region"),
        ("NoSuchBucket", ExitCode.BAD_INPUT, "no such bucket"),
        ("SomethingNew", ExitCode.HOST_FAILED, "SomethingNew"),
    ],
)
def test_each_cause_has_its_code(code: str, exit_code: ExitCode, words: str) -> None:
    with pytest.raises(FleetError) as raised, aws_errors.told("us-east-1", who="inventory"):
        raise ClientError({"Error": {"Code": code, "Message": "AWS's own words"}}, "DescribeInstances")
    assert raised.value.code is exit_code
    text = str(raised.value)
    assert text.startswith("inventory: ") and "\n  where: us-east-1\n  mend:  " in text
    assert words in text and "AWS's own words" in text


def test_no_credentials_is_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, f"{tmp_path}/none")
    with pytest.raises(FleetError) as raised, aws_errors.told("us-east-1"):
        boto3.Session(region_name="us-east-1").client("ec2").describe_instances()
    assert raised.value.code is ExitCode.BAD_INPUT


def test_a_region_that_is_none_is_unreachable() -> None:
    # Nothing listens at port 1: what a name that no region has comes to.
    settings = Config(retries={"max_attempts": 0}, connect_timeout=2)
    client = boto3.Session("testing", "testing", region_name="us-east-1").client(
        "ec2", endpoint_url="http://127.0.0.1:1", config=settings
    )
    with pytest.raises(FleetError) as raised, aws_errors.told("us-east-9"):
        client.describe_instances()
    assert raised.value.code is ExitCode.UNREACHABLE and "region" in str(raised.value)


def test_other_errors_pass() -> None:
    with pytest.raises(ValueError, match="mine"), aws_errors.told("us-east-1"):
        raise ValueError("mine")
    assert aws_errors.code_of(exceptions.NoRegionError()) == ""
