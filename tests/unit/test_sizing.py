"""Compile jobs fit memory and cores: as measured, as limited by control groups of either version, as overridden."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from build_environment import build_environment, jobs_of
from sizing import Memory, available_mib, compile_jobs, cores

GIB = 1024**3
# FACTS: about 1 GiB a job, with one unit of 3.1; 2.5 GiB with flash-attention.
MEASURED = {
    "below_8_0": {"mib_per_job": 1024, "largest_mib": 3200},
    "from_8_0": {"mib_per_job": 2560, "largest_mib": 3200},
}


@pytest.mark.parametrize(
    ("available", "cores_here", "memory", "jobs"),
    [
        # CASES A36, at the 4 GiB a job that were the default: 8 GiB and 4 cores compile one unit at a time.
        (8192, 4, Memory(4096, 4096), 1),
        # A g5g.xlarge, of whose 8 GiB about 7.5 can be used: 3.1 for the one unit, 1 for each of three others.
        (7680, 4, Memory(1024, 3200), 4),
        (7680, 4, Memory(2560, 3200), 2),
        # One at least, and no more than the cores.
        (1024, 4, Memory(1024, 3200), 1),
        (65536, 16, Memory(1024, 3200), 16),
        (31000, 16, Memory(2560, 3200), 11),
    ],
)
def test_jobs_fit_memory_and_cores(available: int, cores_here: int, memory: Memory, jobs: int) -> None:
    assert compile_jobs(available, cores_here, memory) == jobs


def machine(folder: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup with 16 GiB available and what is given."""
    proc, groups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {16 * GIB // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = groups / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, groups


@pytest.mark.parametrize(
    ("cgroup", "files", "mib"),
    [
        ("0::/\n", {}, 16384),
        # A slice's limit holds for the unit in it; files that nobody reads any more are given up.
        (
            "0::/a.slice/b.service\n",
            {
                "a.slice/memory.max": str(4 * GIB), "a.slice/memory.current": str(2 * GIB),
                "a.slice/memory.stat": f"anon 0\ninactive_file {GIB}\n",
                "a.slice/b.service/memory.max": "max\n", "a.slice/b.service/memory.current": "4096\n",
            },
            3072,
        ),
        (
            "9:name=systemd:/\n4:memory:/x\n0::/\n",
            {"memory/x/memory.limit_in_bytes": str(2 * GIB), "memory/x/memory.usage_in_bytes": str(GIB)},
            1024,
        ),
        # Version 1 writes a limit that no machine has for none.
        (
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": "9223372036854771712", "memory/memory.usage_in_bytes": "0"},
            16384,
        ),
    ],
)  # fmt: skip
def test_a_control_group_s_limit_counts(tmp_path: Path, cgroup: str, files: dict[str, str], mib: int) -> None:
    assert available_mib(*machine(tmp_path, cgroup, files)) == mib


def test_a_cpu_quota_counts(tmp_path: Path) -> None:
    files = {"u.service/memory.current": "0", "u.service/cpu.max": "100000 100000\n"}
    assert cores(*machine(tmp_path, "0::/u.service\n", files)) == 1
    none = machine(tmp_path / "none", "0::/u.service\n", {"u.service/cpu.max": "max 100000\n"})
    assert cores(*none) == len(os.sched_getaffinity(0))


def spec(**more: Any) -> dict[str, Any]:
    return {
        "version": "0.33.0", "target_device": "cuda", "rust_frontend": False, "cuda_home": "/cuda",
        "host_compiler": "/usr/bin/g++", "arch_list": "7.5", "environment": {}, "cache": "/cache",
        "cache_environment": {}, "jobs": 0, "mib_per_job": 0, "memory": MEASURED, **more,
    }  # fmt: skip


def test_what_is_told_wins_over_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sizing.available_mib", lambda: 16384)
    monkeypatch.setattr("sizing.cores", lambda: 64)
    assert jobs_of(spec()) == 1 + (16384 - 1024 - 3200) // 1024
    assert (
        jobs_of(spec(arch_list="7.5;8.0+PTX")) == jobs_of(spec(arch_list="9.0a")) == 1 + (16384 - 1024 - 3200) // 2560
    )
    assert jobs_of(spec(mib_per_job=4096)) == 3
    assert jobs_of(spec(jobs=7)) == 7


def test_the_caches_have_a_place_of_their_own_and_see_paths_below_the_tree() -> None:
    more = {"cache_environment": {"SCCACHE_BUCKET": "b", "CCACHE_MAXSIZE": 9}}
    found = build_environment(spec(**more), Path("/r"), Path("/s/tree"), "/usr/bin:/bin", 4, {})
    assert (found["CCACHE_DIR"], found["SCCACHE_DIR"]) == ("/cache/ccache", "/cache/sccache")
    assert found["CCACHE_BASEDIR"] == "/s/tree"
    assert (found["SCCACHE_BUCKET"], found["CCACHE_MAXSIZE"]) == ("b", "9")
    assert (found["MAX_JOBS"], found["NVCC_THREADS"]) == ("4", "1")
    assert found["PATH"] == "/r/bin:/cuda/bin:/usr/bin:/bin"
    plain = build_environment(spec(target_device="empty"), Path("/r"), Path("/s/tree"), "/usr/bin:/bin", 1, {})
    assert {name for name in plain if "CACHE" in name or name == "MAX_JOBS"} == set()
