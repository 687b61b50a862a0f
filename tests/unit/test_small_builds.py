"""A real CUDA build by nvcc, killed, ended, starved and misled: it goes on where it was, and says what stopped it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import compiling
import pytest
from build_release import Build
from job import Job, JobError

from sandbox.standins import small_vllm
from tests.unit.small_builds import SmallBuild, below

UNITS = {"activation", "cache", "copy", "layernorm", "pos_encoding", "quant", "sampler", "scaled_mm"}
BAD_UNIT = {"csrc/cache.cu": b'#include "kernels.cuh"\n\nint cache() { return not_declared; }\n'}


def test_the_sdist_has_the_same_bytes_every_time(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    first = small_vllm.build_sdist(tmp_path).read_bytes()
    assert small_vllm.build_sdist(tmp_path / "again").read_bytes() == first
    assert len(UNITS) == small_vllm.CUDA_UNITS


def test_a_build_that_is_killed_anywhere_goes_on_where_it_was(tmp_path: Path, cuda_home: Path) -> None:
    build = SmallBuild(tmp_path, cuda_home)
    # As the source was half unpacked: a tree, and nothing that says whose.
    build.tree.mkdir()
    (build.tree / "half").touch()

    listed = {"environment": {"CMAKE_ARGS": "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"}}
    process = build.start(**listed)
    build.until(process, lambda: "compiler identification" in build.log())
    build.kill(process)
    assert not (build.tree / "half").exists()
    assert build.status()["state"] == "running"
    assert build.compiled() == []

    (build.tree / "kept").touch()
    process = build.start(**listed)
    build.until(process, lambda: len(build.finished()) >= 3)
    build.kill(process)
    before, seen = build.finished(), len(build.log())
    # CASES A42: no path of the release or of the build's own folder is told to a compiler.
    (commands,) = build.tree.glob("build/*/compile_commands.json")
    assert str(build.release) not in commands.read_text()
    assert str(build.home) not in commands.read_text()

    process = build.start()
    units = []
    while not list((build.home / "dist").glob("*.whl")):
        assert process.poll() is None, build.log()[-3000:]
        status = build.status()
        if status["pid"] == process.pid and "units" in status:
            units.append((status["units"]["done"], status["units"]["total"]))
        time.sleep(0.02)
    build.kill(process)
    assert (build.tree / "kept").exists()
    assert set(build.compiled(seen)) == UNITS - before
    # What is left, and the link of the module.
    assert units[-1][1] <= len(UNITS - before) + 2
    assert units == sorted(units)
    assert build.record() == {}

    seen = len(build.log())
    status = build.run()
    assert status["state"] == "done", status
    assert build.compiled(seen) == []
    assert build.record()["architectures"] == {"_C_stable_libtorch.abi3.so": {"7.5": 8}}
    assert build.record()["jobs"] == 2
    code = "import vllm._C_stable_libtorch as module; print(module.units())"
    said = subprocess.run([build.release / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "8\n"
    assert not build.tree.exists()


def test_another_build_of_the_same_source_begins_anew(tmp_path: Path, cuda_home: Path) -> None:
    build = SmallBuild(tmp_path, cuda_home)
    build.tree.mkdir()
    (build.tree / "of another").touch()
    build.tree.with_name("tree.json").write_text(
        json.dumps({"build_id": "b0", "digest": build.spec["source"]["digest"]})
    )
    process = build.start()
    build.until(process, lambda: build.status().get("stage") == "build_wheel")
    build.kill(process)
    assert not (build.tree / "of another").exists()


@pytest.mark.parametrize(
    ("mark", "state", "words"),
    [
        ({"who": "ada@desk", "when": "2026-12-02 10:00:00 UTC"}, "cancelled", "by ada@desk at 2026-12-02 10:00:00 UTC"),
        ({}, "interrupted", "before it was done"),
    ],
)
def test_a_build_that_is_asked_to_end_ends_with_all_its_compilers(
    tmp_path: Path, cuda_home: Path, mark: dict[str, str], state: str, words: str
) -> None:
    build = SmallBuild(tmp_path, cuda_home)
    process = build.start()
    build.until(process, lambda: any("cicc" in name for name in _names(process.pid)))
    all_of_it = below(process.pid)
    if mark:
        (build.home / "cancelled.json").write_text(json.dumps(mark))
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert (build.status()["state"], build.status()["what"]) == (state, f"the build was {state} {words}")
    assert [pid for pid in all_of_it if Path(f"/proc/{pid}").exists()] == []


def _names(pid: int) -> list[str]:
    names = []
    for one in below(pid):
        try:
            names.append(Path(f"/proc/{one}/comm").read_text().strip())
        except OSError:
            continue
    return names


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    """A file system of a size in a folder."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_fills_up_is_told_as_such(tmp_path: Path, cuda_home: Path) -> None:
    with mounted(tmp_path / "sources", "768k"):
        build = SmallBuild(tmp_path, cuda_home)
        status = build.run(need={place: {"mib": 0, "inodes": 1} for place in build.spec["need"]})
        assert (status["state"], status["kind"], status["where"]) == ("failed", "disk", str(build.tree)), status
        assert status["what"].startswith("out of disk: ")
        assert f"df -h {build.tree}" in status["mend"]


