"""The top-level group_vars reach hosts by every kind of group, whichever way the playbooks are run."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.amazon.aws.plugins.connection import aws_ssm

from fleet.paths import PROJECT
from fleet.requests import known_variables

_BIN = Path(sys.executable).parent
# The names that inventories use; the decision page on groups says what each kind is for.
KINDS = ("vllm", "builder", "architecture_aarch64", "architecture_x86_64", "capability_7_5", "capability_10_0")


def hostvars(project: Path, hosts: dict[str, tuple[str, ...]], tmp_path: Path) -> dict[str, dict[str, Any]]:
    """What a playbook of a project's sees of hosts, given the groups of each."""
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    groups = {group for mine in hosts.values() for group in mine}
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        yaml.safe_dump({group: {"hosts": {h: local for h, mine in hosts.items() if group in mine}} for group in groups})
    )
    seen = {
        "reached": "query('ansible.builtin.varnames', '^reached_')",
        "capability": "preflight_capability | default(none)",
        "swap": "swapfile_size_mib | default(none)",
    }
    content = "{{ {" + ", ".join(f"'{name}': {value}" for name, value in seen.items()) + "} | to_json }}"
    destination = f"{tmp_path}/{{{{ inventory_hostname }}}}.json"
    task = {"ansible.builtin.copy": {"dest": destination, "mode": "0600", "content": content}}
    playbook = project / "playbooks" / "asked.yml"
    playbook.write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
    done = subprocess.run(
        [str(_BIN / "ansible-playbook"), "-i", str(inventory), str(playbook)],
        capture_output=True, text=True, check=False, cwd=project,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {host: json.loads((tmp_path / f"{host}.json").read_text()) for host in hosts}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The project's playbooks and group_vars, wired as they are."""
    copy = tmp_path / "project"
    shutil.copytree(PROJECT / "group_vars", copy / "group_vars")
    (copy / "playbooks").mkdir()
    (copy / "playbooks" / "group_vars").symlink_to((PROJECT / "playbooks" / "group_vars").readlink())
    return copy


def test_every_kind_of_group_reaches_its_hosts_and_no_others(project: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        with (project / "group_vars" / f"{kind}.yml").open("a") as file:
            file.write(f"\nreached_{kind}: true\n")
    hosts: dict[str, tuple[str, ...]] = {
        "g5g": ("vllm", "architecture_aarch64", "capability_7_5"),
        "graviton": ("builder", "architecture_aarch64", "capability_7_5"),
        "other": ("vllm", "architecture_x86_64", "capability_10_0"),
        "container": ("vllm", "sandbox"),
    }
    found = hostvars(project, hosts, tmp_path)
    for host, groups in hosts.items():
        assert set(found[host]["reached"]) == {f"reached_{group}" for group in groups if group in KINDS}
    # What a sandbox host is told is told to no other.
    assert [found[host]["swap"] for host in hosts] == [None, None, None, 64]


def test_a_builder_is_told_what_it_builds_for_and_a_gpu_answers_for_itself(project: Path, tmp_path: Path) -> None:
    hosts: dict[str, tuple[str, ...]] = {
        "one": ("builder", "capability_7_5"),
        "two": ("builder", "capability_10_0", "architecture_aarch64"),
        "lost": ("builder",),
        "serving": ("vllm", "capability_7_5"),
    }
    found = hostvars(project, hosts, tmp_path)
    assert [found[host]["capability"] for host in hosts] == ["7.5", "10.0", "auto", None]


def test_the_sandbox_is_in_a_group_of_each_kind(tmp_path: Path) -> None:
    record = tmp_path / "vllm-fleet" / "sandbox" / "world.json"
    record.parent.mkdir(parents=True)
    world: dict[str, Any] = {
        "podman": "podman",
        "files_url": "f",
        "aws_url": "a",
        "cuda_key_fingerprint": "k",
        "rust": None,
    }
    world["emulated"] = ["arm"]
    record.write_text(json.dumps({**world, "hosts": [{"name": "one", "address": "10.0.0.1"}]}))
    done = subprocess.run(
        [sys.executable, str(PROJECT / "inventory" / "sandbox.py"), "--list"],
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    groups = {name for name, group in json.loads(done.stdout).items() if "one" in group.get("hosts", [])}
    assert groups == {"vllm", "sandbox", "capability_7_5", f"architecture_{os.uname().machine}"}
    emulated = {name for name, group in json.loads(done.stdout).items() if "arm" in group.get("hosts", [])}
    assert emulated == {"emulated", "sandbox", "architecture_aarch64"}


def connection_variables() -> set[str]:
    """What the connection by sessions takes, by its own documentation."""
    options = yaml.safe_load(aws_ssm.DOCUMENTATION)["options"]
    return {variable["name"] for option in options.values() for variable in option.get("vars", [])}


def test_group_vars_hold_only_variables_that_something_takes() -> None:
    known = set(known_variables()) | {"vllm_become", "ansible_connection"} | connection_variables()
    for path in sorted((PROJECT / "group_vars").glob("*.yml")):
        assert set(yaml.safe_load(path.read_text())) <= known, path


def test_every_playbook_parses() -> None:
    for playbook in sorted((PROJECT / "playbooks").glob("*.yml")):
        done = subprocess.run(
            [str(_BIN / "ansible-playbook"), "--syntax-check", "-i", "localhost,", str(playbook)],
            capture_output=True, text=True, check=False, cwd=PROJECT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("groups", "hosts"), [({"vllm": ["gpu"]}, ["gpu"]), ({"vllm": ["gpu"], "builder": ["arm"]}, ["gpu", "arm"])]
)
def test_builders_converge_beside_the_others_and_their_absence_is_no_warning(
    tmp_path: Path, groups: dict[str, list[str]], hosts: list[str]
) -> None:
    path = tmp_path / "hosts.yml"
    path.write_text(json.dumps({name: {"hosts": dict.fromkeys(members)} for name, members in groups.items()}))
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(path), "playbooks/site.yml", "--list-hosts"],
        cwd=PROJECT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    converge = done.stdout.split("play #2")[0]
    assert [host for host in hosts if f"      {host}\n" in converge] == hosts
    assert "WARNING" not in done.stderr + done.stdout


def test_the_local_aws_serves_what_the_sandbox_serves() -> None:
    group = yaml.safe_load((PROJECT / "playbooks/group_vars/sandbox.yml").read_text())
    serving = [release for release in group["vllm_source_build_releases"] if release.get("serve")]
    spec = importlib.util.spec_from_file_location("local_aws_inventory", PROJECT / "inventory/local_aws.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert serving == [script.SERVING]
