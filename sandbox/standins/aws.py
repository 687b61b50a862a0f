"""The local AWS: moto answers EC2, S3 and Secrets Manager; here is what the sandbox finds in it."""

from __future__ import annotations

import json
import secrets
import threading
from typing import Any

import boto3
from moto.s3.responses import S3Response

REGION = "us-east-1"
SECRET_ID = "vllm-fleet/hf-token"  # noqa: S105


def seed(endpoint_url: str) -> None:
    """Puts in a bucket, and a Hugging Face token that is random and of no use anywhere."""
    session = boto3.Session("testing", "testing", region_name=REGION)
    session.client("s3", endpoint_url=endpoint_url).create_bucket(Bucket="vllm-fleet")
    session.client("secretsmanager", endpoint_url=endpoint_url).create_secret(
        Name=SECRET_ID, SecretString=json.dumps({"HF_TOKEN": f"hf_{secrets.token_hex(17)}"})
    )


def put_at_once() -> None:
    """Makes conditional puts what they are in S3: moto looks at the condition and puts in two steps."""
    put, turn = S3Response.put_object, threading.Lock()

    def put_object(self: S3Response) -> Any:
        with turn:
            return put(self)

    S3Response.put_object = put_object
