"""The Systems Manager agents of the local AWS's machines: what they do, lose, and are told."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox.standins.machines import Machine

# AWS calls a connection lost that has not pinged for some minutes; here it shows at once.
_LOST = "ConnectionLost"
_GRACE_S = 5.0


@dataclass(slots=True)
class ManagedInstance:
    """One machine with its agent.

    `online` may be switched at any time: a lost agent's command goes on, and nobody hears of it. `boot` counts the
    machine's boots, `deliveries` how often the agent carries out each command (AWS promises at least once).
    `spot_notice` is the metadata's instance-action, empty where there is none. A reboot takes the agent away for
    `down_s` seconds, and for good unless it `comes_up`.
    """

    machine: Machine
    platform_name: str = "Debian GNU/Linux"
    platform_version: str = "12"
    region: str = "us-east-1"
    instance_type: str = "g5g.4xlarge"
    address: str = ""
    online: bool = True
    latest: bool = True
    terminated: bool = False
    boot: int = 1
    deliveries: int = 1
    spot_notice: str = ""
    down_s: float = 1.0
    comes_up: bool = True
    variables: dict[str, str] = field(default_factory=dict)
    # On this machine, of what the agent has begun; a container's own processes go down with it.
    processes: list[int] = field(default_factory=list)
    _last_ping: float = field(default_factory=time.time)

    def environment(self) -> dict[str, str]:
        """What the agent's processes get on this machine; inside a container it is the container's own."""
        return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/root"), **self.variables}

    @property
    def heard(self) -> bool:
        """Whether AWS and the agent hear of each other."""
        return self.online and not self.terminated

    def end(self, pid_file: str) -> None:
        """Ends a command's process group as the agent does: by KILL, with no word before (its executers_unix.go)."""
        script = (
            # The process may just be about to begin.
            'n=0; while [ ! -s "$1" ] && [ $n -lt "$2" ]; do sleep 0.1; n=$((n + 1)); done; '
            'pid=$(cat "$1") && kill -KILL "-$pid" 2>/dev/null; rm -f "$1"; exit 0'
        )
        argv = ["sh", "-c", script, "sh", pid_file, str(int(_GRACE_S * 10))]
        subprocess.Popen(
            self.machine.command(argv), cwd=self.machine.folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def go_down(self) -> None:
        """The machine goes down, and comes up again unless it is terminated: all that its agent had begun ends."""
        self.boot += 1
        for process in list(self.processes):
            with contextlib.suppress(ProcessLookupError):
                for child in _family(process):
                    os.kill(child, signal.SIGKILL)

    def reboot(self) -> None:
        """Goes down, is away for a while, and comes up as another boot, unless it is one that stays down."""
        self.online = False
        self.go_down()
        self.machine.restart()
        time.sleep(self.down_s)
        self.online = self.comes_up

    def described(self) -> dict[str, Any]:
        """As DescribeInstanceInformation shows it; empty for an instance that is gone."""
        if self.terminated:
            return {}
        if self.online:
            self._last_ping = time.time()
        return {
            "InstanceId": self.machine.instance_id,
            "PingStatus": "Online" if self.online else _LOST,
            "LastPingDateTime": self._last_ping,
            "AgentVersion": "3.3.0.0",
            "IsLatestVersion": self.latest,
            "PlatformType": "Linux",
            "PlatformName": self.platform_name,
            "PlatformVersion": self.platform_version,
            "ResourceType": "EC2Instance",
            "IPAddress": self.address,
        }


def _family(pid: int) -> list[int]:
    """A process of this machine and all below it, whatever sessions they have made themselves."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for parent in found:
        found += [child for child, above in parents.items() if above == parent]
    return found


class Agents(dict[str, ManagedInstance]):
    """Every managed instance by its id."""

    def takes(self, instance_id: str, region: str) -> bool:
        """Whether SendCommand takes this instance: AWS does so while it is registered there, its agent lost or not."""
        agent = self.get(instance_id)
        return agent is not None and agent.region == region and not agent.terminated

    def at(self, address: str) -> ManagedInstance | None:
        """The machine with this network address."""
        return next((found for found in self.values() if found.address == address and not found.terminated), None)
