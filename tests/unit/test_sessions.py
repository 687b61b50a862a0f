"""Sessions: the real ansible-playbook and the real amazon.aws connection plugin over a real data channel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from ansible_collections.amazon.aws.plugins.plugin_utils.ssm.s3clientmanager import S3ClientManager

from plugins.connection.ssm_session import without_signed_argument
from tests.unit.local_aws import REGION, Local, local_aws
from tests.unit.policies import compared

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "sandbox/standins/session-manager-plugin"


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    with local_aws() as made:
        made.client("s3").create_bucket(Bucket="fleet-files")
        yield made


class Play:
    """One play against one instance."""

    def __init__(self, local: Local, tmp_path: Path) -> None:
        self.local, self.folder = local, tmp_path
        self.machine = tmp_path / "machine"
        self.id = local.add(self.machine).machine.instance_id

    def run(self, *tasks: dict[str, Any], **variables: Any) -> subprocess.CompletedProcess[str]:
        inventory = {
            "ansible_connection": "ssm_session",
            "ansible_aws_ssm_region": REGION,
            "ansible_aws_ssm_bucket_name": "fleet-files",
            "ansible_aws_ssm_timeout": 30,
            "ansible_aws_ssm_s3_addressing_style": "path",
            "ansible_aws_ssm_plugin": str(CLIENT),
            "ansible_python_interpreter": sys.executable,
            "ansible_remote_tmp": str(self.machine / "tmp"),
            **variables,
        }
        hosts = {"all": {"hosts": {self.id: inventory}}}
        (self.folder / "hosts.yml").write_text(yaml.safe_dump(hosts))
        play = {"hosts": "all", "gather_facts": False, "tasks": list(tasks)}
        (self.folder / "play.yml").write_text(yaml.safe_dump([play]))
        environment = {
            **os.environ, **self.local.environment, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_PROXY": "*", "no_proxy": "*",
        }  # fmt: skip
        command = [sys.executable, "-m", "ansible", "playbook", "-i", "hosts.yml", "play.yml"]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture
def play(local: Local, tmp_path: Path) -> Play:
    return Play(local, tmp_path)


def test_modules_files_and_odd_characters_go_through(play: Play) -> None:
    text = "ä ✓ \"double\" 'single' $HOME `x` \\ | ; & {}\n" + "long " * 2000 + "\n"
    (play.folder / "sent").write_text(text)
    shown = play.run(
        {"ansible.builtin.copy": {"src": str(play.folder / "sent"), "dest": str(play.machine / "there")}},
        {"ansible.builtin.fetch": {"src": str(play.machine / "there"), "dest": f"{play.folder}/back", "flat": True}},
        {"ansible.builtin.command": {"argv": ["cat", str(play.machine / "there")]}, "register": "read"},
        {"ansible.builtin.copy": {"content": "{{ read.stdout }}\n", "dest": f"{play.folder}/out"}},
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert (play.machine / "there").read_text() == text
    assert (play.folder / "back").read_text() == text
    assert (play.folder / "out").read_text() == text


@pytest.mark.parametrize("method", ["get", "put"])
def test_a_signed_address_is_no_argument_of_a_process(method: str, tmp_path: Path) -> None:
    token = "IQoJb3JpZ2lu" + "t" * 60
    client = boto3.client(
        "s3", region_name=REGION, aws_access_key_id="ASIA", aws_secret_access_key="s", aws_session_token=token
    )
    command, _ = S3ClientManager(client).generate_host_commands(
        "fleet-files", None, None, "i-1//tmp/a b", "/tmp/a b", "/tmp/a b", False, method
    )
    assert token in command
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done >argv\ncat >config\n')
    curl.chmod(0o755)
    done = subprocess.run(
        ["sh", "-euc", f"touch() {{ :; }}; {without_signed_argument(command)}"],
        cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0
    given = (tmp_path / "argv").read_text().splitlines()
    assert token not in str(given)
    assert given[:2] == ["--config", "-"]
    assert "/tmp/a b" in given
    # As curl reads its own configuration.
    (address,) = re.fullmatch(r'url = "(.*)"\n', (tmp_path / "config").read_text()).groups()  # type: ignore[union-attr]
    assert f"'{address}'" in command


def test_a_command_that_fails_is_a_failed_host_not_an_unreachable_one(play: Play) -> None:
    command = {"ansible.builtin.raw": "sh -c 'exit 7'", "register": "ran", "failed_when": "ran.rc == 7"}
    shown = play.run(command)
    assert shown.returncode == 2, shown.stdout
    assert "unreachable=0    failed=1" in shown.stdout


@pytest.mark.parametrize(("connection", "runs"), [("ssm_session", 1), ("amazon.aws.aws_ssm", 4)])
def test_a_command_over_the_limit_runs_once(play: Play, connection: str, runs: int) -> None:
    ran = play.machine / "ran"
    shown = play.run(
        {"ansible.builtin.raw": f"sh -c 'echo run >> {ran}; sleep 30'"},
        ansible_connection=connection, ansible_aws_ssm_timeout=2, ansible_aws_ssm_retries=0,
    )  # fmt: skip
    assert shown.returncode == 4, shown.stdout
    assert ran.read_text().splitlines() == ["run"] * runs


def test_output_that_stops_in_half_a_line_ends_by_the_clock(play: Play) -> None:
    shown = play.run({"ansible.builtin.raw": "sh -c 'printf half; sleep 60'"}, ansible_aws_ssm_timeout=2)
    assert shown.returncode == 4, shown.stdout
    assert "did not end" in shown.stdout
    assert "mend:" in shown.stdout


def test_a_session_that_ends_before_its_command_is_no_success(play: Play) -> None:
    ran = play.machine / "ran"
    # The last line that comes is a number, as the exit code would be.
    shown = play.run({"ansible.builtin.raw": f"sh -c 'echo run >> {ran}; echo 0; kill -9 $PPID; sleep 9'"})
    assert shown.returncode == 4, shown.stdout
    assert "the session broke" in shown.stdout
    assert ran.read_text().splitlines() == ["run"]


def test_a_channel_that_is_refused_ends_by_the_clock(play: Play, local: Local) -> None:
    local.cloud.refuse["OpenDataChannel"] = "AccessDeniedException"
    try:
        shown = play.run({"ansible.builtin.raw": "true"}, ansible_aws_ssm_timeout=2)
    finally:
        del local.cloud.refuse["OpenDataChannel"]
    assert shown.returncode == 4, shown.stdout
    assert "the session did not open" in shown.stdout
    assert "docs/policies/session.json" in shown.stdout


def test_the_missing_plugin_is_named(play: Play) -> None:
    shown = play.run({"ansible.builtin.raw": "true"}, ansible_aws_ssm_plugin="/nowhere/session-manager-plugin")
    assert shown.returncode == 4, shown.stdout
    assert "the session-manager-plugin is missing" in shown.stdout
    assert "docs/sessions.md" in shown.stdout


def test_an_instance_without_an_agent_is_unreachable_and_told_why(play: Play, local: Local) -> None:
    local.agents[play.id].online = False
    shown = play.run({"ansible.builtin.raw": "true"})
    assert shown.returncode == 4, shown.stdout
    assert "TargetNotConnected" in shown.stdout
    assert "amazon-ssm-agent" in shown.stdout


def test_the_policy_grants_what_is_used_and_no_more(play: Play, local: Local) -> None:
    before = len(local.cloud.calls)
    (play.folder / "sent").write_text("x")
    fetched = {"src": str(play.machine / "there"), "dest": f"{play.folder}/back", "flat": True}
    shown = play.run(
        {"ansible.builtin.copy": {"src": str(play.folder / "sent"), "dest": str(play.machine / "there")}},
        {"ansible.builtin.fetch": fetched},
        {"ansible.builtin.raw": "true"},
    )
    assert shown.returncode == 0, shown.stdout
    inventory = [str(Path(sys.executable).parent / "ansible-inventory"), "-i", "inventory/aws_ec2.yml", "--list"]
    subprocess.run(
        inventory, cwd=ROOT, env={**os.environ, **local.environment}, capture_output=True, check=True, timeout=100
    )
    assert compared(local.cloud.calls[before:], "session") == (set(), set())
