"""Reboots through EC2: over when another boot echoes, against the local AWS, by the command itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.errors import ExitCode
from fleet.paths import PROJECT
from tests.unit.fleet_on_ec2 import Fleet, fleet
from tests.unit.policies import compared


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with fleet(tmp_path, monkeypatch, count=2) as found:
        yield found


def reboot(found: Fleet, *words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and what was said besides."""
    inventory = found.request("  []\n").inventories[0]
    done = subprocess.run(
        [sys.executable, "-m", "fleet", "reboot", "-i", str(inventory), "--yes", "--json", *words],
        cwd=PROJECT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), done.stderr


def ids(found: Fleet) -> list[str]:
    return sorted(machine.machine.instance_id for machine in found.machines)


def test_one_after_the_other_each_until_another_boot_echoes(two: Fleet) -> None:
    two.aws.cloud.calls.clear()
    code, told, said = reboot(two)
    assert code == ExitCode.OK, said
    assert sorted(told["hosts"]) == ids(two)
    for host in told["hosts"].values():
        assert host["outcome"] == "back" and host["boot_before"] and host["boot_before"] != host["boot_after"]
    assert [machine.boot for machine in two.machines] == [2, 2]
    assert (told["left"], told["go_on"]) == ([], "")
    # Each was back before the next was told to go.
    order = [call.operation for call in two.aws.cloud.calls if call.operation in ("RebootInstances", "SendCommand")]
    first, second = [number for number, name in enumerate(order) if name == "RebootInstances"]
    assert "SendCommand" in order[first:second]
    missing, _ = compared(two.aws.cloud.calls, "controller", "reboot")
    assert missing == set()
    assert "ec2:RebootInstances *" in compared(two.aws.cloud.calls, "controller")[0]


def test_the_first_that_stays_down_ends_it(two: Fleet) -> None:
    for machine in two.machines:
        machine.comes_up = False
    code, told, said = reboot(two, "--wait", "5")
    assert code == ExitCode.HOST_FAILED, said
    [(down, host)] = told["hosts"].items()
    assert host["outcome"] == "stayed down"
    assert told["left"] == [name for name in ids(two) if name != down]
    assert f"--limit {told['left'][0]} --wait 5" in told["go_on"]
    assert f"reboot: stayed down: it was rebooted, and no echo comes from it\n  where: {down}\n  mend:  " in said
    assert sorted(machine.boot for machine in two.machines) == [1, 2]


def test_a_host_that_was_not_there_before_is_left_and_the_other_rebooted(two: Fleet) -> None:
    gone = two.machines[0].machine.instance_id
    del two.aws.agents[gone]
    code, told, said = reboot(two, "--at-once", "2")
    assert code == ExitCode.UNREACHABLE, said
    outcomes = {name: host["outcome"] for name, host in told["hosts"].items()}
    assert outcomes.pop(gone) == "unreachable, not rebooted"
    assert list(outcomes.values()) == ["back"]
    assert told["left"] == [gone]
    assert two.aws.cloud.asked("RebootInstances") == 1


def test_a_ping_without_a_reboot_is_none(two: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    del two.aws.aws.after["RebootInstances"]
    monkeypatch.setattr(two, "machines", two.machines[:1])
    code, told, said = reboot(two, "--wait", "4")
    assert code == ExitCode.STALLED, said
    assert [host["outcome"] for host in told["hosts"].values()] == ["did not reboot"]


def test_bad_input_and_silence_reboot_nothing(two: Fleet) -> None:
    inventory = two.request("  []\n").inventories[0]
    argv = [sys.executable, "-m", "fleet", "reboot", "-i", str(inventory)]

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run(
            [*argv, *words], cwd=PROJECT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr

    code, said = run()
    assert code == ExitCode.REFUSED and "not agreed to, nothing was done" in said, said
    inventory.write_text(inventory.read_text().replace('"aws_ec2"', '"others"'))
    code, said = run("--yes")
    assert code == ExitCode.BAD_INPUT and "\n  mend:  " in said, said
    assert two.aws.cloud.asked("RebootInstances") == two.aws.cloud.asked("SendCommand") == 0
