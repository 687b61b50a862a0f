"""The bucket from the controller's side: what hosts need is put there once, what they say is read."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fleet.aws_errors import code_of, told
from fleet.errors import ExitCode, FleetError
from fleet.run_command.bundle import Packed

PREFIX = "vllm-fleet/"
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a host's stream: its number from 1, its digest, that of the one before, and its lines."""

    number: int
    digest: str
    after: str
    lines: tuple[bytes, ...]


class Store:
    """One bucket. `s3` is a client in the bucket's own region."""

    def __init__(self, s3: Any, bucket: str) -> None:
        self.bucket = bucket
        self._s3 = s3
        self._seen: set[str] = set()

    def ensure(self, packed: Packed) -> None:
        """Puts an object that its digest names, unless it lies there."""
        key = PREFIX + packed.key
        with told(f"s3://{self.bucket}/{key}"):
            try:
                self._s3.head_object(Bucket=self.bucket, Key=key)
            except self._s3.exceptions.ClientError as error:
                # Without the right to list, S3 calls what is not there forbidden.
                if code_of(error) not in ("404", "NoSuchKey", "403"):
                    raise
                self._s3.put_object(Bucket=self.bucket, Key=key, Body=packed.content)

    def put(self, packed: Packed) -> None:
        """Puts an object that only this run has."""
        with told(f"s3://{self.bucket}/{packed.key}"):
            self._s3.put_object(Bucket=self.bucket, Key=PREFIX + packed.key, Body=packed.content)

    def new(self, run_id: str) -> Iterator[tuple[str, Chunk]]:
        """Chunks of the run that were not read before, with the instance each is of, in order for each instance."""
        with told(f"s3://{self.bucket}/{PREFIX}runs/{run_id}/"):
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=f"{PREFIX}runs/{run_id}/"
            )
            keys = sorted(item["Key"] for page in pages for item in page.get("Contents", []))
            fresh = [key for key in keys if key not in self._seen]
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                for key, content in zip(fresh, pool.map(self._get, fresh), strict=True):
                    self._seen.add(key)
                    instance, _, name = key.split(f"{run_id}/", 1)[1].partition("/")
                    yield instance, _chunk(f"s3://{self.bucket}/{key}", name, content)

    def _get(self, key: str) -> bytes:
        content: bytes = self._s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        return content


def _chunk(where: str, name: str, content: bytes) -> Chunk:
    try:
        first, *lines = gzip.decompress(content).splitlines()
        head = json.loads(first)
        chunk = Chunk(int(head["chunk"]), hashlib.sha256(content).hexdigest(), str(head["after"]), tuple(lines))
        if name != f"{chunk.number:06d}.gz":
            raise ValueError(f"it says that it is chunk {chunk.number}")
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise FleetError(
            f"a result that no host of this project wrote: {error}",
            where=where,
            mend=f"find out who wrote it; then aws s3 rm {where}",
            code=ExitCode.REFUSED,
        ) from None
    return chunk
