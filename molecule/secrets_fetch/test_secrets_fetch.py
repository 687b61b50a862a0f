"""The token is in memory for its owner, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

TOKEN = "/run/vllm-secrets/hf_token"

pytestmark = pytest.mark.journal("vllm-secrets.service")


def test_it_is_in_memory_for_root_alone(host: Any) -> None:
    assert host.check_output(f"cat {TOKEN}").startswith("hf_")
    assert host.check_output(f"stat -c '%a %U' {TOKEN}") == "400 root"
    assert host.check_output("stat -f -c %T /run/vllm-secrets") in ("tmpfs", "ramfs")


def test_it_is_nowhere_else(host: Any) -> None:
    token = host.check_output(f"cat {TOKEN}")
    said = host.check_output(
        "systemctl show vllm-secrets.service; systemctl cat vllm-secrets.service; journalctl --no-pager -o cat; "
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; tr '\\0' ' ' <$p/environ; done 2>/dev/null; "
        "cat /opt/vllm-fleet/secrets/request.json"
    )
    assert token not in said
    assert host.check_output(f'grep -rlF "$(cat {TOKEN})" /etc /opt/vllm-fleet /var/lib /var/log /root || true') == ""


def test_nothing_shows_it_with_every_debug_switch_on(host: Any) -> None:
    token = host.check_output(f"cat {TOKEN}")
    before = host.check_output(f"stat -c %i {TOKEN}")
    unit = host.check_output("systemctl cat vllm-secrets.service").splitlines()
    settings = " ".join(line.removeprefix("Environment=") for line in unit if line.startswith("Environment="))
    (command,) = (line.removeprefix("ExecStart=") for line in unit if line.startswith("ExecStart="))
    debug = "AWS_DEBUG=1 BOTO_LOG_LEVEL=DEBUG PYTHONVERBOSE=1 PYTHONDEVMODE=1"
    said = host.run(f"set -x; env {debug} {settings} {command}")
    assert said.rc == 0
    assert host.check_output(f"stat -c %i {TOKEN}") != before, "it was not fetched anew"
    assert token not in said.stdout + said.stderr
