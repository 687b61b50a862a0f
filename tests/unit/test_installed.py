"""What is installed is what records say; a host with nothing is refused by the commands that build nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleet.paths import PROJECT
from plugins.modules import vllm_installed
from tests.unit.doubles import Module, ends

HOST_FILES = (Path("/opt/vllm"), Path("/var/lib/vllm-fleet"), Path("/etc/ansible/facts.d"))


def listed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the module tells of a host below a folder."""
    module = Module({"root": str(folder / "opt"), "state": str(folder / "state")})
    monkeypatch.setattr(vllm_installed, "AnsibleModule", lambda **_: module)
    return ends(vllm_installed.main)


def release(folder: Path, name: str) -> dict[str, str]:
    """Lays a release's record."""
    record = {
        "name": name, "build_id": f"{name}-1", "python": f"/{name}/python", "site_packages": f"/{name}/site",
        "version": "0.33.0", "distribution": "vllm",
    }  # fmt: skip
    path = folder / "opt" / "releases" / f"{name}-1"
    path.mkdir(parents=True)
    (path / "release.json").write_text(json.dumps({**record, "torch": "2.12.0"}))
    return {**record, "path": str(path)}


def test_what_is_there_is_listed_and_what_passed_its_gate_is_the_served_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = release(tmp_path, "one"), release(tmp_path, "two")
    (tmp_path / "opt" / "releases" / "half-built").mkdir()
    assert listed(tmp_path, monkeypatch)["releases"] == [{**one, "serve": False}, {**two, "serve": False}]
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "service.json").write_text(json.dumps({"path": two["path"]}))
    found = listed(tmp_path, monkeypatch)
    assert found["ansible_facts"] == {"vllm_releases": [{**one, "serve": False}, {**two, "serve": True}]}
    assert not found["changed"]


def test_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = listed(tmp_path, monkeypatch)
    assert (found["failed"], found["refused"], found["changed"]) == (True, True, False)
    assert "no release of vLLM is on this host" in found["msg"]


@pytest.mark.parametrize("command", [("repatch",), ("benchmark", "kernels")], ids=" ".join)
def test_a_host_with_nothing_installed_is_told_and_left(tmp_path: Path, command: tuple[str, ...]) -> None:
    if any(path.exists() for path in HOST_FILES):
        pytest.skip("this machine is a host itself")
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "vllm: {hosts: {here: {ansible_connection: local, vllm_become: false, "
        f"ansible_python_interpreter: {sys.executable}}}}}}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "fleet", *command, "--json", "-i", str(inventory)],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 6, done.stderr
    message = json.loads(done.stdout)["hosts"]["here"]["message"]
    assert message.startswith("vllm_installed: no release of vLLM is on this host, and one is wanted\n  where: ")
    assert message.endswith("\n  mend:  ./runner.py converge")
    assert f"go on: ./runner.py {command[0]}" in done.stderr
    assert not any(path.exists() for path in HOST_FILES)
