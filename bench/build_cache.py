"""What a compiler cache saves: the small CUDA source built cold and then again, by real nvcc, with real ccache."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.patch import Figure
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT, cache_dir
from fleet.steps import Steps
from sandbox.standins import nvidia_repository, small_vllm

_LIB = PROJECT / "roles" / "vllm_source_build" / "files"
_GOAL = 0.5
_TORCH = "from types import SimpleNamespace\n__version__ = '2.12.0+cu132'\nversion = SimpleNamespace(cuda='13.2')\n"


def run(console: Console, steps: Steps) -> int:
    """Builds twice, prints the figure, and returns the exit code: 1 where its goal is missed."""
    figure = measure(console, steps)
    print(figure.line())
    return int(not figure.met)


def measure(console: Console, steps: Steps) -> Figure:
    """`warm_rebuild_ratio`: seconds of the stage that compiles with all in ccache, by those with nothing in it.

    The second build is another build id in another folder, as a host's next build is.
    """
    if shutil.which("ccache", path="/usr/local/bin:/usr/bin:/bin") is None:
        raise FleetError(
            "ccache is not installed, and what it saves is to be measured",
            where="/usr/bin/ccache",
            mend="apt-get install ccache",
            code=ExitCode.REFUSED,
            who="bench",
        )
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        work = Path(folder)
        with steps.step("nvcc from its wheels"):
            cuda = nvidia_repository.unpacked(work / "cuda", cache_dir() / "cuda-wheels")
        seconds = []
        for name in ("cold", "warm"):
            with steps.step(f"build of the small source, cache {name}"):
                seconds.append(_build(work / name, cuda, work / "cache"))
    stats = subprocess.run(["ccache", "--version"], capture_output=True, text=True, check=True).stdout.split("\n")[0]
    console.print(f"{stats}: cold {seconds[0]:.1f} s, warm {seconds[1]:.1f} s", highlight=False)
    ratio = round(seconds[1] / seconds[0], 3)
    return Figure("warm_rebuild_ratio", ratio, "ratio", f"<={_GOAL:g}", ratio <= _GOAL)


def _build(folder: Path, cuda: Path, cache: Path) -> float:
    """One build in folders of its own with a shared cache; seconds of its stage that compiles."""
    home, release, source = folder / "builds" / folder.name, folder / "releases" / folder.name, folder / "source"
    for path in (home, source, folder / "ami" / "torch", folder / "tools"):
        path.mkdir(parents=True)
    (folder / "ami" / "torch" / "__init__.py").write_text(_TORCH)
    (folder / "tools" / "bin").symlink_to(Path(sys.executable).parent)
    (folder / "tools" / "requirements.stamp").write_text((_LIB / "tools-requirements.txt").read_text())
    sdist = small_vllm.build_sdist(source).replace(source / "sdist.tar.gz")
    none = {"mib": 0, "inodes": 0}
    memory = {"mib_per_job": 1024, "largest_mib": 3200}
    spec: dict[str, Any] = {
        "name": "small", "build_id": folder.name, "method": "source", "distribution": small_vllm.NAME,
        "version": small_vllm.VERSION, "target_device": "cuda", "environment": {}, "arch_list": "7.5",
        "rust_frontend": False, "rust_toolchain": "", "inputs": {}, "path": str(release),
        "source": {
            "kind": "sdist", "digest": hashlib.sha256(sdist.read_bytes()).hexdigest(), "path": str(source),
        },
        "torch": {
            "python": sys.executable, "site_packages": str(folder / "ami"), "version": "2.12.0+cu132", "cuda": "13.2",
        },
        "cuda_home": str(cuda), "host_compiler": "/usr/bin/g++", "rust_home": "/nowhere/rust", "jobs": 0,
        "mib_per_job": 0, "memory": {"below_8_0": memory, "from_8_0": memory}, "cache": str(cache),
        "cache_environment": {}, "need": dict.fromkeys(("builds", "sources", "root", "cache"), none),
        "tools": str(folder / "tools"),
    }  # fmt: skip
    (home / "spec.json").write_text(json.dumps(spec))
    done = subprocess.run(
        [sys.executable, "-EsB", str(_LIB / "build_release.py"), str(home / "spec.json")], check=False
    )
    if done.returncode:
        status = json.loads((home / "status.json").read_text())
        log = (home / "build.log").read_text()[-2000:]
        raise FleetError(
            f"the small source was not built: {status.get('what')}\n{log}",
            where=str(status.get("where")),
            mend=str(status.get("mend")),
            code=ExitCode.HOST_FAILED,
            who="bench",
        )
    record = json.loads((release / "release.json").read_text())
    return float(record["seconds"]["build_wheel"])
