"""How many units to compile at once: what this process may use of cores and memory, control groups' limits included."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# What the machine itself needs while all jobs run.
RESERVED_MIB = 1024
_MIB = 1024 * 1024
# The same facts under the names of control groups' versions 2 and 1.
_NAMES = {
    "limit": ("memory.max", "memory.limit_in_bytes"),
    "used": ("memory.current", "memory.usage_in_bytes"),
    "peak": ("memory.peak", "memory.max_usage_in_bytes"),
    "kills": ("memory.events", "memory.oom_control"),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """Measured memory of compile jobs, MiB: of one, and of the largest unit, which one of them may be."""

    mib_per_job: int
    largest_mib: int


def compile_jobs(available_mib: int, cores: int, memory: Memory) -> int:
    """Units to compile at once: no more than the cores, no more than the memory, one at least."""
    beside_the_largest = (available_mib - RESERVED_MIB - memory.largest_mib) // memory.mib_per_job
    return max(1, min(cores, 1 + beside_the_largest))


def available_mib(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can still be had, MiB: what the kernel counts as available, within every control group's limit."""
    lines = (line.split() for line in (proc / "meminfo").read_text().splitlines())
    found = [next(int(words[1]) // 1024 for words in lines if words[0] == "MemAvailable:")]
    for group in groups(proc, cgroups):
        limit, used = number(group, "limit"), number(group, "used")
        if limit is not None and used is not None:
            found.append((limit - used + _reclaimable(group)) // _MIB)
    return max(0, min(found))


def cores(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may run on, within the CPU quota of its control groups (version 2); one at least."""
    found = len(os.sched_getaffinity(0))
    for group in groups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            found = min(found, max(1, int(quota) // int(period)))
    return found


def groups(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """This process's control groups that account for memory, the innermost first, in either version's layout."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            top = cgroups / "memory" if controllers else cgroups
            folder = top / path.strip("/")
            while folder.is_relative_to(top):
                if any((folder / name).is_file() for name in _NAMES["used"]):
                    yield folder
                folder = folder.parent


def number(group: Path, what: str) -> int | None:
    """`limit`, `used` or `peak` of a group, bytes; None where it has none."""
    for name in _NAMES[what]:
        with contextlib.suppress(OSError, ValueError):
            return int((group / name).read_text())
    return None


def oom_kills() -> int:
    """How many processes of this one's innermost group the kernel has killed for want of memory."""
    group = next(groups(), None)
    for name in _NAMES["kills"]:
        if group is not None and (words := _words(group / name)):
            return words.get("oom_kill", 0)
    return 0


def _reclaimable(group: Path) -> int:
    """Bytes of a group that hold files nobody has touched lately: counted as used, and given up when wanted."""
    words = _words(group / "memory.stat")
    return words.get("total_inactive_file", words.get("inactive_file", 0))


def _words(file: Path) -> dict[str, int]:
    """Lines of a name and a number; none where the file cannot be read."""
    with contextlib.suppress(OSError):
        return {name: int(value) for name, value in (line.split() for line in file.read_text().splitlines())}
    return {}
