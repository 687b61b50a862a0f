"""The fleet's wheels in S3: content-addressed files, one manifest for each build id, a lock for whoever builds.

Runs in the tools environment, which carries boto3, with the instance's own role. Nothing is ever overwritten but the
lock, and that only by `If-Match`: `wheels/<sha256>/<file name>` and `builds/<build id>/manifest.json` are put with
`If-None-Match: *`. Ages are differences of two of the store's own times (`Date` of its answer and `LastModified`), so
a host's clock does not matter.
"""

from __future__ import annotations

import base64
import email.utils
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import botocore.exceptions
from job import JobError

SCHEMA = 1
ACTIONS = "s3:ListBucket on the bucket, s3:GetObject and (where it builds) s3:PutObject on its objects"
# A put that is refused for a condition: 412, 409 where two come at once, 404 for If-Match on what is not there.
_CONDITION = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey", "412", "409", "404")
_ABSENT = ("NoSuchKey", "404")
_DENIED = ("AccessDenied", "AllAccessDisabled", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "403")
_AT_ONCE = 8
_CHUNK = 1024 * 1024


class StoreError(JobError):
    """The store denies, lacks, or does not answer what was asked."""


@dataclass(frozen=True, slots=True)
class Found:
    """One small object: its bytes, its ETag, and how long ago the store last wrote it, seconds by its own clock."""

    body: bytes
    etag: str
    age_s: float

    @property
    def content(self) -> dict[str, Any]:
        """The object as JSON; empty where it is none."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file of the wheelhouse: distribution and version, file name, digest and size in bytes."""

    name: str
    version: str
    file: str
    sha256: str
    bytes: int

    @property
    def key(self) -> str:
        """Where the store keeps it."""
        return f"wheels/{self.sha256}/{self.file}"


