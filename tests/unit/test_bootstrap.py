"""The bootstrap says what it will install, and ends in the house form where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import runner
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT
from sandbox import containers


def refused(error: pytest.ExceptionInfo[FleetError], words: str) -> None:
    """The error is a refusal in the house form."""
    assert error.value.code is ExitCode.REFUSED
    assert words in str(error.value)
    assert "\n  where: " in str(error.value)
    assert "\n  mend:  " in str(error.value)


def test_without_root_and_without_sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda *_a, **_k: None)
    with pytest.raises(FleetError) as error:
        runner._become_root(["converge"])
    refused(error, "uid 1000 without sudo")


def test_without_apt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_a, **_k: None)
    with pytest.raises(FleetError) as error:
        runner._install_packages(["podman"])
    refused(error, "no apt-get")


def test_without_podman(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_a, **_k: None)
    with pytest.raises(FleetError) as error:
        containers.prepare()
    refused(error, "podman is not installed")


def test_an_index_that_cannot_be_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FleetError) as error:
        runner._run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(tmp_path), "nothing-here"],
            "setup: Python packages",
        )
    refused(error, "No matching distribution found")
    assert "Python packages" in capsys.readouterr().out


def test_only_what_uses_the_sandbox_asks_for_it() -> None:
    assert runner._wants_sandbox(["converge"])
    assert runner._wants_sandbox(["--yes", "sandbox", "up"])
    assert runner._wants_sandbox(["test"])
    assert not runner._wants_sandbox(["converge", "-i", "hosts.yml"])
    assert not runner._wants_sandbox(["converge", "--help"])
    assert not runner._wants_sandbox(["status"])


def test_an_old_python_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert runner.main(["status"]) == ExitCode.BAD_INPUT
    assert "3.11 or newer is wanted" in capsys.readouterr().err


def test_the_bootstrap_needs_the_standard_library_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import runner; print('ok')"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr
