"""A tagged fleet of three sandbox hosts, found by the EC2 inventory and converged through Run Command, with no account.

One story in order: each test begins where the one before it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fleet.errors import ExitCode
from fleet.paths import PROJECT
from sandbox import containers, world
from tests.machine import bare_sandbox, put_secret, runner

_MARK = "grep -lz ^VLLM_FLEET_RUN= /proc/[0-9]*/environ 2>/dev/null || true"
_RECORD = "/var/lib/vllm-fleet/service.json"


@pytest.fixture(scope="module", autouse=True)
def bare_hosts() -> Iterator[None]:
    """A sandbox of three bare hosts, and nothing of it afterwards."""
    with bare_sandbox("--hosts", "3"):
        yield


def up() -> world.World:
    """The sandbox that is up."""
    found = world.read()
    assert found is not None
    return found


def asked(page: str, wanted: dict[str, Any] | None = None) -> Any:
    """A page of the local AWS's stand-ins."""
    url = f"{up().aws_url}/stand-in/{page}"
    reply = httpx.get(url, trust_env=False) if wanted is None else httpx.post(url, json=wanted, trust_env=False)
    return reply.raise_for_status().json()


def fleet() -> dict[str, str]:
    """Container names by instance id."""
    names = {host.address: host.name for host in up().hosts}
    return {found["instance_id"]: names[found["address"]] for found in asked("machines")}


def converge(*words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the hosts of the JSON, and what was said on standard error."""
    done = runner("converge", "-i", "local-aws", "--json", *words)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout)
    return done.returncode, found.get("hosts", found), done.stderr


def changed(hosts: dict[str, Any]) -> dict[str, int]:
    """Tasks that changed something, by host."""
    return {name: int(host["changed"]) for name, host in hosts.items()}


def on_host(name: str, script: str) -> str:
    """Runs a shell script in a container."""
    return containers.Podman().shell(name, script)


def test_three_bare_hosts_answer() -> None:
    code, hosts, said = converge()
    assert code == ExitCode.OK, said[-3000:]
    # By instance id, as EC2's inventory names them.
    assert set(hosts) == set(fleet()) and len(hosts) == 3
    assert all(host["serving"]["active"] for host in hosts.values())
    for host in up().hosts:
        reply = httpx.post(
            f"http://{host.address}:8000/v1/chat/completions",
            json={
                "model": "tiny", "temperature": 0,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
            },
            timeout=60, trust_env=False,
        )  # fmt: skip
        assert "Paris" in reply.raise_for_status().json()["choices"][0]["message"]["content"]
    # One command a run for all three, and no session.
    operations = [call["operation"] for call in asked("calls")]
    assert "SendCommand" in operations and "StartSession" not in operations


@pytest.mark.parametrize("words", [(), ("--transport", "session", "--check")])
def test_a_second_converge_changes_nothing_by_either_transport(words: tuple[str, ...]) -> None:
    code, hosts, said = converge(*words)
    assert code == ExitCode.OK, said[-3000:]
    assert changed(hosts) == dict.fromkeys(fleet(), 0)


def test_a_limit_by_the_inventorys_groups_and_one_that_matches_nothing() -> None:
    [one, *_] = fleet()
    code, hosts, said = converge("--limit", f"vllm:&capability_7_5:&{one}", "--tags", "preflight")
    assert (code, set(hosts)) == (ExitCode.OK, {one}), said[-3000:]
    code, told, said = converge("--limit", "i-00000000000000000")
    assert code == ExitCode.BAD_INPUT, said[-3000:]
    assert "matches none of the fleet's 3 running instances" in told["error"]["what"]


def test_a_lost_agent_is_told_apart_from_its_hosts_and_the_others_converge() -> None:
    lost, *others = fleet()
    asked("settings", {"machines": {lost: {"online": False}}})
    try:
        code, hosts, said = converge("--tags", "preflight")
    finally:
        asked("settings", {"machines": {lost: {"online": True}}})
    assert code == ExitCode.UNREACHABLE, said[-3000:]
    assert lost in said and "agent" in said + json.dumps(hosts)
    assert f"1 of 3 hosts left: {lost}" in said
    assert all(hosts[name]["changed"] == 0 for name in others)
    assert converge("--limit", lost, "--tags", "preflight")[0] == ExitCode.OK


def test_ctrl_c_cancels_on_the_host() -> None:
    [(instance, name), *_] = fleet().items()
    # Whoever reads the service's record waits for somebody to write it.
    on_host(name, f"mv {_RECORD} /root/service.json; mkfifo {_RECORD}")
    process = subprocess.Popen(
        [sys.executable, "-m", "fleet", "converge", "-i", "local-aws", "--limit", instance], cwd=PROJECT,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        while not on_host(name, _MARK):
            assert process.poll() is None, process.communicate()[0][-3000:]
            time.sleep(0.5)
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate(timeout=180)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        on_host(name, f"rm {_RECORD}; mv /root/service.json {_RECORD}")
    assert process.returncode == 130, said[-3000:]
    assert "Traceback" not in said
    assert on_host(name, _MARK) == ""
    code, hosts, said = converge("--limit", instance)
    assert (code, changed(hosts)) == (ExitCode.OK, {instance: 0}), said[-3000:]


def test_a_malformed_secret_ends_a_rotation_at_its_first_host() -> None:
    # The last: nothing is there to fetch any more.
    put_secret("HF_TOKEN=hf_abc")
    done = runner("rotate", "-i", "local-aws", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, len(told["hosts"]), len(told["left"])) == (ExitCode.HOST_FAILED, 1, 3), done.stderr[-3000:]
    [first] = told["hosts"].values()
    assert "is no JSON" in first["message"]
