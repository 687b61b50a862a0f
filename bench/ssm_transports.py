"""A converge that has nothing to do, by Run Command and by sessions, on 1 and 5 sandbox hosts, 80 ms from AWS."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from bench.patch import Figure
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT, state_dir
from fleet.requests import local_aws_inventories
from fleet.steps import Steps
from sandbox import local_fleet, world

_HOSTS = 5
_LATENCY_MS = 80.0
_RATIO = 0.1
_REQUESTS = 20.0
_TRANSPORTS = ("run-command", "session")


@dataclass(frozen=True, slots=True)
class Measured:
    """One converge: its whole duration in seconds, and what AWS was asked, by operation."""

    transport: str
    hosts: int
    seconds: float
    requests: dict[str, int]


def run(console: Console, steps: Steps) -> int:
    """Runs the whole, prints a table and figures, and returns the exit code: 1 where a goal is missed.

    The hosts are converged first, by Run Command and without latency; the sandbox is taken down afterwards.
    """
    world.refuse_one_that_is_up("bench")
    try:
        world.up(steps, hosts=_HOSTS)
        # The hosts that are up, and the document: what `-i local-aws` asks for before a run is not the run's.
        found = local_fleet.up(steps)
        with steps.step("five hosts converge"):
            _converge("run-command", [], nothing_to_do=False)
        one = sorted(machine["instance_id"] for machine in _page(found, "machines"))[:1]
        # Once more without looking: bundle, wheels and byte-code are where they are after any earlier run.
        for transport in _TRANSPORTS:
            _converge(transport, one)
        _page(found, "settings", {"latency_ms": _LATENCY_MS})
        measured = []
        for limit in (one, []):
            for transport in _TRANSPORTS:
                with steps.step(f"nothing to do on {len(limit) or _HOSTS}, {transport}"):
                    measured.append(_measure(found, transport, limit))
    finally:
        world.down(steps)
    raw = state_dir() / "bench" / "ssm_transports.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps([asdict(each) for each in measured], indent=1))
    show(console, measured)
    all_figures = figures(measured)
    for figure in all_figures:
        print(figure.line())
    console.print(f"measurements: {raw}")
    return int(not all(figure.met for figure in all_figures))


def figures(measured: list[Measured]) -> list[Figure]:
    """The two ratios of durations, and requests for a host: of Run Command, inventory and all, at the larger fleet."""
    by = {(each.transport, each.hosts): each for each in measured}
    found = []
    for hosts in (1, _HOSTS):
        ratio = by["run-command", hosts].seconds / by["session", hosts].seconds
        found.append(Figure(f"noop_ratio_{hosts}", round(ratio, 3), "ratio", f"<={_RATIO:g}", ratio <= _RATIO))
    # The worse of the two: what a run asks for once weighs most on a single host.
    requests = max(sum(each.requests.values()) / each.hosts for each in measured if each.transport == "run-command")
    found.append(
        Figure("aws_requests_per_host", round(requests, 1), "requests", f"<={_REQUESTS:g}", requests <= _REQUESTS)
    )
    return found


def show(console: Console, measured: list[Measured]) -> None:
    """A row for each converge."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("hosts", "transport", "seconds", "requests", "of them"):
        table.add_column(name, overflow="fold")
    for each in measured:
        most = ", ".join(f"{count} {name}" for name, count in Counter(each.requests).most_common(6))
        words = (str(each.hosts), each.transport, f"{each.seconds:.1f}", str(sum(each.requests.values())), most)
        table.add_row(*words)
    console.print(table)


def _measure(found: world.World, transport: str, limit: list[str]) -> Measured:
    before = len(_page(found, "calls"))
    began = time.monotonic()
    _converge(transport, limit)
    seconds = time.monotonic() - began
    calls = _page(found, "calls")[before:]
    counted = Counter(f"{call['service']}:{call['operation']}" for call in calls)
    return Measured(transport, len(limit) or _HOSTS, round(seconds, 2), dict(counted))


def _converge(transport: str, limit: list[str], *, nothing_to_do: bool = True) -> None:
    """Converges the hosts; a run that fails, or that changes something where nothing is to do, measures nothing."""
    inventories = [word for path in local_aws_inventories() for word in ("-i", str(path))]
    argv = ["converge", *inventories, "--transport", transport, *(["--limit", *limit] if limit else [])]
    done = subprocess.run(
        [sys.executable, "-m", "fleet", *argv, "--json"], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    hosts = json.loads(done.stdout or "{}").get("hosts", {})
    changed = {name: host["changed"] for name, host in hosts.items() if host["changed"]}
    if done.returncode or (nothing_to_do and changed) or len(hosts) != (len(limit) or _HOSTS):
        raise FleetError(
            f"a converge of {len(hosts)} hosts ended with {done.returncode} and changes on {changed}: "
            f"{done.stderr[-500:]}",
            where=str(state_dir() / "logs"),
            mend=f"./runner.py {' '.join(argv)}",
            code=ExitCode.HOST_FAILED,
            who="bench",
        )


def _page(found: world.World, page: str, wanted: dict[str, Any] | None = None) -> Any:
    """A page of the local AWS's stand-ins: what it was asked, its machines, its settings."""
    url = f"{found.aws_url}/stand-in/{page}"
    with httpx.Client(trust_env=False, timeout=60) as client:
        reply = client.get(url) if wanted is None else client.post(url, json=wanted)
    return reply.raise_for_status().json()
