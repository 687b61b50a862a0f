"""What the host is and needs, as the card's own figures (FACTS: NVIDIA T4G) and the image's torch say it."""

from __future__ import annotations

import json
from typing import Any

HOST = "/var/lib/vllm-fleet/host.json"


def test_the_card_is_read_from_its_driver(record: Any) -> None:
    found = record(HOST)["host"]
    (card,) = found["gpus"]
    assert card["capability"] == "7.5"
    assert card["shared_memory_per_block_bytes"] == 49152
    assert card["shared_memory_per_block_optin_bytes"] == 65536
    assert card["memory_bytes"] == 15360 * 1024**2
    assert found["driver"]["version"] == "595.71.05"


def test_torch_is_found_in_its_own_environment(host: Any, record: Any) -> None:
    torch = record(HOST)["host"]["torch"]
    said = host.check_output(f"{torch['python']} -c 'import torch; print(torch.__version__)'")
    assert torch["version"] == said
    assert torch["prefix"] == "/opt/pytorch"


def test_the_host_is_measured(host: Any, record: Any) -> None:
    found = record(HOST)["host"]
    assert found["architecture"] == host.check_output("uname -m")
    assert found["memory"]["total_bytes"] == 1024 * int(
        host.check_output("awk '/^MemTotal:/ {print $2}' /proc/meminfo")
    )
    assert found["python"] == host.check_output("python3 -c 'import platform; print(platform.python_version())'")


def test_each_decision_has_its_reason(record: Any) -> None:
    kept = record(HOST)
    decisions = {decision["topic"]: decision for decision in kept["decisions"]}
    assert {"capability", "method", "torch", "dtype", "kernels", "model", "swap", "disk"} <= set(decisions)
    assert decisions["dtype"]["decision"] == "float16"
    assert "8.0" in decisions["dtype"]["why"]
    assert all(len(decision["why"]) > 20 for decision in kept["decisions"])
    assert kept["plan"]["shared_memory_optin_bytes"] == 65536


def test_the_attention_is_that_of_the_model_to_serve(record: Any) -> None:
    # A Gemma 4 in small (sandbox/model/build.py): two sliding layers and a full one.
    layers = [{"head_size": 512, "heads": 4, "kv_heads": 1, "sliding_window": 0},
              {"head_size": 256, "heads": 4, "kv_heads": 1, "sliding_window": 512}]  # fmt: skip
    assert record(HOST)["plan"]["attention"] == {"dtype": "float16", "block_size": 16, "layers": layers}


def test_what_is_here_is_a_fact(host: Any) -> None:
    said = host.check_output("python3 /etc/ansible/facts.d/vllm.fact")
    assert json.loads(said)["capability"] == "7.5"
