"""Hosts that are simulated: behind the local AWS, each puts a recorded stream to S3 as the job on a host would.

`python -m bench.ssm_cloud HOSTS SECONDS` serves them in a process of its own and prints its address.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from moto.s3.models import s3_backends

from bench.record_stream import INSTANCE, RECORDING
from sandbox.standins import aws
from sandbox.standins.agents import Agents, ManagedInstance
from sandbox.standins.invocations import Invocation
from sandbox.standins.local_aws import LocalAws
from sandbox.standins.machines import Folder
from sandbox.standins.registry import Registry
from sandbox.standins.ssm_commands import Command, RunCommand

_ACCOUNT = "123456789012"
# When the job on a host puts its chunks, as shares of the whole run: see Chunks in host_job.py.
_MOMENTS = (0.025, 0.225, 0.545, 0.95)


def ids(count: int) -> list[str]:
    """The simulated instances' ids."""
    return [f"i-{number:017x}" for number in range(1, count + 1)]


class SimulatedHosts(RunCommand):
    """Run Command whose commands no machine carries out: results come as recorded, within `seconds`."""

    def __init__(self, local: LocalAws, agents: Agents, seconds: float) -> None:
        super().__init__(local, agents)
        self.puts = 0
        self._seconds = seconds
        self._lines = gzip.decompress(RECORDING.read_bytes()).splitlines(keepends=True)
        self._lock = threading.Lock()
        local.pages["/stand-in/puts"] = lambda _: self.puts

    def _carry_out(self, command: Command) -> None:
        """All hosts of the command begin at once; one thread paces them."""
        began = time.monotonic()
        streams = {found.instance_id: self._chunks(found.instance_id) for found in command.invocations.values()}
        for invocation in command.invocations.values():
            invocation.begin()
        for moment in _MOMENTS:
            time.sleep(max(0.0, began + moment * self._seconds - time.monotonic()))
            for invocation in command.invocations.values():
                self._put(command, invocation, *next(streams[invocation.instance_id]))

    def _put(self, command: Command, invocation: Invocation, number: int, content: bytes) -> None:
        parameter = {name: values[0] for name, values in command.parameters.items()}
        key = f"{parameter['Prefix']}runs/{parameter['RunId']}/{invocation.instance_id}/{number:06d}.gz"
        with self._lock:
            s3_backends[_ACCOUNT]["aws"].put_object(parameter["Bucket"], key, content)
            self.puts += 1
        if number == len(_MOMENTS):
            digest = hashlib.sha256(content).hexdigest()
            end = {"run": parameter["RunId"], "chunks": number, "digest": digest, "rc": 0}
            invocation.output = json.dumps(end) + "\n"
            invocation.end("Success", "Success", 0)

    def _chunks(self, instance_id: str) -> Iterator[tuple[int, bytes]]:
        """The host's own stream in chunks, each naming the digest of the one before."""
        digest, count = "", len(self._lines)
        for number in range(1, len(_MOMENTS) + 1):
            part = self._lines[count * (number - 1) // len(_MOMENTS) : count * number // len(_MOMENTS)]
            text = b"".join(part).replace(INSTANCE.encode(), instance_id.encode())
            content = gzip.compress(json.dumps({"chunk": number, "after": digest}).encode() + b"\n" + text, 6)
            digest = hashlib.sha256(content).hexdigest()
            yield number, content


def serve(hosts: int, seconds: float) -> LocalAws:
    """A running local AWS with so many hosts; the caller stops it."""
    aws.put_at_once()
    local = LocalAws()
    registry = Registry(local)
    SimulatedHosts(local, registry.agents, seconds)
    for instance_id in ids(hosts):
        # Of Systems Manager alone: to EC2 they are nothing.
        registry.agents[instance_id] = ManagedInstance(Folder(instance_id, Path("/nonexistent")))
    local.start()
    return local


def main() -> None:
    """Serves until its standard input ends."""
    local = serve(int(sys.argv[1]), float(sys.argv[2]))
    print(local.url, flush=True)
    sys.stdin.read()
    local.stop()


if __name__ == "__main__":
    main()
