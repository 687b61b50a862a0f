"""Why a compilation failed, from its log and the kernel's counters: memory, disk, network, or the compiler. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Below this a disk counts as full even where no program said so.
_FULL_MIB = 16
_DISK = re.compile(r"^.*(?:No space left on device|Disk quota exceeded).*$", re.M)
_MEMORY = re.compile(
    r"^.*(?:Killed signal terminated program|died due to signal 9|: line \d+: +\d+ Killed|"
    r"out of memory allocating|virtual memory exhausted|Cannot allocate memory|LLVM ERROR: out of memory|"
    r"std::bad_alloc).*$|^Killed$",
    re.M,
)
_NETWORK = re.compile(
    r"^.*(?:gnutls_handshake\(\) failed|Could not resolve host|unable to access '|clone of '.*' into submodule path|"
    r"Failed to clone repository|Failed to connect to|early EOF|RPC failed|Connection reset by peer).*$",
    re.M,
)
# nvcc and its front end write file(line); gcc and clang write file:line:column.
_COMPILER = re.compile(
    r"^(?P<file>[^\s:()]+)(?:\((?P<nvcc>\d+)\)|:(?P<gcc>\d+)(?::\d+)?): (?:catastrophic |fatal )?error[^:]*: "
    r"(?P<what>.+)$",
    re.M,
)
_OLD_COMPILER = re.compile(r"#error.*unsupported GNU version!.*", re.M)


@dataclass(frozen=True, slots=True)
class Failure:
    """What stopped a compilation: kind (memory, disk, network or compiler), the words, and the mend."""

    kind: str
    what: str
    mend: str


def judge(text: str, *, oom_kills: int, free_mib: int, free_inodes: int, jobs: int, where: str) -> Failure | None:
    """The first of the four kinds that explains the failure; None where none does.

    A full disk and the kernel's killer make compilers complain too, so they are asked for first.

    Args:
        text: the log of the compilation that failed.
        oom_kills: processes of the build that the kernel killed for want of memory.
        free_mib: room left where the build writes, MiB.
        free_inodes: inodes left there.
        jobs: units that were compiled at once.
        where: the folder that was built in, for the mend.
    """
    stays = "then converge again: what is compiled stays"
    disk = _DISK.search(text)
    if disk or free_mib < _FULL_MIB or not free_inodes:
        said = disk[0].strip() if disk else f"{free_mib:,} MiB and {free_inodes:,} inodes are free"
        return Failure("disk", f"out of disk: {said}", f"free room or grow the volume: df -h {where}; {stays}")
    memory = _MEMORY.search(text)
    if memory or oom_kills:
        said = memory[0].strip() if memory else f"the kernel killed {oom_kills} of its processes"
        fewer = f"set vllm_source_build_jobs to {jobs // 2}" if jobs > 1 else "set swapfile_size_mib higher"
        return Failure("memory", f"out of memory with {jobs} jobs at once: {said}", f"{fewer}, {stays}")
    network = _NETWORK.search(text)
    if network and "Configuring incomplete" in text:
        return Failure(
            "network",
            f"a source that CMake fetches cannot be had: {network[0].strip()}",
            f"git ls-remote that address from the host; {stays}",
        )
    if old := _OLD_COMPILER.search(text):
        return Failure(
            "compiler", f"nvcc refuses the host compiler: {old[0].strip()}", "set vllm_source_build_host_compiler"
        )
    if error := _COMPILER.search(text):
        place = f"{error['file']}:{error['nvcc'] or error['gcc']}"
        return Failure(
            "compiler",
            f"the compiler refuses {place}: {error['what'].strip()}",
            f"report {place} with the version to vLLM, or set another version in vllm_source_build_releases",
        )
    return None