class Filling(Job):
    """Fills its disk through what a command leaves in TMPDIR."""

    def stages(self) -> list[Callable[[], None]]:
        return [self.fill]

    def fill(self) -> None:
        with (self.home / "tmp" / "left").open("wb", buffering=0) as file:
            while True:
                try:
                    file.write(b"x" * 512)
                except OSError as error:
                    raise JobError("full", "here", "mend") from error


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_disk_that_is_full_is_told_on_that_disk(tmp_path: Path) -> None:
    with mounted(tmp_path / "build", "64k"):
        (tmp_path / "build" / "spec.json").write_text('{"tools": "/nowhere"}')
        with pytest.raises(SystemExit):
            Filling(tmp_path / "build" / "spec.json").run()
        status = json.loads((tmp_path / "build" / "status.json").read_text())
    assert (status["state"], status["what"]) == ("failed", "full")


@contextmanager
def memory_limited_to(mib: int) -> Iterator[Path]:
    """A control group with a limit, in whichever version this machine accounts for memory."""
    top = Path("/sys/fs/cgroup")
    first = not (top / "cgroup.controllers").exists()
    group = (top / "memory" if first else top) / f"vllm-fleet-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(mib * 1024 * 1024))
        yield group
    finally:
        group.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="a control group needs root")
def test_a_compiler_that_the_kernel_kills_for_memory_is_told_as_such(tmp_path: Path, cuda_home: Path) -> None:
    # A table takes a compiler memory that is all its own: 646 MB for 1.5 million numbers, 264 MB for 0.4 (measured).
    # What it reads from files may count for another group, which had them first.
    numbers = ",".join(map(str, range(800_000)))
    table = f'#include "kernels.cuh"\n\n__device__ int table[] = {{{numbers}}};\n'
    build = SmallBuild(tmp_path, cuda_home, {"csrc/cache.cu": table.encode()})
    with memory_limited_to(250) as group:
        build.start("sh", "-c", f'echo $$ >{group}/cgroup.procs; exec "$@"', "sh").wait()
        status = build.status()
    assert (status["state"], status.get("kind")) == ("failed", "memory"), status
    assert status["what"].startswith("out of memory with 2 jobs at once: ")
    assert status["mend"] == "set vllm_source_build_jobs to 1, then converge again: what is compiled stays"


def test_what_the_network_denied_is_tried_again_before_anything_is_compiled(
    tmp_path: Path, cuda_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # CASES A41. The repository comes within reach while the build waits; then a bad unit ends it, which is named.
    build = SmallBuild(tmp_path, cuda_home, BAD_UNIT)
    repository, waits = tmp_path / "cutlass", []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b.example"]
            subprocess.run(["git", "init", "-q", str(repository)], check=True)
            subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
            subprocess.run([*git, "tag", "v4.2.1"], check=True)

    monkeypatch.setattr("compiling.time.sleep", sleep)
    more = {"environment": {"CMAKE_ARGS": f"-DVLLM_CUTLASS_REPOSITORY=file://{repository}"}}
    build.tell(**more)
    with pytest.raises(SystemExit):
        Build(build.spec_path).run()
    assert waits == list(compiling.RETRY_AFTER_S)
    status = build.status()
    assert (status["state"], status["kind"]) == ("failed", "compiler"), status
    assert (
        status["what"] == f'the compiler refuses {build.tree}/csrc/cache.cu:3: identifier "not_declared" is undefined'
    )
    assert "vllm_source_build_releases" in status["mend"]
    assert build.record() == {}


def test_what_the_network_denies_for_good_is_told(
    tmp_path: Path, cuda_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = SmallBuild(tmp_path, cuda_home)
    monkeypatch.setattr("compiling.time.sleep", lambda _: None)
    more = {"environment": {"CMAKE_ARGS": "-DVLLM_CUTLASS_REPOSITORY=http://127.0.0.1:9/cutlass.git"}}
    build.tell(**more)
    with pytest.raises(SystemExit):
        Build(build.spec_path).run()
    status = build.status()
    assert status["kind"] == "network"
    assert "127.0.0.1" in status["what"]
    assert build.compiled() == []
