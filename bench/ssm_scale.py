"""The controller driving 10, 100 and 1,000 simulated hosts by Run Command: its memory and its time for a host.

Hosts are simulated (bench/ssm_cloud.py); what is measured is the controller's own code, in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import boto3
import httpx
from rich.console import Console
from rich.table import Table

from bench import ssm_plot
from bench.patch import Figure
from bench.ssm_cloud import ids
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT, state_dir
from fleet.requests import Request
from fleet.run_command import document
from fleet.run_command.transport import execute
from fleet.steps import Steps

_SIZES = (10, 100, 1000)
_SECONDS = 20.0
_MIB = 512.0
_REGION, _BUCKET = "us-east-1", "scale-bucket"


@dataclass(frozen=True, slots=True)
class Scaled:
    """One run: the controller's peak memory in MiB, its CPU time and the whole duration in seconds, and requests.

    `requests` are the controller's, by operation; `host_requests` the simulated hosts' own.
    """

    hosts: int
    mib: float
    cpu_s: float
    seconds: float
    requests: dict[str, int]
    host_requests: int


def run(console: Console, steps: Steps) -> int:
    """Runs the sizes, prints a table and figures, and returns the exit code: 1 where the goal is missed."""
    measured = []
    for hosts in _SIZES:
        with steps.step(f"{hosts} simulated hosts"):
            measured.append(measure(hosts, _SECONDS))
    folder = state_dir() / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ssm_scale.json").write_text(json.dumps([asdict(each) for each in measured], indent=1))
    (folder / "ssm_scale.svg").write_text(
        ssm_plot.plot([(each.hosts, each.mib, each.cpu_s / each.hosts) for each in measured], _MIB)
    )
    show(console, measured)
    found = figures(measured[-1])
    for figure in found:
        print(figure.line())
    console.print(f"measurements and plot: {folder}/ssm_scale.json, .svg; simulated hosts, the controller's own code")
    return int(not all(figure.met for figure in found))


def figures(largest: Scaled) -> list[Figure]:
    """Of the largest fleet: memory, and CPU time for a host, which has no goal."""
    return [
        Figure("controller_mib_1000", round(largest.mib), "MiB", f"<={_MIB:g}", largest.mib <= _MIB),
        Figure("controller_cpu_s_per_host", round(largest.cpu_s / largest.hosts, 3), "s", "", True),
    ]


def show(console: Console, measured: Sequence[Scaled]) -> None:
    """A row for each size."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("simulated hosts", "MiB", "CPU s", "CPU s per host", "seconds", "requests per host"):
        table.add_column(name, justify="right")
    for each in measured:
        requests = (sum(each.requests.values()) + each.host_requests) / each.hosts
        words = (f"{each.mib:.0f}", f"{each.cpu_s:.1f}", f"{each.cpu_s / each.hosts:.3f}", f"{each.seconds:.0f}")
        table.add_row(str(each.hosts), *words, f"{requests:.1f}")
    console.print(table)


def measure(hosts: int, seconds: float) -> Scaled:
    """One run of so many hosts; raises FleetError where not every one of them ended well."""
    argv = [sys.executable, "-m", "bench.ssm_cloud", str(hosts), str(seconds)]
    with (
        tempfile.TemporaryDirectory() as name,
        subprocess.Popen(argv, cwd=PROJECT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as cloud,
    ):
        try:
            url = _pipe(cloud.stdout).readline().strip()
            session = boto3.Session("controller", "testing", region_name=_REGION)
            session.client("s3", endpoint_url=url).create_bucket(Bucket=_BUCKET)
            document.install(session.client("ssm", endpoint_url=url), _REGION)
            before = len(_page(url, "calls"))
            inventory = Path(name) / "aws_ec2.json"
            inventory.write_text(json.dumps(_inventory(hosts)))
            environment = {
                **os.environ, "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "controller",
                "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": _REGION, "AWS_EC2_METADATA_DISABLED": "true",
            }  # fmt: skip
            done = subprocess.run(
                [sys.executable, "-m", "bench.ssm_scale", str(inventory)], cwd=PROJECT, env=environment,
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            said = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            if said.pop("good", None) != hosts:
                raise FleetError(
                    f"not all of {hosts} simulated hosts ended well: {done.stderr.strip()[-500:]}",
                    where="the controller's process",
                    mend="./runner.py bench ssm",
                    code=ExitCode.HOST_FAILED,
                    who="bench",
                )
            calls = Counter(f"{call['service']}:{call['operation']}" for call in _page(url, "calls")[before:])
            # Each host reads its job, and puts its chunks; bundle and wheels it has.
            return Scaled(hosts=hosts, requests=dict(calls), host_requests=hosts + _page(url, "puts"), **said)
        finally:
            _pipe(cloud.stdin).close()


def _pipe(stream: IO[str] | None) -> IO[str]:
    """One of the process's own streams, which it has by being started so."""
    if stream is None:
        raise ValueError("no pipe")
    return stream


def _inventory(hosts: int) -> dict[str, Any]:
    variables = {
        name: {
            "instance_id": name, "placement": {"region": _REGION}, "architecture": "x86_64",
            "vllm_fleet_bucket": _BUCKET, "ansible_host": name,
        }
        for name in ids(hosts)
    }  # fmt: skip
    groups = {group: {"hosts": dict.fromkeys(variables)} for group in ("vllm", "aws_ec2")}
    return {"all": {"hosts": variables, "children": groups}}


def _page(url: str, page: str) -> Any:
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.get(f"{url}/stand-in/{page}").raise_for_status().json()


def main() -> None:
    """The controller: drives the hosts of the inventory named, and says what that cost it, as one JSON line."""
    began = time.monotonic()
    events = 0

    def count(_: object) -> None:
        nonlocal events
        events += 1

    request = Request(playbook="playbooks/site.yml", inventories=(Path(sys.argv[1]),), forks=50)
    finished = execute(request, count)
    good = sum(not (tally.failed or tally.unreachable) for tally in finished.hosts.values())
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    # Of this program alone: ru_maxrss begins with what the starting process had.
    [peak] = re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    print(
        json.dumps(
            {
                "good": good,
                "mib": int(peak) / 1024,
                "cpu_s": round(sum(each.ru_utime + each.ru_stime for each in used), 2),
                "seconds": round(time.monotonic() - began, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
