"""Nothing of the hand's work is left; the other scenarios' tests, run after it, say the rest."""

from __future__ import annotations

from typing import Any


def test_the_unit_is_ours_alone_again(host: Any) -> None:
    assert "Restart=always" in host.check_output("systemctl show vllm.service")
    assert host.check_output("systemctl is-enabled vllm.service") == "enabled"


def test_no_second_entry_of_the_archive(host: Any) -> None:
    assert not host.file("/etc/apt/sources.list.d/gpu.list").exists
