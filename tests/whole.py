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

_BIN = Path(sys.executable).parent
_PYTHON = ("runner.py", "fleet", "sandbox", "plugins", "roles", "inventory", "tests")


def run(words: Sequence[str], steps: Steps) -> int:
    """Runs lint, types and tests; with `words`, only pytest with them. Returns the exit code."""
    if words:
        return _call([str(_BIN / "pytest"), *words])
    for name, argv in _lint():
        with steps.step(name):
            if _call(argv):
                raise FleetError(
                    f"{name} found something", where=" ".join(argv[:3]), mend=" ".join(argv), code=ExitCode.HOST_FAILED,
                    who="test",
                )  # fmt: skip
    steps.note("tests")
    return _call([str(_BIN / "pytest"), "-q", "--durations=10", "tests"])


def _lint() -> list[tuple[str, list[str]]]:
    return [
        ("ruff", [str(_BIN / "ruff"), "check", "--quiet", "."]),
        ("mypy", [str(_BIN / "mypy"), *_PYTHON]),
        ("yamllint", [str(_BIN / "yamllint"), "--strict", "."]),
        ("ansible-lint", [str(_BIN / "ansible-lint"), "-q"]),
    ]


def _call(argv: list[str]) -> int:
    environment = {**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}"}
    return subprocess.run(argv, cwd=PROJECT, env=environment, check=False).returncode
