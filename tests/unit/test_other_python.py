"""Which interpreter carries the other ansible-core: one that runs, not a name on the PATH."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fleet.steps import Durations, Steps
from tests import other_python

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_shim_that_does_not_run_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shim = tmp_path / f"python{HERE}"
    shim.write_text("#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert other_python.find([HERE], tmp_path) is None
    real = tmp_path / "versions" / f"{HERE}.1" / "bin" / "python"
    real.parent.mkdir(parents=True)
    real.symlink_to(Path(sys.executable).resolve())
    assert other_python.find(["3.99", HERE], tmp_path) == real


def test_a_program_of_another_version_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python3.99").symlink_to(Path(sys.executable).resolve())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert other_python.find(["3.99"], tmp_path) is None


def test_none_is_said_and_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(other_python, "find", lambda _versions: None)
    file = io.StringIO()
    steps = Steps(Console(file=file, width=200), Durations(tmp_path / "usual"), "test")
    assert other_python.run(steps) == 0
    assert "skipped, there is no Python 3.1" in file.getvalue()
