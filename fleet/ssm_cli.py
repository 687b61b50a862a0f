"""`./runner.py ssm`: what Systems Manager needs of this project, put there."""

from __future__ import annotations

import os
from typing import Annotated

import boto3
import typer

from fleet import aws
from fleet.aws_errors import code_of, told
from fleet.errors import ExitCode, FleetError
from fleet.options import Yes
from fleet.run_command import document
from fleet.run_command.transport import region_of

app = typer.Typer(no_args_is_help=True, help="Systems Manager: this project's document and bucket.")
Region = Annotated[str | None, typer.Option("--region", help="Region; without it, AWS_REGION's or the profile's.")]


@app.callback()
def group() -> None:
    """Keeps `install` a command of its own name."""


@app.command()
def install(
    region: Region = None,
    bucket: Annotated[
        str | None, typer.Option("--bucket", help="Bucket to look at: its region and who may read.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Make the document of this version the region's; with a bucket, say what of it is not as it must be."""
    del yes
    where = region or os.environ.get("AWS_REGION") or boto3.session.Session().region_name
    if not where:
        raise FleetError(
            "no region, and one is wanted", where="--region", mend="./runner.py ssm install --region us-east-1"
        )
    if bucket:
        _look_at(bucket, where)
    print(f"{where} document {document.NAME}: {document.install(aws.client('ssm', where), where)}")


def _look_at(bucket: str, near: str) -> None:
    """The bucket is there and nobody outside can be let in; S3 itself encrypts whatever is put."""
    s3 = aws.client("s3", region_of(bucket, near))
    try:
        with told(f"s3://{bucket}", who="ssm"):
            blocked = s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
    except FleetError as error:
        if code_of(error.__cause__ or error) != "NoSuchPublicAccessBlockConfiguration":
            raise
        blocked = {}
    names = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    if missing := [name for name in names if not blocked.get(name)]:
        raise FleetError(
            f"public access to the bucket is not blocked ({', '.join(missing)}), and results are private",
            where=f"s3://{bucket}",
            mend=f"aws s3api put-public-access-block --bucket {bucket} --public-access-block-configuration "
            + ",".join(f"{name}=true" for name in names),
            code=ExitCode.REFUSED,
            who="ssm",
        )