class Store:
    """A prefix of a bucket."""

    def __init__(self, bucket: str, prefix: str, region: str, endpoint_url: str) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.where = f"s3://{bucket}/{self.prefix}"
        config = botocore.config.Config(
            connect_timeout=5, read_timeout=60, retries={"total_max_attempts": 3}, max_pool_connections=_AT_ONCE * 2
        )
        self.client = boto3.Session(region_name=region).client("s3", endpoint_url=endpoint_url or None, config=config)

    def get(self, key: str) -> Found | None:
        """A small object; None where it is not there.

        Raises StoreError, also where the role may not list the bucket (S3 then answers 403 for what is not there).
        """
        try:
            with self._told():
                reply = self.client.get_object(Bucket=self.bucket, Key=self.prefix + key)
                body = reply["Body"].read()
        except StoreError as error:
            if _code(error.__cause__) in _ABSENT:
                return None
            raise
        now = email.utils.parsedate_to_datetime(reply["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Found(body, reply["ETag"], (now - reply["LastModified"]).total_seconds())

    def put(self, key: str, body: bytes, *, over: str = "") -> str | None:
        """Puts where nothing is, or over the one ETag named; the new ETag, or None where somebody else was first.

        An answer may be lost and the put repeated: whatever is there to the byte was put by this call.
        """
        condition = {"IfMatch": over} if over else {"IfNoneMatch": "*"}
        for _ in range(3):
            try:
                with self._told():
                    reply = self.client.put_object(Bucket=self.bucket, Key=self.prefix + key, Body=body, **condition)
                return str(reply["ETag"])
            except StoreError as error:
                if _code(error.__cause__) not in _CONDITION:
                    raise
            found = self.get(key)
            if found is not None:
                return found.etag if found.body == body else None
            if over:
                return None
        return None

    def names(self, under: str) -> list[str]:
        """The folders that begin with `under`, as their last part."""
        with self._told():
            pages = self.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=self.prefix + under, Delimiter="/"
            )
            found = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", [])]
        return [name.rstrip("/").rsplit("/", 1)[-1] for name in found]

    def manifest(self, build_id: str) -> dict[str, Any] | None:
        """The manifest of a build that was published whole; None where there is none."""
        found = self.get(f"builds/{build_id}/manifest.json")
        return None if found is None else found.content

    def probe_writing(self) -> None:
        """Raises StoreError where wheels could not be put: known before a build, not after it."""
        empty = hashlib.sha256(b"").hexdigest()
        self.put(f"wheels/{empty}/probe", b"")

    def publish(self, manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
        """Puts the wheels and last of all the manifest; the manifest that counts, which may be another's."""
        build_id = manifest["build_id"]
        self._each(lambda wheel: self._put_wheel(wheel, folder / wheel.file), wheels_of(manifest))
        key = f"builds/{build_id}/manifest.json"
        if self.put(key, json.dumps(manifest, indent=1, sort_keys=True).encode()):
            return manifest
        winner = self.manifest(build_id)
        if winner is None:
            raise StoreError("the manifest was refused, and none is there", self.where + key, "converge again")
        return winner

    def fetch(self, wheels: Iterable[Wheel], folder: Path) -> None:
        """Gets wheels, several at once; what lies there whole is kept, a part goes on where it ended.

        Raises StoreError where one is not there, JobError for one whose digest is another.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._each(lambda wheel: self._get_wheel(wheel, folder / wheel.file), wheels)

    def _put_wheel(self, wheel: Wheel, path: Path) -> None:
        try:
            with self._told():
                self.client.head_object(Bucket=self.bucket, Key=self.prefix + wheel.key)
            return
        except StoreError as error:
            if _code(error.__cause__) not in _ABSENT:
                raise
        digest = base64.b64encode(bytes.fromhex(wheel.sha256)).decode()
        try:
            with self._told(), path.open("rb") as body:
                self.client.put_object(
                    Bucket=self.bucket, Key=self.prefix + wheel.key, Body=body, IfNoneMatch="*", ChecksumSHA256=digest
                )
        except StoreError as error:
            # Its name is its digest: whoever was first put the same.
            if _code(error.__cause__) not in _CONDITION:
                raise

    def _get_wheel(self, wheel: Wheel, path: Path) -> None:
        if path.is_file() and digest_of(path) == wheel.sha256:
            return
        part = path.with_name(f"{path.name}.part")
        begun = part.stat().st_size if part.is_file() else 0
        if begun >= wheel.bytes:
            part.unlink(missing_ok=True)
            begun = 0
        with self._told(), part.open("ab") as file:
            more = {"Range": f"bytes={begun}-"} if begun else {}
            reply = self.client.get_object(Bucket=self.bucket, Key=self.prefix + wheel.key, **more)
            for chunk in reply["Body"].iter_chunks(_CHUNK):
                file.write(chunk)
        found = digest_of(part)
        if found != wheel.sha256:
            part.unlink()
            raise JobError(
                f"{wheel.file} from the store has sha256 {found}, and {wheel.sha256} is wanted",
                self.where + wheel.key,
                f"aws s3 rm {self.where}{wheel.key}, and ask who may write there; then converge again",
                refused=True,
            )
        part.replace(path)

    def _each(self, act: Callable[[Wheel], None], wheels: Iterable[Wheel]) -> None:
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            futures = [pool.submit(act, wheel) for wheel in wheels]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong in the house form; the cause stays readable for whoever expects it."""
        try:
            yield
        except botocore.exceptions.ClientError as error:
            code = _code(error)
            if code == "NoSuchBucket":
                what, mend = f"bucket {self.bucket} is not there", f"aws s3 mb s3://{self.bucket}"
            elif code in _DENIED:
                what, mend = (
                    f"the store denies {error.operation_name} to this host ({code})",
                    f"allow its role {ACTIONS}",
                )
            elif code == "RequestTimeTooSkewed":
                what, mend = "the store takes this host's clock for wrong by more than it allows", "chronyc makestep"
            else:
                what, mend = f"the store answered {error.operation_name} with {code}", "converge again"
            raise StoreError(what, self.where, mend, refused=True) from error
        except botocore.exceptions.NoCredentialsError as error:
            mend = f"attach an instance profile whose role has {ACTIONS}"
            raise StoreError("no instance role gives credentials", "instance metadata", mend, refused=True) from error
        except (botocore.exceptions.BotoCoreError, botocore.exceptions.HTTPClientError) as error:
            mend = (
                "check the route to S3 and vllm_source_build_bucket_endpoint_url, or set vllm_source_build_bucket to ''"
            )
            what = f"the store does not answer: {type(error).__name__}"
            raise StoreError(what, self.where, mend, refused=True) from error


def open_store(settings: dict[str, Any]) -> Store:
    """The store that the spec's `store` names."""
    try:
        return Store(settings["bucket"], settings["prefix"], settings["region"], settings["endpoint_url"])
    except (ValueError, botocore.exceptions.BotoCoreError) as error:
        mend = "set vllm_source_build_bucket_region and vllm_source_build_bucket_endpoint_url"
        raise StoreError(f"the store cannot be addressed: {error}", settings["bucket"], mend, refused=True) from error


def wheels_of(manifest: dict[str, Any]) -> list[Wheel]:
    """The wheels that a manifest names; raises JobError for one that no wheelhouse can hold."""
    try:
        found = [Wheel(**{key: entry[key] for key in Wheel.__slots__}) for entry in manifest["wheels"]]
        good = found and all(
            re.fullmatch(r"[0-9a-f]{64}", wheel.sha256) and re.fullmatch(r"[\w.+!-]+\.whl", wheel.file, re.ASCII)
            for wheel in found
        )
    except (KeyError, TypeError):
        good = False
    if not good:
        raise JobError(
            "the store's manifest lists no wheels that could be taken",
            f"builds/{manifest.get('build_id')}/manifest.json",
            "remove that manifest from the bucket, and ask who may write there; then converge again",
            refused=True,
        )
    return found


def digest_of(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _code(error: BaseException | None) -> str:
    return str(error.response["Error"]["Code"]) if isinstance(error, botocore.exceptions.ClientError) else ""
