"""Instances that are launched in the local AWS become containers, and go when they are terminated.

`python -m sandbox.launched`, started by `sandbox up`: beside the stand-ins' server, whose network namespace has no
engine in it.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
from typing import Any

import httpx

from fleet.errors import FleetError
from sandbox import containers, machines
from sandbox.machines import Kind

_LOOK_S = 1.0
# Beside the sandbox's own hosts, 1 to 9; each takes the memory of a server.
_NUMBERS = range(31, 40)
_log = logging.getLogger("launched")


class Launched:
    """Makes the containers what the local AWS wants them to be."""

    def __init__(self, aws_url: str, kind: Kind) -> None:
        self._aws = httpx.Client(base_url=aws_url, trust_env=False, timeout=30)
        self._kind = kind
        self._podman = containers.Podman()
        self._running: dict[str, int] = {}

    def look(self) -> None:
        """One look: what is wanted is started, what reboots is restarted, what is no longer wanted is removed."""
        for found in self._page("restarts"):
            self._podman("restart", "-t", "30", found["name"])
            machines.wait_running(self._podman, found["name"])
            self._page("machines", {"instance_id": found["instance_id"], "restarted": True})
        wanted = {found["instance_id"]: found for found in self._page("instances")}
        for instance_id in [one for one in self._running if wanted.get(one, {}).get("state") != "running"]:
            machines.swap_off(_name(instance_id))
            self._podman("rm", "-f", "-t", "1", _name(instance_id))
            self._page("machines", {"instance_id": instance_id, "gone": True})
            del self._running[instance_id]
        for instance_id, found in wanted.items():
            free = [number for number in _NUMBERS if number not in self._running.values()]
            if found["state"] == "running" and not found["managed"] and instance_id not in self._running and free:
                address = machines.start(self._podman, self._kind, _name(instance_id), free[0])
                self._running[instance_id] = free[0]
                machine = {"podman": str(containers.podman_path()), "name": _name(instance_id), "address": address}
                self._page("machines", {**machine, "instance_id": instance_id})

    def _page(self, page: str, wanted: dict[str, Any] | None = None) -> Any:
        url = f"/stand-in/{page}"
        return (self._aws.get(url) if wanted is None else self._aws.post(url, json=wanted)).raise_for_status().json()


def _name(instance_id: str) -> str:
    return f"vllm-fleet-{instance_id}"


def main() -> None:
    """Looks until SIGTERM; the arguments are the local AWS's address and the kind of host as JSON."""
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    kind = json.loads(sys.argv[2])
    launched = Launched(sys.argv[1], Kind(kind["image"], tuple(kind["mounts"])))
    while not done.wait(_LOOK_S):
        try:
            launched.look()
        except (FleetError, httpx.HTTPError) as error:
            # The next look sees what is there then; the log says what was.
            _log.info("%s", error)


if __name__ == "__main__":
    main()
