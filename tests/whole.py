"""The whole of the checks, in the order that fails soonest; `./runner.py test` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT
from fleet.steps import Steps
from tests import other_python

_BIN = Path(sys.executable).parent
_PYTHON = ("runner.py", "bench", "fleet", "sandbox", "plugins", "roles", "inventory", "tests", "molecule", "docs")


def run(words: Sequence[str], steps: Steps) -> int:
    """Runs lint, types and tests; with `words`, only pytest with them. Returns the exit code."""
    if words:
        return _call([str(_BIN / "pytest"), *words])
    for name, argv in _lint():
        with steps.step(name):
            done = subprocess.run(argv, cwd=PROJECT, env=_environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                raise FleetError(
                    f"{name} found something:\n{done.stdout}{done.stderr}",
                    where=str(PROJECT),
                    mend=" ".join(argv),
                    code=ExitCode.HOST_FAILED,
                    who="test",
                )
    steps.note("tests")
    pytest = [str(_BIN / "pytest"), "-q", "--durations=40"]
    return (
        other_python.run(steps)
        or _call([*pytest, *other_python.SIDE_BY_SIDE, "tests/kernels"])
        # One machine, one sandbox: these one after the other.
        or _call([*pytest, "tests/e2e", "tests/scenarios"])
    )


def _lint() -> list[tuple[str, list[str]]]:
    return [
        ("ruff", [str(_BIN / "ruff"), "check", "--quiet", "."]),
        ("mypy", [str(_BIN / "mypy"), *_PYTHON]),
        ("yamllint", [str(_BIN / "yamllint"), "--strict", "."]),
        ("ansible-lint", [str(_BIN / "ansible-lint"), "-q"]),
    ]


def _call(argv: list[str]) -> int:
    return subprocess.run(argv, cwd=PROJECT, env=_environment(), check=False).returncode


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}"}
