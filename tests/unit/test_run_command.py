"""The run-command transport end to end: real boto3, bootstrap, worker and events, against the local AWS."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet.errors import ExitCode
from fleet.events import Event, HostResult, HostStarted, Outcome, TaskStarted
from fleet.run_command.transport import execute
from tests.unit.fleet_on_ec2 import SOON, fleet

TASKS = """
  - {name: one, ansible.builtin.command: {argv: ['sh', '-c', 'echo ran >>{{ folder }}/ran']}}
  - {name: two, ansible.builtin.ping: }
"""


def test_events_and_code_are_those_of_a_push_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(tmp_path, monkeypatch, count=2) as found:
        events: list[Event] = []
        finished = execute(found.request(TASKS), events.append, SOON)
        ids = [machine.machine.instance_id for machine in found.machines]
        assert finished.code is ExitCode.OK, (finished, found.aws.registry.run_command.commands)
        assert {name: (tally.ok, tally.changed) for name, tally in finished.hosts.items()} == dict.fromkeys(ids, (2, 1))
        for one in ids:
            assert [(e.task, e.outcome) for e in events if isinstance(e, HostResult) and e.host == one] == [
                ("one", Outcome.CHANGED),
                ("two", Outcome.OK),
            ]
            assert [e.task for e in events if isinstance(e, HostStarted) and e.host == one] == ["one", "two"]
        assert {e.task for e in events if isinstance(e, TaskStarted)} == {"one", "two"}
        for machine in found.machines:
            assert (machine.machine.folder / "ran").read_text() == "ran\n"  # type: ignore[operator]
