"""Triton compilers on this machine, for programs that need torch and a given Triton and no GPU.

Kept in the cache: one environment holds torch's CPU build, and one small environment for each Triton reads torch from
it. Packages come from the indexes that pip is configured with; uv compares each file with the digest its index gives.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleet import host_code  # noqa: F401  (before what it makes importable)
from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir
from fleet.steps import Steps

from ansible.module_utils import host_pip_config  # isort: skip

# What vLLM 0.27 to 0.32 pin; every Triton from 3.6.0 to 3.8.0 compiles vLLM's kernels beside it.
TORCH = "2.13.0"
# An index that carries torch's CPU build, where those of pip's configuration do not.
TORCH_INDEX = "VLLM_FLEET_TORCH_INDEX"
# Measured on x86_64, Python 3.11: torch with numpy 0.85 GB, Triton 3.8.0 0.94 GB; uv unpacks what it has downloaded.
_TORCH_BYTES, _TRITON_BYTES = 1_300_000_000, 1_300_000_000


def python_with(triton: str, steps: Steps) -> Path:
    """The Python of an environment with torch's CPU build, numpy and that Triton; made the first time, then kept.

    Raises FleetError: refused where an index does not give them or the disk has no room, 2 where no such Triton is.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", triton):
        raise FleetError(
            f"Triton {triton!r} is no version, and major.minor.patch is wanted",
            where=f"--triton {triton}", mend=_names_those_that_are(), who="compilers",
        )  # fmt: skip
    home = cache_dir() / "compilers"
    home.mkdir(exist_ok=True)
    kind = sys.implementation.cache_tag
    with _locked(home):
        torch = home / f"torch-{TORCH}-{kind}"
        if not torch.is_dir():
            with steps.step(f"torch {TORCH}, CPU build"):
                _make(torch, [f"torch=={TORCH}+cpu", "numpy"], _TORCH_BYTES)
        environment = home / f"triton-{triton}-{kind}"
        if not environment.is_dir():
            with steps.step(f"Triton {triton}"):
                _make(environment, ["--no-deps", f"triton=={triton}"], _TRITON_BYTES, beside=torch)
    return _python(environment)


def _make(environment: Path, requirements: list[str], room_bytes: int, beside: Path | None = None) -> None:
    """An environment with these packages, put in its place when it is whole."""
    free = shutil.disk_usage(environment.parent).free
    if free < room_bytes:
        raise FleetError(
            f"{free:,} bytes free for {requirements[-1]}, and {room_bytes:,} are wanted",
            where=str(environment.parent), mend="make room there, or set XDG_CACHE_HOME to a folder on a larger disk",
            code=ExitCode.REFUSED, who="compilers",
        )  # fmt: skip
    part = environment.with_name(f".{environment.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    try:
        _uv(["venv", "-q", "--python", sys.executable, str(part)], requirements)
        _uv(["pip", "install", "-q", "--python", str(_python(part)), *_indexes(), *requirements], requirements)
        if beside:
            (_site_packages(part) / "torch.pth").write_text(f"{_site_packages(beside)}\n")
        part.rename(environment)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _uv(argv: list[str], requirements: list[str]) -> None:
    """Runs the project's uv; nothing is left in its own cache."""
    config = host_pip_config.read(sys.executable)
    more = {"UV_HTTP_TIMEOUT": "180", "UV_NO_CACHE": "1", "TMPDIR": str(cache_dir() / "compilers")}
    if "cert" in config:
        more["SSL_CERT_FILE"] = config["cert"][-1]
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run([uv, *argv], env={**os.environ, **more}, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    wanted, words = requirements[-1], " ".join(done.stderr.split())[-600:]
    if "No solution found" not in done.stderr:
        raise FleetError(
            f"{wanted} could not be installed: {words}",
            where="the package indexes of pip's configuration",
            mend="set PIP_INDEX_URL to a package index that can be reached (pip config list shows what is set)",
            code=ExitCode.REFUSED, who="compilers",
        )  # fmt: skip
    if wanted.startswith("triton"):
        raise FleetError(
            f"no {wanted} for this Python on the configured indexes: {words}",
            where=f"--triton {wanted.removeprefix('triton==')}",
            mend=_names_those_that_are(), who="compilers",
        )  # fmt: skip
    raise FleetError(
        f"no CPU build torch=={TORCH} for this Python on the configured indexes: {words}",
        where=TORCH_INDEX, mend=f"set {TORCH_INDEX} to the address of an index that carries torch's CPU builds",
        code=ExitCode.REFUSED, who="compilers",
    )  # fmt: skip


def _names_those_that_are() -> str:
    return f"{sys.executable} -m pip index versions triton (names those that are)"


def _indexes() -> list[str]:
    """Where packages come from, in uv's words."""
    words: list[str] = host_pip_config.for_uv(sys.executable)
    torch_index = os.environ.get(TORCH_INDEX)
    return [*words, "--index", torch_index] if torch_index else words


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def _site_packages(environment: Path) -> Path:
    return next(environment.glob("lib/python3.*/site-packages"))


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One maker at a time; a second one waits and finds the work done."""
    with (home / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
