"""Who holds the port and the GPU is named, and folders out of reach are refused (CASES B11, B15, B16, B21, G08).

Sockets, processes, users and files are real; nvidia-smi is a script, since no GPU is here.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import prestart
import pytest
from ansible.module_utils import service_checks

UNIT = "vllm.service"
USER = "nobody"


@pytest.fixture
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that every user can reach."""
    path = tmp_path_factory.mktemp("home")
    top = Path(tempfile.gettempdir())
    for parent in (path, *path.parents):
        # Tests that run side by side have one folder more between theirs and the top.
        if top in parent.parents and parent.stat().st_uid == os.geteuid():
            parent.chmod(0o755)
    return path


def listen(address: str) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    made.bind((address, 0))
    made.listen()
    return made


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_foreign_process_on_the_port_is_named(address: str) -> None:
    with listen(address) as taken:
        port = taken.getsockname()[1]
        problem = service_checks.check_port("127.0.0.1", port, UNIT)
    assert problem is not None
    assert f"port {port} is held by process {os.getpid()} (" in problem.what
    assert f"kill {os.getpid()}" in problem.mend


def test_the_same_port_on_another_address_is_no_matter() -> None:
    with listen("127.0.0.2") as taken:
        assert service_checks.check_port("127.0.0.1", taken.getsockname()[1], UNIT) is None


def test_the_units_own_process_may_hold_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, str]] = []

    def is_in_unit(pid: int, unit: str) -> bool:
        asked.append((pid, unit))
        return True

    monkeypatch.setattr(service_checks, "is_in_unit", is_in_unit)
    with listen("127.0.0.1") as taken:
        assert service_checks.check_port("127.0.0.1", taken.getsockname()[1], UNIT) is None
    assert asked == [(os.getpid(), UNIT)]


def test_a_free_port_is_free() -> None:
    with listen("127.0.0.1") as taken:
        port = taken.getsockname()[1]
    assert service_checks.check_port("127.0.0.1", port, UNIT) is None


def test_this_process_is_in_no_unit_of_ours() -> None:
    assert not service_checks.is_in_unit(os.getpid(), UNIT)
    assert not service_checks.is_in_unit(2**22 + 1, UNIT)
    own = re.split(r"[/\n]", Path("/proc/self/cgroup").read_text())
    assert service_checks.is_in_unit(os.getpid(), own[-2])


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_a_process_left_on_the_gpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = subprocess.Popen(["runuser", "-u", USER, "--", "sleep", "60"])
    try:
        child = ""
        while not child:
            child = Path(f"/proc/{left.pid}/task/{left.pid}/children").read_text().strip()
        while "sleep" not in Path(f"/proc/{child}/comm").read_text():
            pass
        # What the real one prints for this query, csv without header and units; a foreign process has no name there.
        nvidia_smi(tmp_path, monkeypatch, f'[ "$1" = "--query-compute-apps=pid,used_memory" ] && echo "{child}, 13501"')
        told = prestart.orphans(UNIT)
        assert told == [f"ORPHAN_GPU pid {child} of user {USER} holds 13501 MiB: sleep 60"]
        problem = service_checks.check_gpu(told, USER)
        assert problem is not None
        assert problem.what.startswith(told[0])
        assert problem.mend == f"kill -9 {child}"
        # Somebody else's is named, and is somebody else's.
        assert service_checks.check_gpu(told, "vllm") is None
    finally:
        left.terminate()
        left.wait()


@pytest.mark.parametrize("script", ["exit 9", "echo 'No devices were found'; exit 6", "echo ''", "echo '4194305, 5'"])
def test_a_gpu_that_nobody_holds_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    nvidia_smi(tmp_path, monkeypatch, script)
    assert prestart.orphans(UNIT) == []


def test_the_units_own_process_is_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path, monkeypatch, f"echo '{os.getpid()}, 5'")
    own = re.split(r"[/\n]", Path("/proc/self/cgroup").read_text())[-2]
    assert len(prestart.orphans(UNIT)) == 1
    assert prestart.orphans(own) == []


def test_the_start_program_notes_the_key_and_never_fails(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, prestart.__file__, UNIT, "abc123"],
        env={"PATH": "/nonexistent", "RUNTIME_DIRECTORY": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "started").read_text() == "abc123\n"


def test_a_folder_that_the_user_cannot_write_is_named(home: Path) -> None:
    assert service_checks.check_cache(home / "not/there/yet", USER) is None
    cache = home / "cache"
    cache.mkdir()
    subprocess.run(["chown", "-R", USER, str(home)], check=True)
    assert service_checks.check_cache(home, USER) is None
    (cache / "triton").mkdir(mode=0o755)
    problem = service_checks.check_cache(home, USER)
    assert problem is not None
    assert problem.what == f"user {USER} cannot write in {cache}/triton"
    assert problem.mend == f"chown -R {USER}: {home}"


@pytest.mark.parametrize(("kind", "refused"), [("nfs4", True), ("nfs", True), ("fuse.s3fs", True), ("ext4", False)])
def test_a_cache_over_a_network_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch, kind: str, refused: bool
) -> None:
    folder = home / "bin"
    folder.mkdir()
    (folder / "findmnt").write_text(f"#!/bin/sh\n[ \"$4\" = '{home}' ] && echo {kind}\n")
    (folder / "findmnt").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    problem = service_checks.check_cache(home / "vllm", USER)
    assert (problem is not None) == refused
    if problem is not None:
        assert kind in problem.what


def model(home: Path) -> Path:
    folder = home / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("x")
    return folder


def test_a_whole_model_is_taken(home: Path) -> None:
    assert service_checks.check_model(model(home), USER) is None


def test_a_model_without_config_or_template_or_out_of_reach_is_named(home: Path) -> None:
    folder = model(home)
    (folder / "weights.safetensors").touch(mode=0o600)
    problem = service_checks.check_model(folder, USER)
    assert problem is not None
    assert problem.what == f"user {USER} cannot read {folder}/weights.safetensors"
    (folder / "weights.safetensors").chmod(0o644)
    (folder / "chat_template.jinja").unlink()
    problem = service_checks.check_model(folder, USER)
    assert problem is not None
    assert problem.what.startswith("CHAT_TEMPLATE: ")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert service_checks.check_model(folder, USER) is None
    (folder / "config.json").unlink()
    problem = service_checks.check_model(folder, USER)
    assert problem is not None
    assert problem.what == "the model has no config.json"
