"""Machines become instances of the local AWS: known to EC2, managed by Systems Manager."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from moto.ec2.models import ec2_backends

from sandbox.standins.agents import Agents, ManagedInstance
from sandbox.standins.cloud import Call
from sandbox.standins.local_aws import LocalAws
from sandbox.standins.machines import Container, Machine
from sandbox.standins.ssm_commands import RunCommand
from sandbox.standins.ssm_sessions import Sessions

_ACCOUNT = "123456789012"
# What a machine of this processor would be: EC2's word for it, and a type with a T4 or a T4G.
_KINDS = {"x86_64": ("x86_64", "g4dn.4xlarge"), "aarch64": ("arm64", "g5g.4xlarge")}


class Registry:
    """Adds machines, and lets who runs the sandbox set how they and the cloud behave."""

    def __init__(self, aws: LocalAws) -> None:
        self.agents = Agents()
        self._aws = aws
        self.run_command = RunCommand(aws, self.agents)
        Sessions(aws, self.agents)
        aws.after.update({"RebootInstances": self._rebooted, "TerminateInstances": self._terminated})
        aws.pages.update(
            {
                "/stand-in/machines": self._machines,
                "/stand-in/settings": self._settings,
                "/stand-in/calls": self._calls,
                "/stand-in/instances": self._instances,
                "/stand-in/restarts": self._restarts,
            }
        )

    def add(
        self,
        machine: Callable[[str], Machine],
        *,
        tags: dict[str, str] | None = None,
        instance_type: str = "",
        region: str = "us-east-1",
        instance_id: str = "",
        **agent: Any,
    ) -> ManagedInstance:
        """Makes an instance in EC2, unless it is there already, and an agent for it."""
        if not instance_id:
            backend = ec2_backends[_ACCOUNT][region]
            architecture, usual = _KINDS[os.uname().machine]
            instance_type = instance_type or usual
            image = next(iter(backend.describe_images(filters={"architecture": [architecture]})))
            made = backend.run_instances(
                image.id, 1, "", [], instance_type=instance_type, tags={"instance": tags or {}},
                is_instance_type_default=False,
            )  # fmt: skip
            instance_id = made.instances[0].id
        else:
            region, instance_type = _found(instance_id)
        managed = ManagedInstance(machine(instance_id), region=region, instance_type=instance_type, **agent)
        self.agents[instance_id] = managed
        return managed

    def _rebooted(self, call: Call) -> None:
        """Machines go down and come up again, which moto does not do to them."""
        for agent in self._named(call):
            threading.Thread(target=agent.reboot, daemon=True).start()

    def _machines(self, wanted: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Adds a container where one is given, or takes one away that is gone; says which machines there are."""
        if wanted is not None and wanted.get("gone"):
            self.agents[wanted["instance_id"]].terminated = True
        elif wanted is not None and wanted.get("restarted"):
            self._container(wanted["instance_id"]).restarted.set()
        elif wanted is not None and self.agents.at(wanted["address"]) is None:
            podman, name = wanted.pop("podman"), wanted.pop("name")
            self.add(lambda instance_id: Container(instance_id, podman, name), **wanted)
        return [
            {"instance_id": key, "address": found.address, "online": found.online, "name": found.machine.name}
            for key, found in self.agents.items()
            if not found.terminated
        ]

    def _instances(self, _: Any) -> list[dict[str, Any]]:
        """EC2's instances in all regions, with their states, and whether a machine stands behind each."""
        return [
            {"instance_id": instance.id, "state": instance.state, "managed": instance.id in self.agents}
            for backend in ec2_backends[_ACCOUNT].values()
            for reservation in backend.reservations.values()
            for instance in reservation.instances
        ]

    def terminate(self, instance_id: str) -> None:
        """EC2 takes the instance back by itself, as it does with a spot instance: its machine goes down for good."""
        agent = self.agents[instance_id]
        ec2_backends[_ACCOUNT][agent.region].terminate_instances([instance_id])
        agent.terminated = True
        agent.go_down()

    def _terminated(self, call: Call) -> None:
        """Machines of instances that EC2 was told to terminate go down for good."""
        for agent in self._named(call):
            agent.terminated = True
            agent.go_down()

    def _named(self, call: Call) -> list[ManagedInstance]:
        named = [value for name, value in call.parameters.items() if name.startswith("InstanceId.")]
        return [self.agents[found] for found in named if found in self.agents]

    def _container(self, instance_id: str) -> Container:
        machine = self.agents[instance_id].machine
        if not isinstance(machine, Container):
            raise TypeError(f"{instance_id} is no container")
        return machine

    def _restarts(self, _: Any) -> list[dict[str, str]]:
        """Containers that are to be restarted; each is told of once."""
        found = []
        for instance_id, agent in self.agents.items():
            if isinstance(agent.machine, Container) and agent.machine.restart_wanted.is_set():
                agent.machine.restart_wanted.clear()
                found.append({"instance_id": instance_id, "name": agent.machine.name})
        return found

    def _settings(self, wanted: dict[str, Any] | None) -> dict[str, Any]:
        """Sets what is given: the cloud's fields, and those of single machines by id under `machines`."""
        cloud = self._aws.cloud
        given = dict(wanted or {})
        for instance_id, fields in given.pop("machines", {}).items():
            if fields.pop("terminated", False):
                self.terminate(instance_id)
            for name, value in fields.items():
                setattr(self.agents[instance_id], name, value)
        for name, value in given.items():
            setattr(cloud, name, value)
        return {"latency_ms": cloud.latency_ms, "lag_s": cloud.lag_s, "throttle": cloud.throttle}

    def _calls(self, _: Any) -> list[dict[str, Any]]:
        """The ledger, without parameters."""
        with self._aws.cloud.lock:
            return [
                {"principal": call.principal, "service": call.service, "operation": call.operation}
                for call in self._aws.cloud.calls
            ]


def _found(instance_id: str) -> tuple[str, str]:
    """Region and type of an instance that EC2 has already."""
    for region, backend in ec2_backends[_ACCOUNT].items():
        if (instance := backend.get_instance_by_id(instance_id)) is not None:
            return region, instance.instance_type
    raise LookupError(f"EC2 has no instance {instance_id}")
