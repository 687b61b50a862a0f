"""Python environments of this machine that a command needs beside its own; made once, kept in the cache.

Packages come from the indexes that pip is configured with; uv compares each file with the digest its index gives.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fleet import host_code  # noqa: F401  (before what it makes importable)
from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir
from fleet.steps import Steps

from ansible.module_utils import host_pip_config  # isort: skip


class NotThere(Exception):
    """The indexes answer and do not have what is wanted; says so in uv's words."""


def environment(
    name: str, what: str, packages: Sequence[str], room_bytes: int, steps: Steps, beside: Path | None = None
) -> Path:
    """The Python of an environment with these packages.

    Args:
        name: what tells it from others; the same name is the same environment.
        what: for people.
        packages: requirements in uv's words.
        room_bytes: what making it takes of the disk.
        steps: shows the making.
        beside: site-packages that it sees besides its own.

    Raises:
        FleetError: refused where the disk has no room or an index cannot be reached.
        NotThere: no such package for this Python.
    """
    home = cache_dir() / "tools"
    home.mkdir(exist_ok=True)
    # Where it really is: an environment names the one that it lies beside.
    home = home.resolve()
    made = home / f"{name}-{sys.implementation.cache_tag}"
    with locked(home):
        if not made.is_dir():
            with steps.step(what):
                _make(made, what, packages, room_bytes, beside)
    return made / "bin" / "python"


def site_packages(python: Path) -> Path:
    """The package folder of an environment's Python."""
    return next(python.parent.parent.glob("lib/python3.*/site-packages"))


def on_index(distribution: str, *words: str) -> list[str]:
    """The releases of a distribution on the package indexes, newest first, as pip tells them; `words` are for pip.

    Raises FleetError: refused where no index tells any.
    """
    argv = [sys.executable, "-m", "pip", "index", "versions", distribution, *words]
    argv += ["--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    told = re.search(r"^Available versions: (.*)$", done.stdout, re.M)
    if not told:
        raise out_of_reach(f"the package index tells no version of {distribution}: {_short(done.stderr)}")
    return told[1].split(", ")


def out_of_reach(what: str) -> FleetError:
    """What is wrong with the package indexes, in the house form."""
    return FleetError(
        what, where="the package indexes of pip's configuration",
        mend="set PIP_INDEX_URL to a package index that can be reached (pip config list shows what is set)",
        code=ExitCode.REFUSED,
    )  # fmt: skip


@contextmanager
def locked(home: Path) -> Iterator[None]:
    """One maker at a time; a second one waits and finds the work done."""
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_room(folder: Path, what: str, room_bytes: int) -> None:
    """Raises FleetError where the folder's disk has no room."""
    free = shutil.disk_usage(folder).free
    if free < room_bytes:
        raise FleetError(
            f"{free:,} bytes free for {what}, and {room_bytes:,} are wanted",
            where=str(folder), mend="make room there, or set XDG_CACHE_HOME to a folder on a larger disk",
            code=ExitCode.REFUSED,
        )  # fmt: skip


def _make(made: Path, what: str, packages: Sequence[str], room_bytes: int, beside: Path | None) -> None:
    """Put in its place when it is whole."""
    check_room(made.parent, what, room_bytes)
    part = made.with_name(f".{made.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    python = part / "bin" / "python"
    config = host_pip_config.read(sys.executable)
    try:
        _uv(["venv", "-q", "--python", sys.executable, str(part)], what, config)
        indexes = host_pip_config.for_uv(config)
        # Programs are run without writing byte-code, and torch's takes ten seconds to make.
        _uv(["pip", "install", "-q", "--compile-bytecode", "--python", str(python), *indexes, *packages], what, config)
        if beside:
            (site_packages(python) / "beside.pth").write_text(f"{beside}\n")
        part.rename(made)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _uv(argv: list[str], what: str, config: dict[str, list[str]]) -> None:
    """Runs the project's uv; nothing is left in its own cache."""
    more = {"UV_HTTP_TIMEOUT": "180", "UV_NO_CACHE": "1", "TMPDIR": str(cache_dir() / "tools")}
    if "cert" in config:
        more["SSL_CERT_FILE"] = config["cert"][-1]
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run([uv, *argv], env={**os.environ, **more}, capture_output=True, text=True, check=False)
    if done.returncode and "No solution found" in done.stderr:
        raise NotThere(_short(done.stderr))
    if done.returncode:
        raise out_of_reach(f"{what} could not be installed: {_short(done.stderr)}")


def _short(text: str) -> str:
    return " ".join(text.split())[-600:]
