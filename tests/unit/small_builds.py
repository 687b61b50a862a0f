"""Builds of the small CUDA source on this machine: the builder's own program, real uv, cmake, ninja and nvcc 13.2."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fleet.paths import PROJECT
from sandbox.standins import small_vllm

LIB = PROJECT / "roles" / "vllm_source_build" / "files"
TORCH = "from types import SimpleNamespace\n__version__ = '2.12.0+cu132'\nversion = SimpleNamespace(cuda='13.2')\n"
ROOM = {"mib": 1, "inodes": 1}


class SmallBuild:
    """One build of the small source in folders of its own, with a torch that says what it is told."""

    def __init__(self, folder: Path, cuda_home: Path, changed: Mapping[str, bytes] | None = None) -> None:
        build_id = "b1"
        self.folder = folder
        self.home = folder / "builds" / build_id
        self.release = folder / "releases" / build_id
        self.source = folder / "sources" / f"vllm-{small_vllm.VERSION}"
        self.tree = self.source / "tree"
        for path in (self.home, self.source, folder / "ami" / "torch", folder / "tools"):
            path.mkdir(parents=True, exist_ok=True)
        (folder / "ami" / "torch" / "__init__.py").write_text(TORCH)
        # The tools' environment is this one: uv and pip are here.
        tools = folder / "tools"
        with contextlib.suppress(FileExistsError):
            (tools / "bin").symlink_to(Path(sys.executable).parent)
        (tools / "requirements.stamp").write_text((LIB / "tools-requirements.txt").read_text())
        small_vllm.build_sdist(self.source, changed).replace(self.source / "sdist.tar.gz")
        digest = hashlib.sha256((self.source / "sdist.tar.gz").read_bytes()).hexdigest()
        memory = {"mib_per_job": 1024, "largest_mib": 3200}
        self.spec: dict[str, Any] = {
            "name": "small", "build_id": build_id, "method": "source", "distribution": "vllm",
            "version": small_vllm.VERSION, "target_device": "cuda", "environment": {}, "arch_list": "7.5",
            "rust_frontend": False, "rust_toolchain": "", "inputs": {}, "path": str(self.release),
            "source": {"kind": "sdist", "digest": digest, "path": str(self.source)},
            "torch": {
                "python": sys.executable, "site_packages": str(folder / "ami"), "version": "2.12.0+cu132",
                "cuda": "13.2",
            },
            "cuda_home": str(cuda_home), "host_compiler": "/usr/bin/g++", "rust_home": "/nowhere/rust",
            "jobs": 2, "mib_per_job": 0, "memory": {"below_8_0": memory, "from_8_0": memory},
            "cache": str(folder / "cache"), "cache_environment": {"CCACHE_DISABLE": "true"},
            "need": dict.fromkeys(("builds", "sources", "root", "cache"), ROOM), "tools": str(tools),
        }  # fmt: skip

    def start(self, *through: str, **more: Any) -> subprocess.Popen[bytes]:
        """Starts the builder in a session of its own, through another program where one is named."""
        (self.home / "spec.json").write_text(json.dumps({**self.spec, **more}))
        argv = [*through, sys.executable, "-EsB", str(LIB / "build_release.py"), str(self.home / "spec.json")]
        return subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def run(self, **more: Any) -> dict[str, Any]:
        """Builds to the end; the status."""
        self.start(**more).wait()
        return self.status()

    def until(self, process: subprocess.Popen[bytes], reached: Callable[[], bool]) -> None:
        """Waits for something while the builder runs."""
        while not reached():
            assert process.poll() is None, self.log()[-3000:]
            time.sleep(0.02)

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Ends the builder and all below it at once, as a host that loses its power does."""
        process.send_signal(signal.SIGSTOP)
        for pid in reversed(below(process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def status(self) -> dict[str, Any]:
        """The status file's content; a reader never sees half of it."""
        path = self.home / "status.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def log(self) -> str:
        """What the build has said."""
        path = self.home / "build.log"
        return path.read_text() if path.is_file() else ""

    def record(self) -> dict[str, Any]:
        """The release's record; empty where there is none."""
        path = self.release / "release.json"
        return dict(json.loads(path.read_text())) if path.is_file() else {}

    def finished(self) -> set[str]:
        """Sources whose objects ninja's own log counts as made."""
        logs = [log.read_text().splitlines() for log in self.tree.glob("build/*/.ninja_log")]
        outputs = [Path(line.split("\t")[3]) for lines in logs for line in lines if line.count("\t") == 4]
        return {path.name.split(".")[0] for path in outputs if path.name.endswith(".cu.o")}

    def compiled(self, since: int = 0) -> list[str]:
        """CUDA sources that the build's log says were compiled, once for each time, from this place in it on."""
        return re.findall(r"^\[\d+/\d+\] Building CUDA object \S+/(\w+)\.cu\.o", self.log()[since:], re.M)


def below(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found
