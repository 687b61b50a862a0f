"""Which mount a path lies on, from the kernel's own list. Pure but for `mount_of`, which reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo: where it is seen, its file system, what is mounted, and its options."""

    point: str
    fstype: str
    device: str
    options: frozenset[str]


def unescape(text: str) -> str:
    """A name as it is; the kernel writes blanks in its lists as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def parse(mountinfo: str) -> list[Mount]:
    """The mounts of a `/proc/<pid>/mountinfo`, in its order."""
    mounts = []
    for line in mountinfo.splitlines():
        # Between the options and the hyphen stands any number of optional fields.
        left, _, right = line.partition(" - ")
        fields, (fstype, device, *_) = left.split(), right.split()
        mounts.append(Mount(unescape(fields[4]), fstype, unescape(device), frozenset(fields[5].split(","))))
    return mounts


def covering(mounts: list[Mount], place: Path) -> Mount:
    """The mount that `place`, an absolute path without links, lies on; of two on one folder the later is seen."""
    inside = [mount for mount in mounts if place == Path(mount.point) or Path(mount.point) in place.parents]
    return max(reversed(inside), key=lambda mount: len(mount.point))


def mount_of(path: Path) -> Mount:
    """The mount that a path, or its nearest parent that is there, lies on."""
    return covering(parse(Path("/proc/self/mountinfo").read_text()), existing(path).resolve())


def existing(path: Path) -> Path:
    """The path, or its nearest parent that is there."""
    while not path.exists():
        path = path.parent
    return path
