"""The top-level group_vars reach hosts whichever way the playbooks are run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from fleet.paths import PROJECT


def test_group_vars_reach_a_host(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text("vllm: {hosts: {one: {ansible_connection: local}}}\nsandbox: {hosts: {one: {}}}\n")
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-inventory"),
            "-i", str(inventory), "--playbook-dir", str(PROJECT / "playbooks"), "--host", "one",
        ],
        capture_output=True, text=True, check=True, cwd=PROJECT,
    )  # fmt: skip
    assert json.loads(done.stdout)["swapfile_size_mib"] == 64


def test_every_playbook_parses() -> None:
    for playbook in sorted((PROJECT / "playbooks").glob("*.yml")):
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "ansible-playbook"),
                "--syntax-check",
                "-i",
                "localhost,",
                str(playbook),
            ],
            capture_output=True,
            text=True,
            check=False,
            cwd=PROJECT,
        )
        assert done.returncode == 0, done.stderr
