"""What a compiler cache saves: the small CUDA source built cold and then again, by real nvcc, with real ccache."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from rich.console import Console

from bench.patch import Figure
from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir
from fleet.steps import Steps
from sandbox.standins import nvidia_repository
from sandbox.standins.small_vllm import site

_GOAL = 0.5


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
    console.print(f"cold {seconds[0]:.1f} s, warm {seconds[1]:.1f} s", highlight=False)
    ratio = round(seconds[1] / seconds[0], 3)
    return Figure("warm_rebuild_ratio", ratio, "ratio", f"<={_GOAL:g}", ratio <= _GOAL)


def _build(folder: Path, cuda: Path, cache: Path) -> float:
    """One build in folders of its own with a shared cache; seconds of its stage that compiles."""
    spec = site.prepared(folder, cuda, build_id=folder.name, cache=str(cache))
    if subprocess.run(site.command(spec), check=False).returncode:
        status = json.loads((spec.parent / "status.json").read_text())
        raise FleetError(
            f"the small source was not built: {status.get('what')}\n{(spec.parent / 'build.log').read_text()[-2000:]}",
            where=str(status.get("where")),
            mend=str(status.get("mend")),
            code=ExitCode.HOST_FAILED,
            who="bench",
        )
    record = json.loads((folder / "releases" / folder.name / "release.json").read_text())
    return float(record["seconds"]["build_wheel"])
