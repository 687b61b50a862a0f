"""An Arm server takes NVIDIA's sbsa archive, and its nvcc makes code for a T4G."""

from __future__ import annotations

from typing import Any


def test_the_host_is_an_arm_server(host: Any) -> None:
    assert host.check_output("uname -m") == "aarch64"
    assert host.check_output("dpkg --print-architecture") == "arm64"


def test_the_archive_is_sbsa(host: Any) -> None:
    (entry,) = host.check_output("cat /etc/apt/sources.list.d/cuda-*.list").splitlines()
    assert entry.endswith("/sbsa/ /")


def test_nvcc_is_an_arm_program_and_compiles_for_the_card(host: Any, cubin_architecture: Any) -> None:
    # Machine 183 in an ELF header is aarch64.
    assert host.check_output("od -An -tu2 -j18 -N2 /usr/local/cuda/bin/nvcc").strip() == "183"
    assert cubin_architecture() == 75
