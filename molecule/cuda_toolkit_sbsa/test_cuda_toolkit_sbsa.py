"""The toolkit is real and proven, its archive has one owner, and no driver came along."""

from __future__ import annotations

import re
from typing import Any


def test_nvcc_compiles_for_the_card(host: Any, cubin_architecture: Any) -> None:
    assert "release 13.2" in host.check_output("/usr/local/cuda/bin/nvcc --version")
    assert cubin_architecture() == 75


def test_the_archive_has_one_owner_with_a_key(host: Any) -> None:
    named = host.check_output("grep -rl --include=*.list --include=*.sources /compute/cuda/repos /etc/apt").split()
    assert len(named) == 1
    entry = host.file(named[0]).content_string
    assert re.search(r"[Ss]igned-[Bb]y", entry)
    # NVIDIA's name of the Arm server archive is sbsa, never arm64.
    wanted = {"x86_64": "x86_64", "aarch64": "sbsa"}[host.check_output("uname -m")]
    assert f"/{wanted}" in entry
    assert "arm64/" not in entry


def test_no_driver_came_along(host: Any) -> None:
    packages = host.check_output("dpkg-query -W -f '${Package} ${db:Status-Abbrev}\\n'").splitlines()
    drivers = [p for p in packages if re.match(r"(nvidia-driver|libnvidia|cuda-drivers|nvidia-dkms)", p)]
    assert drivers == []
    assert host.run("dpkg --audit").stdout == ""
