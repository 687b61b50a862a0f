"""Work on the host that outlives whoever asked for it: stages, a status file, a log, commands. Standard library alone.

A job lives in one folder: its `spec.json`, `status.json` (state, stage, and what, where and mend of a failure) and
`build.log` with the output of every command.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIB = Path(__file__).resolve().parent


class JobError(Exception):
    """A job that cannot go on: what is wrong, where, how to mend it, and whether it refused before doing anything."""

    def __init__(self, what: str, where: str, mend: str, *, refused: bool = False) -> None:
        super().__init__(what)
        self.what, self.where, self.mend, self.refused = what, where, mend, refused


class Job:
    """One job, from its spec to its end."""

    def __init__(self, spec_path: Path) -> None:
        self.home = spec_path.parent
        self.spec: dict[str, Any] = json.loads(spec_path.read_text())
        self.tools = Path(self.spec["tools"])
        self.log = (self.home / "build.log").open("a")
        self.log_path = self.home / "build.log"
        self.log_began = self.log_path.stat().st_size
        (self.home / "tmp").mkdir(exist_ok=True)
        self.began = time.time()
        self.stage_seconds: dict[str, float] = {}

    def stages(self) -> list[Callable[[], None]]:
        """What is done, in order."""
        raise NotImplementedError

    def run(self) -> None:
        """Runs all stages; the status file tells the outcome."""
        stages = self.stages()
        try:
            for number, stage in enumerate(stages, 1):
                began = time.time()
                self.status("running", stage=stage.__name__, number=number, of=len(stages))
                stage()
                self.stage_seconds[stage.__name__] = round(time.time() - began, 1)
            self.status("done", stage="done", number=len(stages), of=len(stages))
        except JobError as error:
            if error.refused:
                self.take_back()
            self.status("failed", what=error.what, where=error.where, mend=error.mend, refused=error.refused)
            raise SystemExit(1) from error
        except Exception as error:
            self.status(
                "failed", what=f"unexpected: {error!r}", where=str(self.log_path), mend=f"tail -50 {self.log_path}"
            )
            raise

    def take_back(self) -> None:
        """Undoes what was done before the job was refused."""

    def status(self, state: str, **more: Any) -> None:
        """Writes the status file whole."""
        write_whole(
            self.home / "status.json",
            {"state": state, "began": self.began, "updated": time.time(), "pid": os.getpid(), **more},
        )

    def make_tools(self) -> None:
        """uv and the index client, in an environment of their own, by hash."""
        wanted = (LIB / "tools-requirements.txt").read_text()
        stamp = self.tools / "requirements.stamp"
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.tools, ignore_errors=True)
        self.command([sys.executable, "-m", "venv", str(self.tools)])
        self.command(
            [
                str(self.tools / "bin/pip"), "install", "-q", "--no-cache-dir", "--require-hashes",
                "-r", str(LIB / "tools-requirements.txt"),
            ],
            mend="check the package index that pip is configured with (pip config list), then converge again",
        )  # fmt: skip
        stamp.write_text(wanted)

    def environment(self) -> dict[str, str]:
        """What every command sees, and nothing else: no login shell's PATH, nobody's HOME."""
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            # /tmp is small or a tmpfs on many hosts; the job's own folder is where room was checked.
            "TMPDIR": str(self.home / "tmp"),
        }

    def command(
        self,
        argv: list[str],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        capture: bool = False,
        mend: str = "",
    ) -> str:
        """Runs one command with its output in the log; a failure names the log and its last words."""
        self.log.write(f"$ {' '.join(argv)}\n")
        self.log.flush()
        try:
            done = subprocess.run(
                argv,
                cwd=cwd or "/",
                env={**self.environment(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if capture else self.log,
                stderr=self.log,
                text=True,
                check=False,
            )
        except FileNotFoundError as error:
            raise JobError(f"{argv[0]} is not installed", argv[0], f"apt-get install {Path(argv[0]).name}") from error
        if done.returncode:
            tail = (self.log_path.read_text().strip().splitlines() or [""])[-1][-300:]
            raise JobError(
                f"{' '.join([Path(argv[0]).name, *argv[1:2]])} ended with {done.returncode}: {tail}",
                str(self.log_path),
                mend or f"tail -50 {self.log_path}",
            )
        return done.stdout or ""

    @contextmanager
    def source_lock(self) -> Iterator[None]:
        """Keeps a source from being fetched anew while something is built from it; waits for whoever has it."""
        with (Path(self.spec["source"]["path"]) / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON so that a reader sees all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, sort_keys=True))
    part.replace(path)
