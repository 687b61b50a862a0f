"""S3 with the instance's own role and the standard library alone: a bare host has no boto3.

Signature Version 4 and IMDSv2 as AWS documents them; Python 3.8 and newer.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request

_METADATA = "http://169.254.169.254"
# A request that AWS slowed down or lost is sent again: each names its whole content, so twice is once.
_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)


class Refused(Exception):
    """S3 or the metadata service says no, in its own words."""


class Metadata:
    """The instance's metadata service; a token is asked for once."""

    def __init__(self) -> None:
        self._base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _METADATA).rstrip("/")
        self._token = ""

    def get(self, path: str) -> str | None:
        """The text at a path below `latest`; None where there is none. Raises OSError without the service."""
        if not self._token:
            ask = urllib.request.Request(f"{self._base}/latest/api/token", method="PUT")
            ask.add_header("X-aws-ec2-metadata-token-ttl-seconds", "21600")
            self._token = self._read(ask)
        ask = urllib.request.Request(f"{self._base}/latest/{path}")
        ask.add_header("X-aws-ec2-metadata-token", self._token)
        try:
            return self._read(ask)
        except urllib.error.HTTPError as error:
            if error.code == 401:
                self._token = ""
            return None

    def _read(self, ask: urllib.request.Request) -> str:
        # Link-local: never through a proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(ask, timeout=5) as answer:
            return str(answer.read().decode())


class Store:
    """One bucket below a prefix, by the credentials of the instance's role."""

    def __init__(self, metadata: Metadata, bucket: str, prefix: str, region: str, endpoint_url: str = "") -> None:
        self._metadata = metadata
        self._region = region
        base = endpoint_url or f"https://{bucket}.s3.{region}.amazonaws.com"
        # A bucket's own host name where it is AWS's; an endpoint of somebody's is asked by path.
        self._base = f"{base.rstrip('/')}/{bucket}" if endpoint_url else base
        self._prefix = prefix
        self._keys: dict[str, str] = {}
        self._until = 0.0

    def get(self, key: str) -> bytes:
        """The object's content."""
        return self._ask("GET", key, b"")

    def put(self, key: str, content: bytes) -> None:
        """Puts the object."""
        self._ask("PUT", key, content)

    def _ask(self, method: str, key: str, body: bytes) -> bytes:
        for wait_s in (*_WAITS_S, None):
            try:
                with urllib.request.urlopen(self._signed(method, key, body), timeout=60) as answer:
                    return bytes(answer.read())
            except urllib.error.HTTPError as error:
                said = error.read().decode(errors="replace")[:300]
                if wait_s is None or error.code not in (429, 500, 502, 503, 504):
                    raise Refused(f"{method} {key}: HTTP {error.code} {said}") from None
            except OSError as error:
                if wait_s is None:
                    raise Refused(f"{method} {key}: {error}") from None
            time.sleep(wait_s)
        raise AssertionError("the last try returns or raises")

    def _signed(self, method: str, key: str, body: bytes) -> urllib.request.Request:
        url = f"{self._base}/{urllib.parse.quote(self._prefix + key)}"
        parts = urllib.parse.urlsplit(url)
        keys = self._credentials()
        now = datetime.datetime.now(datetime.timezone.utc)
        stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
        digest = hashlib.sha256(body).hexdigest()
        headers = {
            "content-type": "application/octet-stream",
            "host": parts.netloc,
            "x-amz-content-sha256": digest,
            "x-amz-date": stamp,
            "x-amz-security-token": keys["Token"],
        }
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        canonical = f"{method}\n{parts.path}\n\n{lines}\n{names}\n{digest}"
        scope = f"{day}/{self._region}/s3/aws4_request"
        to_sign = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
        secret = f"AWS4{keys['SecretAccessKey']}".encode()
        for word in (day, self._region, "s3", "aws4_request"):
            secret = hmac.new(secret, word.encode(), hashlib.sha256).digest()
        signature = hmac.new(secret, to_sign.encode(), hashlib.sha256).hexdigest()
        ask = urllib.request.Request(url, data=body if method == "PUT" else None, method=method)
        for name in headers:
            if name != "host":
                ask.add_header(name, headers[name])
        credential = f"{keys['AccessKeyId']}/{scope}"
        ask.add_header(
            "Authorization",
            f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}",
        )
        return ask

    def _credentials(self) -> dict[str, str]:
        """The role's keys, in this process's memory alone; asked for anew before they end."""
        if time.time() < self._until:
            return self._keys
        path = "meta-data/iam/security-credentials/"
        role = (self._metadata.get(path) or "").strip()
        found = self._metadata.get(path + role) if role else None
        if not found:
            raise Refused("the instance has no role: no credentials in its metadata")
        self._keys = json.loads(found)
        ends = datetime.datetime.strptime(self._keys["Expiration"], "%Y-%m-%dT%H:%M:%SZ")
        self._until = ends.replace(tzinfo=datetime.timezone.utc).timestamp() - 300
        return self._keys
