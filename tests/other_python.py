"""What has Ansible in it is tested once more, under the other ansible-core of the lock (2.19 below Python 3.12)."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT, cache_dir
from fleet.steps import Steps

# What requirements.txt is resolved for besides this interpreter's own ansible-core.
_VERSIONS = ("3.13", "3.12") if sys.version_info < (3, 12) else ("3.11",)

# These keep to folders and ports of their own: a worker for each core, a file's tests in one.
_SIDE_BY_SIDE = ("-n", "auto", "--dist", "loadfile")
SIDE_BY_SIDE = (*_SIDE_BY_SIDE, "tests/unit", "tests/contract")
# What Ansible imports or what starts Ansible. A host's own programs and the kernels have no part in it: once is enough.
_OF_ANSIBLE = (
    "aws_inventory", "check_arguments", "decisions", "environments", "execution", "installed", "launch",
    "launch_refusals", "model_decisions", "other_python", "policies", "redaction", "requests", "run_command",
    "secret_module", "sessions", "summary", "swapfile", "variables", "version_choice", "view", "vllm_host",
    "watchdog_module",
)  # fmt: skip


def run(steps: Steps) -> int:
    """Runs them in an environment of their own, kept by the lock's digest; 0 where no such Python is here."""
    home = environment(steps)
    if home is None:
        steps.note(f"tests under the other ansible-core: skipped, there is no Python {' or '.join(_VERSIONS)} here")
        return 0
    bin_folder = home / "bin"
    steps.note(f"tests of what Ansible imports or what starts it, under Python {(bin_folder / 'python').resolve()}")
    tests = ["tests/contract", *(f"tests/unit/test_{name}.py" for name in _OF_ANSIBLE)]
    return subprocess.run(
        [str(bin_folder / "python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", *_SIDE_BY_SIDE, *tests],
        cwd=PROJECT,
        env={**os.environ, "PATH": f"{bin_folder}:{os.environ['PATH']}"},
        check=False,
    ).returncode


def environment(steps: Steps) -> Path | None:
    """The environment that carries the other ansible-core, made where it is not there yet; None without its Python."""
    python = find(_VERSIONS)
    return _environment(python, steps) if python else None


def find(versions: Sequence[str], pyenv: Path | None = None) -> Path | None:
    """The first interpreter of these versions that really runs and can make virtual environments."""
    root = pyenv or Path.home() / ".pyenv"
    for version in versions:
        on_path = [shutil.which(f"python{version}")]
        for place in [*on_path, *sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)]:
            # A shim may stand for a version that is not switched on.
            if place is not None and _is(Path(place), version):
                return Path(place)
    return None


def _is(python: Path, version: str) -> bool:
    program = "import ensurepip, ssl, sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=False)
    return done.returncode == 0 and done.stdout.strip() == version


def _environment(python: Path, steps: Steps) -> Path:
    lock = PROJECT / "requirements.txt"
    digest = hashlib.sha256(lock.read_bytes() + str(python.resolve()).encode()).hexdigest()[:16]
    home = cache_dir() / "environments" / digest
    stamp = home / "complete"
    if stamp.exists():
        return home
    # One is kept: those of earlier locks, and what an interrupted run left, go.
    shutil.rmtree(home.parent, ignore_errors=True)
    with steps.step("Python environment with the other ansible-core"):
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", "--require-hashes", "-r", str(lock)]
        for argv in ([str(python), "-m", "venv", str(home)], pip):
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
            if done.returncode:
                raise FleetError(
                    f"{' '.join(argv[:4])} ended with {done.returncode}: {done.stderr.strip()[-600:]}",
                    where=str(home),
                    mend=" ".join(argv),
                    code=ExitCode.HOST_FAILED,
                    who="test",
                )
    stamp.touch()
    return home
