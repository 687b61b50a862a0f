"""A release's lock: name, version and digests of all that it and its build install from an index, in pip's words."""

from __future__ import annotations

import re
from pathlib import Path

from job import LIB, JobError

LOCKS = LIB / "locks"


def path_of(name: str) -> Path:
    """The lock's file; raises JobError, refused, where there is none of that name."""
    path = LOCKS / name
    if Path(name).name != name or not path.is_file():
        raise JobError(
            f"there is no lock {name}, and the release is to be held to it",
            str(LOCKS),
            "set lock in vllm_source_build_releases to a file of roles/vllm_source_build/files/locks, or take it out",
            refused=True,
        )
    return path


def held(resolved: str, lock: Path) -> str:
    """What was resolved, with the lock's digests in place of those that the index tells.

    Args:
        resolved: requirements with digests, as uv compiles them; a file of this host keeps its own.
        lock: the lock's file.

    Raises JobError, refused, for what the lock does not have.
    """
    known = _entries(lock.read_text())
    lines, strange = [], []
    for requirement, digests in _entries(resolved).items():
        if " @ " not in requirement and requirement not in known:
            strange.append(requirement)
        lines.append(f"{requirement} {known.get(requirement, digests)}\n")
    if strange:
        raise JobError(
            f"the release comes to {', '.join(strange)}, which its lock does not have",
            str(lock),
            f"resolve roles/vllm_source_build/files/locks/{lock.stem}.in anew, under another name, and set lock to it",
            refused=True,
        )
    return "".join(lines)


def _entries(text: str) -> dict[str, str]:
    """Requirement without its marker to its digests, as words of a requirements file."""
    found = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        requirement, _, digests = line.partition(" --hash=")
        if digests:
            found[requirement.partition(" ; ")[0].strip()] = f"--hash={digests}"
    return found
