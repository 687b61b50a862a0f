"""A release built whole from a small real source: real uv, real wheel, real virtual environment, real device code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from build_release import Build
from job import JobError

from tests.unit.test_cuda_build import gxx, toolkit

# A build backend inside the source, as PEP 517 allows: the payload goes into the wheel as the package.
BACKEND = """
import os, pathlib, zipfile

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    version = os.environ.get("BUILD_AS") or os.environ["VLLM_VERSION_OVERRIDE"]
    name = f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w") as wheel:
        for file in sorted(pathlib.Path("payload").iterdir()):
            wheel.write(file, f"vllm/{file.name}")
        wheel.writestr("vllm/environment.txt", "\\n".join(f"{k}={v}" for k, v in sorted(os.environ.items())))
        info = f"vllm-{version}.dist-info"
        needs = "".join(f"Requires-Dist: {name}\\n" for name in os.environ.get("BUILD_NEEDING", "").split())
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\\nName: vllm\\nVersion: {version}\\n{needs}")
        kind = "Root-Is-Purelib: true\\nTag: py3-none-any"
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\\nGenerator: x\\n{kind}\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""
ROOM = {"mib": 1, "inodes": 1}
MEMORY = {name: {"mib_per_job": 1024, "largest_mib": 3200} for name in ("below_8_0", "from_8_0")}


class Site:
    """A host's folders, with a torch that says what it is told and a source that carries a payload."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch = folder / "ami" / "torch"
        torch.mkdir(parents=True)
        torch.joinpath("__init__.py").write_text(
            "from types import SimpleNamespace\n__version__ = '2.12.0'\nversion = SimpleNamespace(cuda='13.2')\n"
        )
        self.payload = folder / "vllm-0.33.0" / "payload"
        self.payload.mkdir(parents=True)
        self.payload.joinpath("__init__.py").write_text("")
        self.rust_home = folder / "rust"
        self.requires: list[str] = []
        self.backend = BACKEND

    def build(self, **more: Any) -> Build:
        """A build of the source as it stands, from an sdist without .git."""
        tree = self.payload.parent
        (tree / "tools").mkdir(exist_ok=True)
        (tree / "tools" / "use_existing_torch.py").write_text("")
        (tree / "setup.py").write_text("import os\nos.getenv('VLLM_USE_THIS')\nos.environ.get('CMAKE_ARGS')\n")
        (tree / "CMakeLists.txt").write_text("if(X)\nendif()\n")
        (tree / "backend.py").write_text(self.backend)
        (tree / "pyproject.toml").write_text(
            f'[build-system]\nrequires = {json.dumps(self.requires)}\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "vllm"\ndynamic = ["version"]\n'
        )
        source = self.folder / "sources" / "vllm-0.33.0"
        source.mkdir(parents=True, exist_ok=True)
        with tarfile.open(source / "sdist.tar.gz", "w:gz") as tar:
            tar.add(tree, tree.name)
        digest = hashlib.sha256((source / "sdist.tar.gz").read_bytes()).hexdigest()
        spec = {
            "name": "vllm", "build_id": "b1", "method": "source", "distribution": "vllm", "version": "0.33.0",
            "target_device": "empty", "environment": {}, "arch_list": "", "leave_out": [], "rust_frontend": False,
            "rust_toolchain": "", "inputs": {}, "path": str(self.folder / "releases" / "b1"),
            "source": {"kind": "sdist", "digest": digest, "path": str(source), "rust_toolchain": "1.95"},
            "torch": {
                "python": sys.executable, "site_packages": str(self.folder / "ami"), "version": "2.12.0",
                "cuda": "13.2",
            },
            "cuda_home": "/nowhere/cuda", "host_compiler": "/nowhere/g++", "rust_home": str(self.rust_home),
            "jobs": 0, "mib_per_job": 0, "memory": MEMORY, "cache": str(self.folder / "cache"),
            "cache_environment": {}, "need": {"builds": ROOM, "sources": ROOM, "root": ROOM, "cache": ROOM},
            "tools": str(Path(sys.executable).parent.parent), **more,
        }  # fmt: skip
        home = self.folder / "builds" / "b1"
        home.mkdir(parents=True, exist_ok=True)
        (home / "spec.json").write_text(json.dumps(spec))
        return Build(home / "spec.json")

    def cuda(self, **more: Any) -> Build:
        """The same for a GPU of capability 7.5, with a toolkit and a compiler that go together."""
        cuda = self.folder / "cuda"
        home = cuda if cuda.is_dir() else toolkit(cuda, "13.2")
        found = {"target_device": "cuda", "arch_list": "7.5", "host_compiler": gxx(self.folder, "13.3.0")}
        return self.build(**{**found, "cuda_home": str(home), **more})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    # The tools' environment is this one: uv and pip are here.
    monkeypatch.setattr(Build, "make_tools", lambda _self: None)
    return Site(tmp_path)


def run(build: Build) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs the build; its status and its release's record (empty where there is none)."""
    try:
        build.run()
    except SystemExit as end:
        assert end.code == 1
    record = build.release / "release.json"
    status = json.loads((build.home / "status.json").read_text())
    return status, json.loads(record.read_text()) if record.is_file() else {}


