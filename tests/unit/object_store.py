"""moto's S3 over HTTP for tests: a bucket, roles with real policies, and an end that may come at any time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import httpx
from moto.server import ThreadedMotoServer

from sandbox.standins import aws

BUCKET = "wheels"
aws.put_at_once()


class ObjectStore:
    """A running server and the settings by which a host's job finds it."""

    def __init__(self) -> None:
        self.server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        httpx.post(f"{self.url}/moto-api/reset", trust_env=False).raise_for_status()
        self.client = self.session().client("s3", endpoint_url=self.url)
        self.client.create_bucket(Bucket=BUCKET)

    def session(self) -> boto3.Session:
        """Whoever may do everything."""
        return boto3.Session("testing", "testing", region_name="us-east-1")

    def settings(self, **more: Any) -> dict[str, Any]:
        """What a job's spec says of the store."""
        known = {"bucket": BUCKET, "prefix": "fleet", "region": "us-east-1", "endpoint_url": self.url, "builds": True}
        return {**known, "poll_s": 0.2, "expires_s": 60.0, "wait_s": 60.0, **more}

    def listing(self) -> list[str]:
        """All that lies in the bucket."""
        return sorted(found["Key"] for found in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", []))

    def json(self, key: str) -> dict[str, Any]:
        """One object as JSON."""
        found: dict[str, Any] = json.loads(self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read())
        return found

    def only(self, *actions: str) -> tuple[str, str]:
        """From now on policies count; the keys of a user who may do these actions and nothing else."""
        iam = self.session().client("iam", endpoint_url=self.url)
        iam.create_user(UserName="host")
        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": list(actions), "Resource": "*"}]}
        iam.put_user_policy(UserName="host", PolicyName="store", PolicyDocument=json.dumps(policy))
        key = iam.create_access_key(UserName="host")["AccessKey"]
        httpx.post(f"{self.url}/moto-api/reset-auth", content=b"0", trust_env=False).raise_for_status()
        return key["AccessKeyId"], key["SecretAccessKey"]


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server for one test."""
    found = ObjectStore()
    try:
        yield found
    finally:
        httpx.post(f"{found.url}/moto-api/reset-auth", content=b"1000000", trust_env=False)
        found.server.stop()
