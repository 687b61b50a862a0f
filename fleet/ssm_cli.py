"""`./runner.py ssm`: what Systems Manager needs of this project, put there."""

from __future__ import annotations

import os
from typing import Annotated

import boto3
import typer

from fleet import aws
from fleet.audits import account
from fleet.errors import ExitCode, FleetError
from fleet.options import Yes
from fleet.run_command import document

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


def _look_at(name: str, near: str) -> None:
    """Raises FleetError for a bucket that the public might be let into."""
    check = account.bucket(name, near)
    if not check.ok:
        raise FleetError(
            f"public access to the bucket is {check.found}", where=check.subject, mend=check.mend,
            code=ExitCode.REFUSED, who="ssm",
        )  # fmt: skip