def seen_by_the_build(build: Build) -> dict[str, str]:
    text = (build.site_packages / "vllm" / "environment.txt").read_text()
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def test_a_source_without_git_becomes_a_release_of_its_version(site: Site) -> None:
    build = site.build()
    status, record = run(build)
    assert status["state"] == "done", status
    # CASES A33: told to whichever of the two ways this version reads.
    seen = seen_by_the_build(build)
    assert seen["VLLM_VERSION_OVERRIDE"] == seen["SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM"] == "0.33.0"
    assert record["version"] == "0.33.0"
    assert record["rust_toolchain"] == "1.95"
    assert record["rust_frontend"] == "off: rust_frontend is false, or not set with target_device empty"
    assert record["source"] == {"kind": "sdist", "digest": build.spec["source"]["digest"]}
    # CASES A42: the wheel stays, the tree does not.
    assert [path.name for path in (build.home / "dist").glob("*.whl")] == [record["wheel"]]
    assert not build.tree.exists()
    # CASES A40: pip and compilers write where room was checked.
    assert Path(seen["TMPDIR"]).is_relative_to(build.home)
    assert "CUDA_HOME" not in seen
    assert "MAX_JOBS" not in seen


def test_a_build_of_another_version_is_no_release(site: Site) -> None:
    status, record = run(site.build(environment={"BUILD_AS": "0.31.0"}))
    assert (status["what"], record) == ("version 0.31.0 was built and 0.33.0 is wanted", {})


def test_device_code_is_judged_before_the_release_exists(site: Site, libraries: dict[str, Path]) -> None:
    shutil.copy(libraries["t80"], site.payload / "_C_stable_libtorch.abi3.so")
    build = site.cuda()
    status, record = run(build)
    assert (status["state"], record) == ("failed", {})
    assert status["what"] == (
        "_C_stable_libtorch.abi3.so holds code for 8.0; _C_stable_libtorch.abi3.so holds no code for 7.5, "
        "and 7.5 is wanted"
    )
    shutil.copy(libraries["t75"], site.payload / "_C_stable_libtorch.abi3.so")
    build = site.cuda()
    status, record = run(build)
    assert status["state"] == "done", status
    assert record["architectures"] == {"_C_stable_libtorch.abi3.so": {"7.5": 1}}
    seen = seen_by_the_build(build)
    # CASES A17, A25, A36, A43.
    assert seen["TORCH_CUDA_ARCH_LIST"] == "7.5"
    assert seen["CUDA_HOME"] == build.spec["cuda_home"]
    assert f"{build.spec['cuda_home']}/bin" in seen["PATH"].split(":")
    assert seen["CUDAHOSTCXX"] == seen["CXX"] == build.spec["host_compiler"]
    assert (int(seen["MAX_JOBS"]) >= 1, seen["NVCC_THREADS"]) == (True, "1")


