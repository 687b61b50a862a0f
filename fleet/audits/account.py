"""What the fleet has in the account beside its instances: its bucket and its document."""

from __future__ import annotations

from typing import Any

from fleet import aws
from fleet.audits import Check
from fleet.aws_errors import code_of, told
from fleet.errors import FleetError
from fleet.run_command import document
from fleet.run_command.transport import region_of

_BLOCKS = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")


def bucket(name: str, near: str) -> Check:
    """Whether nobody outside can be let in; S3 itself encrypts whatever is put."""
    subject = f"s3://{name}"
    with told(subject):
        missing = _unblocked(aws.client("s3", region_of(name, near)), name)
    if not missing:
        return Check(subject, "public access", "blocked")
    mend = f"aws s3api put-public-access-block --bucket {name} --public-access-block-configuration " + ",".join(
        f"{block}=true" for block in _BLOCKS
    )
    return Check(subject, "public access", f"not blocked ({', '.join(missing)}), and results are private", mend)


def _unblocked(s3: Any, name: str) -> list[str]:
    try:
        blocked = s3.get_public_access_block(Bucket=name)["PublicAccessBlockConfiguration"]
    except Exception as error:
        if code_of(error) != "NoSuchPublicAccessBlockConfiguration":
            raise
        blocked = {}
    return [block for block in _BLOCKS if not blocked.get(block)]


def documents(region: str) -> Check:
    """Whether the document is this version's."""
    subject = f"{region} {document.NAME}"
    try:
        version = document.installed(aws.client("ssm", region), region)
    except FleetError as error:
        if error.__cause__ is not None:  # what AWS refuses to tell is no finding
            raise
        return Check(subject, "document", error.what, error.mend)
    return Check(subject, "document", f"version {version}, this project's")
