"""The bootstrap says what it will install, and ends in the house form where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

import runner
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT
from sandbox import containers, image
from sandbox.pip_config import read_pip_config


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
        runner._look_at_packages(["podman"])
    refused(error, "no apt-get")


def test_without_podman(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda *_a, **_k: None)
    with pytest.raises(FleetError) as error:
        containers.prepare()
    refused(error, "podman is not installed")


def test_an_index_that_does_not_answer_is_found_before_an_image_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(FleetError) as error:
        image.look_at_index(read_pip_config())
    refused(error, "the package index http://127.0.0.1:9/simple does not give")


def test_only_what_uses_the_sandbox_asks_for_it() -> None:
    for words in (["converge"], ["--yes", "sandbox", "up"], ["test"]):
        assert runner._wants_sandbox(words)
        assert runner._wants_root(words)
    for words in (["converge", "-i", "hosts.yml"], ["converge", "--inventory=x"], ["converge", "--help"], ["status"]):
        assert not runner._wants_sandbox(words)
        assert not runner._wants_root(words)
    # Stopping one needs root, and nothing that makes one.
    assert runner._wants_root(["sandbox", "down"])
    assert not runner._wants_sandbox(["sandbox", "down"])


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