def cargo(site: Site, script: str) -> None:
    program = site.rust_home / "cargo" / "bin" / "cargo"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_a_required_frontend_that_was_not_built_is_told(site: Site, tmp_path: Path) -> None:
    cargo(site, "true")
    required = {"rust_frontend": True, "rust_toolchain": "1.95"}
    build = site.build(**required)
    status, record = run(build)
    assert (status["what"], record) == ("vllm/vllm-rs is not there, and the Rust front end is wanted", {})
    (site.payload / "vllm-rs").write_text("#!/bin/sh\n")
    (site.payload / "vllm-rs").chmod(0o755)
    assert run(site.build(**required))[0]["what"].startswith("vllm/vllm-rs is no program")
    source = tmp_path / "main.c"
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run(["gcc", "-o", str(site.payload / "vllm-rs"), str(source)], check=True)
    build = site.build(**required)
    status, record = run(build)
    assert status["state"] == "done", status
    assert record["rust_frontend"] == "required, and vllm/vllm-rs is there"
    seen = seen_by_the_build(build)
    assert (seen["VLLM_REQUIRE_RUST_FRONTEND"], seen["RUSTUP_TOOLCHAIN"]) == ("1", "1.95")
    assert f"{site.rust_home}/cargo/bin" in seen["PATH"].split(":")
    (site.payload / "vllm-rs").chmod(0o644)
    assert run(site.build(**required))[0]["what"].startswith("vllm/vllm-rs is no program")


def test_a_frontend_that_is_off_is_told_to_the_build(site: Site) -> None:
    build = site.build()
    run(build)
    seen = seen_by_the_build(build)
    assert seen["VLLM_REQUIRE_RUST_FRONTEND"] == "0"
    assert str(site.rust_home) not in seen["PATH"]


@pytest.mark.parametrize(
    ("more", "words", "mend"),
    [
        ({"need": {"builds": {"mib": 10**9, "inodes": 1}, "sources": ROOM, "root": ROOM}}, "MiB free, and", "df -h"),
        (
            {"need": {"builds": ROOM, "sources": ROOM, "root": {"mib": 1, "inodes": 10**12}}},
            "inodes free, and",
            "df -h",
        ),
        (
            {"environment": {"VLLM_FA_CMAKE_GPU_ARCHES": "75"}},
            "VLLM_FA_CMAKE_GPU_ARCHES is set, and nothing in the build of 0.33.0 reads it",
            "remove VLLM_FA_CMAKE_GPU_ARCHES from that entry's environment",
        ),
        ({"rust_frontend": True, "rust_toolchain": "1.95"}, "no cargo 1.95 runs", "./runner.py converge --tags rust"),
        (
            {"target_device": "cuda", "arch_list": "7.5"},
            "there is no nvcc, and a CUDA build needs one",
            "./runner.py converge --tags cuda_toolkit_sbsa",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_before_anything_is_made(
    site: Site, more: dict[str, Any], words: str, mend: str
) -> None:
    build = site.build(**more)
    status, record = run(build)
    assert (status["state"], status["refused"], record) == ("failed", True, {})
    assert words in status["what"]
    assert mend in status["mend"]
    assert not build.release.exists()


def test_room_is_looked_for_where_the_build_writes(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        asked.append(Path(path))
        return real(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    build = site.build(need={name: {"mib": 10**8, "inodes": 1} for name in ("builds", "sources", "root")})
    with pytest.raises(JobError) as caught:
        build.check_room()
    # One file system for all three here: their needs add up.
    assert "300,000,000 are wanted" in caught.value.what
    assert caught.value.where == f"{build.home}, {build.release.parent}, {build.tree.parent}"
    assert asked == [build.home]


def test_a_variable_that_the_build_reads_is_taken(site: Site) -> None:
    build = site.build(environment={"VLLM_USE_THIS": "1", "CMAKE_ARGS": "-DX=1"})
    status, _ = run(build)
    assert status["state"] == "done", status
    assert seen_by_the_build(build)["VLLM_USE_THIS"] == "1"


def test_a_build_waits_for_whoever_has_its_source(site: Site) -> None:
    build = site.build()
    lock = build.tree.parent / "lock"
    with subprocess.Popen(["flock", str(lock), "sh", "-c", "echo held; sleep 2"], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        began = time.monotonic()
        status, _ = run(build)
        assert time.monotonic() - began > 1.5
    assert status["state"] == "done", status
