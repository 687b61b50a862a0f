"""Work on the host that outlives whoever asked for it: stages, a status file, a log, commands. Standard library alone.

A job lives in one folder: its `spec.json`, `status.json` (state, stage, how far it is, and what, where, mend and kind
of a failure) and `build.log` with the output of every command. States: running, done, failed, cancelled (somebody
wrote `cancelled.json` and ended it), interrupted (whatever else ended it, such as a reboot).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

LIB = Path(__file__).resolve().parent
# For compilers to end before they are made to.
_END_S = 10


class JobError(Exception):
    """A job that cannot go on: what is wrong, where, how to mend it, whether it refused before doing anything.

    `kind` tells failures of a compilation apart: memory, disk, network, compiler; empty for all else.
    """

    def __init__(self, what: str, where: str, mend: str, *, refused: bool = False, kind: str = "") -> None:
        super().__init__(what)
        self.what, self.where, self.mend, self.refused, self.kind = what, where, mend, refused, kind


class Ended(BaseException):
    """The job is asked to end."""


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
        self._at: dict[str, Any] = {}
        self._writing = threading.Lock()
        # Names of stages that an earlier one made needless.
        self.skipped: set[str] = set()

    def stages(self) -> list[Callable[[], None]]:
        """What is done, in order."""
        raise NotImplementedError

    def run(self) -> None:
        """Runs all stages; the status file tells the outcome."""
        stages = self.stages()
        try:
            for number, stage in enumerate(stages, 1):
                if stage.__name__ in self.skipped:
                    continue
                began = time.time()
                self._at = {"stage": stage.__name__, "number": number, "of": len(stages)}
                self.status("running")
                stage()
                self.stage_seconds[stage.__name__] = round(time.time() - began, 1)
            self._at = {"stage": "done", "number": len(stages), "of": len(stages)}
            self.status("done")
        except JobError as error:
            if error.refused:
                self.take_back()
            told = {"what": error.what, "where": error.where, "mend": error.mend}
            self.status("failed", **told, refused=error.refused, kind=error.kind)
            raise SystemExit(1) from error
        except Exception as error:
            self.status(
                "failed", what=f"unexpected: {error!r}", where=str(self.log_path), mend=f"tail -50 {self.log_path}"
            )
            raise

    def release_lock(self) -> None:
        """Gives back what a job holds for others to wait for; called when it is asked to end."""

    def ended(self) -> None:
        """Says that the job was ended, and by whom where somebody cancelled it."""
        mark = self.home / "cancelled.json"
        cancelled = json.loads(mark.read_text()) if mark.is_file() else {}
        state = "cancelled" if cancelled else "interrupted"
        by = f"by {cancelled['who']} at {cancelled['when']}" if cancelled else "before it was done"
        mend = "converge again: it goes on with what is compiled"
        self.status(state, what=f"the build was {state} {by}", where=str(self.log_path), mend=mend)

    def tell(self, found: dict[str, Any]) -> None:
        """Adds to what the status says of the stage that runs."""
        self._at |= found
        self.status("running")

    def take_back(self) -> None:
        """Undoes what was done before the job was refused."""

    def status(self, state: str, **more: Any) -> None:
        """Writes the status file whole."""
        fixed = {"state": state, "began": self.began, "updated": time.time(), "pid": os.getpid()}
        path, content = self.home / "status.json", {**fixed, **self._at, **more}
        with self._writing:
            try:
                write_whole(path, content)
            except OSError:
                # A full disk is to be told: what commands left behind makes room for it.
                shutil.rmtree(self.home / "tmp", ignore_errors=True)
                (self.home / "tmp").mkdir()
                write_whole(path, content)

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
            code, said = self._run(argv, cwd or Path("/"), {**self.environment(), **(env or {})}, capture=capture)
        except FileNotFoundError as error:
            raise JobError(f"{argv[0]} is not installed", argv[0], f"apt-get install {Path(argv[0]).name}") from error
        if code:
            tail = (self.log_path.read_text(errors="replace").strip().splitlines() or [""])[-1][-300:]
            raise JobError(
                f"{' '.join([Path(argv[0]).name, *argv[1:2]])} ended with {code}: {tail}",
                str(self.log_path),
                mend or f"tail -50 {self.log_path}",
            )
        return said

    def _run(self, argv: list[str], cwd: Path, env: dict[str, str], *, capture: bool) -> tuple[int, str]:
        """The command in a process group of its own, so that all of it ends with this job."""
        out = subprocess.PIPE if capture else self.log
        with subprocess.Popen(
            argv, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=self.log, text=True, process_group=0
        ) as child:
            try:
                said, _ = child.communicate()
            except BaseException:
                _end_group(child)
                raise
            return child.returncode, said or ""

    @contextmanager
    def source_lock(self) -> Iterator[None]:
        """Keeps a source from being fetched anew while something is built from it; waits for whoever has it."""
        with (Path(self.spec["source"]["path"]) / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _end_group(leader: subprocess.Popen[str]) -> None:
    """Ends a process group. Ninja, asked to end, ends its compilers (groups of their own) and what is half made."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGTERM)
        patience = time.monotonic() + _END_S
        while time.monotonic() < patience:
            leader.poll()
            os.killpg(leader.pid, 0)
            time.sleep(0.05)
        os.killpg(leader.pid, signal.SIGKILL)


def started(job: Job) -> None:
    """Runs the job of a program of its own: asked to end, it gives back what it holds and says who ended it."""
    signal.signal(signal.SIGTERM, _end)
    try:
        job.run()
    except Ended as end:
        # Asked once is enough: what is left of the time goes into ending well.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        job.release_lock()
        job.ended()
        raise SystemExit(1) from end


def _end(_number: int, _frame: FrameType | None) -> None:
    raise Ended


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON so that a reader sees all of it or nothing."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, sort_keys=True))
    part.replace(path)
