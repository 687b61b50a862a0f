"""The toolkit module's waiting and clearing, against a real lock holder and the real apt-get."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import apt_locks

from plugins.modules import cuda_toolkit
from plugins.modules.cuda_toolkit import Toolkit

URL = "https://developer.download.nvidia.com/compute/cuda/repos/ubuntu2404/sbsa"
# As dpkg and apt do: a record lock over the whole file.
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


class Failed(Exception):
    """The module failed with this message."""


class Told(Exception):
    """The module ended well with this result."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__()
        self.result = result


class Module:
    """What the toolkit asks of an Ansible module."""

    check_mode = False

    def __init__(self, limit: int) -> None:
        self.params = {
            "repository_url": "http://127.0.0.1:9", "toolkit": "cuda-toolkit-13-2", "capability": "7.5",
            "lock_timeout_seconds": limit, "state": "/nowhere",
        }  # fmt: skip

    def fail_json(self, **result: Any) -> None:
        raise Failed(result["msg"])

    def exit_json(self, **result: Any) -> None:
        raise Told(result)


def toolkit(limit: int = 30) -> Toolkit:
    return Toolkit(Module(limit))


@contextmanager
def held(lock: Path, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock for so long."""
    argv = [sys.executable, "-c", HOLDER, str(lock), str(seconds)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_holder_of_a_lock_is_known(tmp_path: Path) -> None:
    lock = tmp_path / "lock-frontend"
    assert apt_locks.holder_of(str(lock)) is None
    lock.touch()
    assert apt_locks.holder_of(str(lock)) is None
    with held(lock, 30) as process:
        holder = apt_locks.holder_of(str(lock))
        assert holder is not None
        assert holder.pid == process.pid
        assert holder.command.startswith(sys.executable)
    assert apt_locks.holder_of(str(lock)) is None


def test_apt_waits_for_another_process_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, done = tmp_path / "lock", tmp_path / "done"
    monkeypatch.setattr(apt_locks, "LOCKS", (str(lock),))
    with held(lock, 2):
        began = time.monotonic()
        toolkit().apt("touch", str(done))
        assert time.monotonic() - began > 1.5
    assert done.exists()


def test_a_lock_that_stays_held_is_told_with_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CASES D07.
    free, lock, done = tmp_path / "free", tmp_path / "lock", tmp_path / "done"
    free.touch()
    monkeypatch.setattr(apt_locks, "LOCKS", (str(free), str(lock)))
    with held(lock, 60) as process:
        with pytest.raises(Failed) as caught:
            toolkit(limit=1).apt("touch", str(done))
        words = str(caught.value)
        assert words.startswith(f"cuda_toolkit_sbsa: {lock} is held by process {process.pid} ({sys.executable} -c")
        assert f"\n  where: {os.uname().nodename} {lock}\n  mend:  wait until process {process.pid} ends" in words
        assert process.poll() is None  # waited for, not ended
    assert not done.exists()


def test_cloud_init_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "cloud-init"
    program.write_text(f"#!/bin/sh\nsleep 1; echo $@ >{tmp_path}/asked; exit 2\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    # It ends with an error of its own: first boot is over all the same.
    toolkit().wait_for_first_boot()
    assert (tmp_path / "asked").read_text() == "status --wait\n"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    with pytest.raises(Failed, match="cloud-init still runs after 1 s, and first boot has to be over"):
        toolkit(limit=1).wait_for_first_boot()


def apt(folder: Path) -> subprocess.CompletedProcess[str]:
    """What the real apt-get makes of the sources in a folder; reads nothing of this machine, fetches nothing."""
    options = [f"Dir::Etc={folder}", f"Dir::State={folder}/state", f"Dir::Cache={folder}/cache", "Dir::Etc::main=/none"]
    argv = ["apt-get", *[word for option in options for word in ("-o", option)], "update", "--print-uris"]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="no apt-get here")
def test_entries_of_others_for_the_archive_are_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CASES D03: an old cuda.list without signed-by beside the keyring package's entry.
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    own = folder / "cuda-ubuntu2404-sbsa.list"
    own.write_text(f"deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] {URL} /\n")
    old = folder / "cuda.list"
    old.write_text(f"deb {URL} /\n")
    modern = folder / "nvidia.sources"
    modern.write_text(f"Types: deb\nURIs: {URL}\nSuites: /\nSigned-By: /etc/apt/other.gpg\n")
    other = folder / "other.list"
    other.write_text("deb https://archive.example/ubuntu noble main\n")
    (tmp_path / "sources.list").write_text(f"# deb {URL} /\n")
    assert "Conflicting values set for option Signed-By" in apt(tmp_path).stderr
    monkeypatch.setattr(cuda_toolkit, "_APT", tmp_path)
    monkeypatch.setattr(Toolkit, "owned_entries", lambda _self: [own])
    found = toolkit()
    assert found.other_entries() == [old, modern]
    found.clear(found.other_entries())
    done = apt(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{URL}/InRelease" in done.stdout
    assert found.other_entries() == []
    assert other.exists()


def test_a_proven_toolkit_with_a_strangers_entry_is_not_left_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = tmp_path / "sources.list.d" / "cuda.list"
    stranger.parent.mkdir()
    stranger.write_text(f"deb {URL} /\n")
    monkeypatch.setattr(cuda_toolkit, "_APT", tmp_path)
    for name in ("is_installed", "is_proven", "owns_entry"):
        monkeypatch.setattr(Toolkit, name, lambda _self: True)
    for name in ("wait_for_first_boot", "prove", "apt"):
        monkeypatch.setattr(Toolkit, name, lambda _self, *_words: None)
    monkeypatch.setattr(Toolkit, "version", lambda _self: "13.2.86")
    with pytest.raises(Told) as caught:
        toolkit().run()
    assert caught.value.result == {"changed": True, "nvcc": "13.2.86", "cleared": [str(stranger)]}
    assert [path.name for path in stranger.parent.iterdir()] == ["cuda.list.disabled-by-vllm-fleet"]
    with pytest.raises(Told) as caught:
        toolkit().run()
    assert not caught.value.result["changed"]


@pytest.mark.parametrize(("machine", "word"), [("aarch64", "sbsa"), ("x86_64", "x86_64")])
def test_an_arm_server_is_sbsa(machine: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # CASES D05.
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert toolkit().url.endswith(f"/{word}")
