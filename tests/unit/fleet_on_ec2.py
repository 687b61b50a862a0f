"""A small fleet behind the local AWS, for tests of the run-command transport: its machines are folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleet.requests import Request
from fleet.run_command import bundle, document
from fleet.run_command.following import Patience
from sandbox.standins.agents import ManagedInstance
from tests.unit.local_aws import REGION, Local, local_aws

BUCKET = "fleet-bucket"
# What waits for minutes in the field, in seconds here.
SOON = Patience(first_s=0.2, longest_s=0.5, silence_s=3.0, cancel_s=20.0)


class Fleet:
    """Instances, and a play for them."""

    def __init__(self, aws: Local, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.aws = aws
        self.folder = folder
        self.machines: list[ManagedInstance] = []
        self.project = folder / "project"
        for name in ("group_vars", "playbooks", "plugins", "roles"):
            (self.project / name).mkdir(parents=True)
        (self.project / "ansible.cfg").write_text("[defaults]\ngathering = explicit\n")
        # The project's own files have nothing to do with how they travel.
        monkeypatch.setattr("fleet.run_command.transport.bundle", lambda: bundle.bundle(self.project))
        aws.client("s3").create_bucket(Bucket=BUCKET)
        document.install(aws.client("ssm"), REGION)

    def add(self, **more: Any) -> ManagedInstance:
        """One more instance."""
        version = {"platform_name": "Ubuntu", "platform_version": "24.04"} if sys.version_info[:2] == (3, 12) else {}
        version = {"platform_version": "13"} if sys.version_info[:2] == (3, 13) else version
        machine = self.aws.add(self.folder / f"host{len(self.machines)}", **{**version, **more})
        self.machines.append(machine)
        return machine

    def request(self, tasks: str, **changes: Any) -> Request:
        """A request for all machines with these tasks."""
        (self.project / "playbooks" / "play.yml").write_text(
            "- hosts: vllm\n  gather_facts: false\n"
            '  environment: {VLLM_FLEET_RUN: "{{ vllm_fleet_run }}"}\n  tasks:\n' + tasks
        )
        hosts = {machine.machine.instance_id: self.variables(machine) for machine in self.machines}
        groups = {name: {"hosts": dict.fromkeys(hosts)} for name in ("vllm", "aws_ec2")}
        inventory = self.folder / "aws_ec2.json"
        inventory.write_text(json.dumps({"all": {"hosts": hosts, "children": groups}}))
        return Request(playbook="playbooks/play.yml", inventories=(inventory,), **changes)

    def variables(self, machine: ManagedInstance) -> dict[str, Any]:
        """What the inventory tells of a machine."""
        return {
            "instance_id": machine.machine.instance_id,
            "placement": {"region": REGION},
            "architecture": "x86_64",
            "vllm_fleet_bucket": BUCKET,
            "vllm_fleet_endpoint_url": self.aws.url,
            "ansible_python_interpreter": sys.executable,
            "folder": str(machine.machine.folder),
        }


@contextmanager
def fleet(folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 1) -> Iterator[Fleet]:
    """A fleet of so many machines, found by the environment."""
    with local_aws() as aws:
        for name, value in aws.environment.items():
            monkeypatch.setenv(name, value)
        found = Fleet(aws, folder, monkeypatch)
        for _ in range(count):
            found.add()
        yield found
