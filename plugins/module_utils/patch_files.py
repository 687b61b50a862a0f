"""Files of a release: what its wheel says they were, and replacing them as a set, all or none."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
from pathlib import Path

from ansible.module_utils.patch_engine import Conflict, Patch, carries, decoded, revert


def sha256(content: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(content).hexdigest()


def installed_digest(site_packages: Path, target: str) -> str | None:
    """The file's digest as the wheel recorded it at installation (`RECORD`, hex sha256), None where none says."""
    for record in sorted(site_packages.glob("vllm*.dist-info/RECORD")):
        with record.open(newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                if len(row) >= 2 and row[0] == target and row[1].startswith("sha256="):
                    encoded = row[1].removeprefix("sha256=")
                    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
    return None


def unpatched(found: bytes, patch: Patch, expected: str | None) -> bytes:
    """What a file was before the patch.

    Args:
        found: its content.
        patch: the patch that may be in it, of whatever revision.
        expected: digest of what was installed, None where that is not known.

    Raises Conflict where that is not what was installed, or cannot be found out.
    """
    pristine = revert(decoded(found), patch).encode() if carries(found, patch) else found
    if expected not in (None, sha256(pristine), sha256(found)):
        raise Conflict("it is neither what the wheel installed nor that with the patch")
    return pristine


def vllm_version(tree: Path) -> str:
    """The version of the vLLM in a site-packages or an unpacked sdist, empty where nothing says it."""
    for place in (*sorted(tree.glob("vllm*.dist-info/METADATA")), tree / "PKG-INFO"):
        if place.is_file():
            for line in place.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("Version: "):
                    return line.removeprefix("Version: ").strip()
    return ""


def write_whole(path: Path, content: bytes, *, mode: int = 0o644, owner: tuple[int, int] | None = None) -> None:
    """Writes beside and renames: a reader sees the old or the new and nothing between. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(mode & 0o777)
        if owner is not None and owner != (part.stat().st_uid, part.stat().st_gid):
            os.chown(part, *owner)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def replace_set(contents: dict[Path, bytes]) -> None:
    """Replaces files, each keeping its mode and owner; where one cannot be, those already replaced are put back."""
    before = {path: (path.read_bytes(), path.stat()) for path in contents}
    done: list[Path] = []
    try:
        for path, content in contents.items():
            found = before[path][1]
            write_whole(path, content, mode=found.st_mode, owner=(found.st_uid, found.st_gid))
            done.append(path)
    except OSError:
        for path in done:
            content, found = before[path]
            write_whole(path, content, mode=found.st_mode, owner=(found.st_uid, found.st_gid))
        raise
