"""An instance launched in the local AWS becomes a host: found, converged by Run Command, rebooted, and terminated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fleet.errors import ExitCode
from fleet.paths import PROJECT
from sandbox import containers, local_fleet, world
from tests.machine import bare_sandbox

# A type with a GPU of 7.5, of this machine's processor.
_TYPE = {"x86_64": "g4dn.xlarge", "aarch64": "g5g.xlarge"}[os.uname().machine]


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[None]:
    """A sandbox of one bare host besides."""
    with bare_sandbox("--hosts", "1"):
        yield


def fleet(*words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and what was said besides, of a command that asks the local AWS."""
    found = world.read()
    assert found is not None
    done = subprocess.run(
        [sys.executable, "-m", "fleet", *words, "--json"], cwd=PROJECT, capture_output=True, text=True, check=False,
        env={**os.environ, **local_fleet.environment(found)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr[-3000:]


def names() -> list[str]:
    """Containers of launched instances."""
    return containers.Podman()("ps", "--format", "{{.Names}}", "--filter", "name=^vllm-fleet-i-").split()


def test_launch_converge_reboot_terminate() -> None:
    code, made, said = fleet("launch", "one", "--type", _TYPE, "--fleet", "tried")
    assert code == ExitCode.OK, said
    [instance] = made["launched"]
    until = time.monotonic() + 90
    while names() != [f"vllm-fleet-{instance}"]:
        assert time.monotonic() < until, said
        time.sleep(1)
    # What needs no model nor build shows that it is a host like any other.
    words = ("-i", "local-aws", "--limit", instance)
    while True:
        code, told, said = fleet("converge", *words, "--tags", "preflight,swapfile")
        if code != ExitCode.UNREACHABLE or time.monotonic() > until:
            break
    assert code == ExitCode.OK, said
    assert told["hosts"][instance]["changed"] > 0
    code, told, said = fleet("reboot", *words, "--yes")
    assert code == ExitCode.OK, said
    assert told["hosts"][instance]["outcome"] == "back"
    code, told, said = fleet("converge", *words, "--tags", "preflight,swapfile")
    assert code == ExitCode.OK, said
    code, ended, said = fleet("terminate", "one", "--fleet", "tried", "--yes")
    assert (code, ended["ended"]) == (ExitCode.OK, [instance]), said
    until = time.monotonic() + 60
    while names():
        assert time.monotonic() < until
        time.sleep(1)
    code, told, said = fleet("converge", *words, "--tags", "preflight")
    assert code == ExitCode.BAD_INPUT and "matches none" in told["error"]["what"], said
