"""Five sandbox hosts converge to one source build at once; what was compiled and how long the others took."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.patch import Figure
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT, state_dir
from fleet.steps import Steps
from sandbox import containers, world

_HOSTS = 5
_INSTALL_S = 60.0
# The stages of a host that takes the build from the store, from the first look on.
_INSTALLING = ("look_in_store", "install", "check")
_SOURCE = {
    "name": "source",
    "method": "source",
    "distribution": "vllm",
    "version": "0.32.0",
    "sha256": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "target_device": "empty",
    "serve": True,
}


def run(console: Console, steps: Steps) -> int:
    """Runs the whole, prints a table and figures, and returns the exit code: 1 where a goal is missed.

    The source is vLLM's own sdist without kernels, with the dependencies of the real one. The hosts are bare; the
    sandbox is taken down afterwards.
    """
    world.refuse_one_that_is_up("bench")
    try:
        world.up(steps, hosts=_HOSTS)
        with steps.step("five hosts, one build"):
            first = _converge()
        with steps.step("the second host again, with the build in the store"):
            host = next(name for name, record in first.items() if record["store"]["state"] == "fetched")
            containers.Podman().shell(host, "rm -r /opt/vllm/releases /var/lib/vllm-fleet/builds/*/")
            began = time.monotonic()
            again = _converge("--limit", host)[host]
            whole_s = time.monotonic() - began
    finally:
        world.down(steps)
    raw = state_dir() / "bench" / "build_fleet.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    raw.write_text(json.dumps({"first": first, "again": again, "again_converge_s": whole_s}, indent=1))
    _show(console, first)
    runs = sum(record["compiled"] for record in first.values())
    others = [record["compiled"] for record in first.values() if record["store"]["state"] == "fetched"]
    install_s = sum(again["seconds"].get(stage, 0.0) for stage in _INSTALLING)
    figures = [
        Figure("build_runs_for_5_hosts", runs, "builds", "=1", runs == 1),
        Figure("second_host_compiles", sum(others), "builds", "=0", len(others) == _HOSTS - 1 and not sum(others)),
        Figure("second_host_install_s", round(install_s, 1), "s", f"<={_INSTALL_S:g}", install_s <= _INSTALL_S),
    ]
    for figure in figures:
        print(figure.line())
    console.print(f"measurements: {raw}")
    return int(not all(figure.met for figure in figures))


def _converge(*words: str) -> dict[str, dict[str, Any]]:
    """Each host's record of the release after a converge, and how often its log shows the source being built."""
    argv = [
        sys.executable, "-m", "fleet", "converge", "--json", "--tags", "preflight,vllm_source_build", *words,
        "-e", f"vllm_source_build_releases={json.dumps([_SOURCE])}",
    ]  # fmt: skip
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FleetError(
            f"the converge ended with {done.returncode}: {done.stdout[-500:]}",
            where=str(state_dir() / "logs"),
            mend="./runner.py converge --tags preflight,vllm_source_build",
            code=ExitCode.HOST_FAILED,
            who="bench",
        )
    found = {}
    for host in json.loads(done.stdout)["hosts"]:
        shell = containers.Podman().shell
        record = json.loads(shell(host, "cat /opt/vllm/releases/*/release.json"))
        log = f"/var/lib/vllm-fleet/builds/{record['build_id']}/build.log"
        record["compiled"] = int(shell(host, f"grep -c '/uv build ' {log} || true"))
        found[host] = record
    return found


def _show(console: Console, records: dict[str, dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("host", "compiled", "store", "look or wait s", "install s", "total s"):
        table.add_column(name)
    for host, record in sorted(records.items()):
        seconds = record["seconds"]
        times = [f"{seconds.get(name, 0):.0f}" for name in ("look_in_store", "install", "total")]
        table.add_row(host, str(record["compiled"]), record["store"]["state"], *times)
    console.print(table)
