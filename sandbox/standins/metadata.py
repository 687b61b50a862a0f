"""Stand-in for EC2's instance metadata: IMDSv2 only, every read needs a token that a PUT with a lifetime gave."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from sandbox.standins.agents import ManagedInstance

ROLE = "vllm-fleet-host"
REGION = "us-east-1"
INSTANCE_ID = "i-0fee7fee7fee7fee7"


class Metadata(BaseHTTPRequestHandler):
    """Answers the paths that botocore and the roles read."""

    tokens: ClassVar[dict[str, float]] = {}
    server: Server

    def do_PUT(self) -> None:
        """Gives a token."""
        lifetime = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        if self.path != "/latest/api/token" or not lifetime.isdigit():
            self._reply(400, "")
            return
        token = secrets.token_urlsafe(32)
        self.tokens[token] = time.monotonic() + int(lifetime)
        self._reply(200, token)

    def do_GET(self) -> None:
        """Answers with a valid token alone."""
        if self.tokens.get(self.headers.get("X-aws-ec2-metadata-token", ""), 0.0) < time.monotonic():
            self._reply(401, "")
            return
        answer = _answers(self.server.whose(self.client_address[0])).get(self.path.rstrip("/"))
        self._reply(404 if answer is None else 200, answer or "")

    def _reply(self, code: int, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing: a path or a header might hold a token."""


def _answers(machine: ManagedInstance | None) -> dict[str, str]:
    """What the asking machine reads of itself; one that is no instance of the local AWS reads of a host in general."""
    instance_id = machine.machine.instance_id if machine else INSTANCE_ID
    secret_key, session_token = keys(instance_id)
    credentials = {
        "Code": "Success",
        "Type": "AWS-HMAC",
        "AccessKeyId": access_key(instance_id),
        "SecretAccessKey": secret_key,
        "Token": session_token,
        "LastUpdated": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "Expiration": (datetime.now(UTC) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    base = "/latest/meta-data"
    region = machine.region if machine else REGION
    notice = {f"{base}/spot/instance-action": machine.spot_notice} if machine and machine.spot_notice else {}
    return {
        f"{base}/iam/security-credentials": ROLE,
        f"{base}/iam/security-credentials/{ROLE}": json.dumps(credentials),
        f"{base}/instance-id": instance_id,
        f"{base}/instance-type": machine.instance_type if machine else "g5g.4xlarge",
        f"{base}/placement/region": region,
        f"{base}/placement/availability-zone": f"{region}a",
        **notice,
    }


def access_key(instance_id: str) -> str:
    """The id of the key that an instance's role has there: each its own, as in AWS."""
    return f"ASIA{instance_id.removeprefix('i-').upper():0>16}"[:20]


def keys(instance_id: str) -> tuple[str, str]:
    """The secret key and the session token that go with it, of AWS's forms and always the same; good for nothing."""
    noise = [base64.b64encode(hashlib.sha512(f"{instance_id} {n}".encode()).digest()).decode() for n in range(4)]
    return noise[0][:40], "IQoJb3JpZ2luX2Vj" + "".join(part[:84] for part in noise[1:])


class Server(ThreadingHTTPServer):
    """The service; `whose` finds the machine that asks by its address."""

    def __init__(self, address: tuple[str, int], whose: Callable[[str], ManagedInstance | None], handler: Any) -> None:
        super().__init__(address, handler)
        self.whose = whose


def serve(address: str, port: int, whose: Callable[[str], ManagedInstance | None]) -> Server:
    """A server bound to the address; the caller runs `serve_forever`."""
    return Server((address, port), whose, Metadata)
