"""Values that must be nowhere, in every form that a program might give them."""

from __future__ import annotations

import base64
import gzip
import io
import json
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote, quote_plus

_DEEPEST = 4


@dataclass(frozen=True, slots=True)
class Canary:
    """One value, and what it was planted as."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Hit:
    """A value found: which, in which form, where."""

    canary: str
    form: str
    where: str


def forms(value: str) -> dict[str, bytes]:
    """The value as it is, JSON-escaped, URL-quoted, in hex, and in base64 at each of the three places it may begin."""
    raw = value.encode()
    found = {
        "plain": raw,
        "json": json.dumps(value)[1:-1].encode(),
        "json in json": json.dumps(json.dumps(value)[1:-1])[1:-1].encode(),
        "url": quote(value, safe="").encode(),
        "url path": quote(value).encode(),
        "form": quote_plus(value).encode(),
        "hex": raw.hex().encode(),
    }
    for lead in range(3):
        # The first and the last group of four share bits with what stands beside the value.
        whole = base64.b64encode(b"\0" * lead + raw)
        inner = whole[4 if lead else 0 : len(raw + b"\0" * lead) // 3 * 4]
        found[f"base64+{lead}"] = inner
        found[f"base64url+{lead}"] = inner.translate(bytes.maketrans(b"+/", b"-_"))
    unique: dict[bytes, str] = {}
    for name, text in found.items():
        unique.setdefault(text, name)
    return {name: text for text, name in unique.items()}


class Hunter:
    """Finds canaries in bytes, packed or not."""

    def __init__(self, canaries: Iterable[Canary]) -> None:
        self._meant = {text: (canary.name, form) for canary in canaries for form, text in forms(canary.value).items()}
        self._pattern = re.compile(b"|".join(re.escape(text) for text in sorted(self._meant, key=len, reverse=True)))

    @property
    def texts(self) -> list[bytes]:
        """Every form of every canary; none holds a line's end."""
        return list(self._meant)

    def hits(self, data: bytes, where: str) -> list[Hit]:
        """What is found in the bytes, and in what they hold packed; each once."""
        found = {
            Hit(*self._meant[match.group()], inside)
            for inside, part in opened(data, where)
            for match in self._pattern.finditer(part)
        }
        return sorted(found, key=lambda hit: (hit.where, hit.canary, hit.form))


def opened(data: bytes, where: str, depth: int = 0) -> Iterator[tuple[str, bytes]]:
    """The bytes, and the content of each gzip, zip or tar in them, by where it lies."""
    yield where, data
    if depth == _DEEPEST:
        return
    try:
        if data[:2] == b"\x1f\x8b":
            yield from opened(gzip.decompress(data), f"{where} (unpacked)", depth + 1)
        elif data[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                for name in archive.namelist():
                    yield from opened(archive.read(name), f"{where}: {name}", depth + 1)
        elif data[257:262] == b"ustar":
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                for member in archive:
                    file = archive.extractfile(member)
                    if file is not None:
                        yield from opened(file.read(), f"{where}: {member.name}", depth + 1)
    except (OSError, EOFError, ValueError, zlib.error, zipfile.BadZipFile, tarfile.TarError):
        # Cut off in the middle, or something else that begins so: what is there as it is has been looked at.
        return
