"""What a source's build reads from its environment: version, devices, toolchains, size, and the compiler's cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sizing


def jobs_of(spec: Mapping[str, Any]) -> int:
    """Units to compile at once: as many as the spec says, else as memory and cores allow."""
    if spec["jobs"]:
        return int(spec["jobs"])
    # Flash-attention, by far the larger units, is left out below 8.0.
    small = all(float(word.rstrip("a+PTX") or 0) < 8 for word in spec["arch_list"].replace(";", " ").split())
    memory = sizing.Memory(**spec["memory"]["below_8_0" if small else "from_8_0"])
    if spec["mib_per_job"]:
        memory = sizing.Memory(spec["mib_per_job"], spec["mib_per_job"])
    return sizing.compile_jobs(sizing.available_mib(), sizing.cores(), memory)


def build_environment(
    spec: Mapping[str, Any], release: Path, tree: Path, path: str, jobs: int, rust: dict[str, str]
) -> dict[str, str]:
    """Variables of the build; the release's own win over MAX_JOBS and its like.

    Args:
        spec: the build's.
        release: its environment.
        tree: the source that is built in.
        path: the PATH of every command.
        jobs: units to compile at once.
        rust: variables that name the Rust toolchain; empty for none.
    """
    version, folders = spec["version"], [f"{release}/bin", path]
    found = {
        # The tree is changed (torch's pins) or has no .git: either way setuptools-scm cannot tell the version.
        "VLLM_VERSION_OVERRIDE": version,
        "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM": version,
        "VLLM_TARGET_DEVICE": spec["target_device"],
        "VLLM_REQUIRE_RUST_FRONTEND": "1" if spec["rust_frontend"] else "0",
    }
    if spec["target_device"] == "cuda":
        folders.insert(1, f"{spec['cuda_home']}/bin")
        found |= {
            "CUDA_HOME": spec["cuda_home"],
            "CXX": spec["host_compiler"],
            "CUDAHOSTCXX": spec["host_compiler"],
            "TORCH_CUDA_ARCH_LIST": spec["arch_list"],
            "MAX_JOBS": str(jobs),
            # Threads of nvcc share a unit's architectures out, each with a job's memory, and divide MAX_JOBS.
            "NVCC_THREADS": "1",
            **cache_environment(Path(spec["cache"]), tree),
            **{name: str(value) for name, value in spec["cache_environment"].items()},
        }
    if rust:
        folders.insert(1, f"{spec['rust_home']}/cargo/bin")
        found |= rust
    return {**found, "PATH": ":".join(folders), **spec["environment"]}


def cache_environment(cache: Path, tree: Path) -> dict[str, str]:
    """Where ccache and sccache keep what they have; neither is told to run: vLLM takes what is on the PATH."""
    return {
        "CCACHE_DIR": str(cache / "ccache"),
        # Paths below the tree count as relative: another version of the source has its tree elsewhere.
        "CCACHE_BASEDIR": os.path.realpath(tree),
        "CCACHE_NOHASHDIR": "true",
        # A toolkit that is installed anew has new times and the same bytes.
        "CCACHE_COMPILERCHECK": "content",
        "SCCACHE_DIR": str(cache / "sccache"),
    }
