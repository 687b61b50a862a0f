"""Builds of the small CUDA source on this machine: the builder's own program, real uv, cmake, ninja and nvcc 13.2."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sandbox.standins.small_vllm import site


class SmallBuild:
    """One build of the small source in folders of its own, with a torch that says what it is told."""

    def __init__(self, folder: Path, cuda_home: Path, changed: Mapping[str, bytes] | None = None) -> None:
        # What a compiler cache remembers would spare the build its work.
        self.spec_path = site.prepared(folder, cuda_home, changed=changed, cache_environment={"CCACHE_DISABLE": "true"})
        self.spec: dict[str, Any] = json.loads(self.spec_path.read_text())
        self.home, self.release = self.spec_path.parent, Path(self.spec["path"])
        self.tree = Path(self.spec["source"]["path"]) / "tree"

    def tell(self, **more: Any) -> None:
        """What is in the spec from now on."""
        self.spec_path.write_text(json.dumps({**self.spec, **more}))

    def start(self, *through: str, **more: Any) -> subprocess.Popen[bytes]:
        """Starts the builder in a session of its own, through another program where one is named."""
        self.tell(**more)
        argv = [*through, *site.command(self.spec_path)]
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
