"""The build id changes with all that decides the binary, and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.release_plan import Release, Torch, plan_release

WANTED: dict[str, Any] = {
    "name": "vllm",
    "method": "source",
    "distribution": "vllm",
    "version": "0.33.0",
    "target_device": "cuda",
    "environment": {},
}
TORCH = Torch("/opt/pytorch/bin/python", "/opt/pytorch/lib/python3.12/site-packages", "2.12.0+cu132", "13.2")
HOST = {"architecture": "aarch64", "python": "3.12", "arch_list": "7.5"}


def plan(
    wanted: dict[str, Any] = WANTED, torch: Torch = TORCH, host: dict[str, str] = HOST, root: str = "/r"
) -> Release:
    release: Release = plan_release(wanted, torch, host, Path(root))
    return release


@pytest.mark.parametrize(
    "other",
    [
        {"wanted": {**WANTED, "version": "0.32.0"}},
        {"wanted": {**WANTED, "method": "wheel"}},
        {"wanted": {**WANTED, "sha256": "00"}},
        {"wanted": {**WANTED, "environment": {"VLLM_REQUIRE_RUST_FRONTEND": "1"}}},
        {"torch": Torch(TORCH.python, TORCH.site_packages, "2.14.0+cu132", "13.2")},
        {"torch": Torch(TORCH.python, TORCH.site_packages, TORCH.version, "13.0")},
        {"host": {**HOST, "architecture": "x86_64"}},
        {"host": {**HOST, "python": "3.11"}},
        {"host": {**HOST, "arch_list": "8.0"}},
    ],
)
def test_what_decides_the_binary_decides_the_id(other: dict[str, Any]) -> None:
    assert plan(**other).build_id != plan().build_id


def test_what_does_not_decide_it_leaves_it() -> None:
    assert plan({**WANTED, "name": "other", "serve": True}).build_id == plan().build_id
    assert plan(root="/elsewhere").build_id == plan().build_id


def test_the_arch_list_is_always_set_for_a_cuda_build() -> None:
    # CASES A17: unset on a builder without a GPU, no code for 7.5 is made.
    assert plan().spec["environment"]["TORCH_CUDA_ARCH_LIST"] == "7.5"


def test_a_release_without_its_record_is_not_there(tmp_path: Path) -> None:
    release = plan(root=str(tmp_path))
    release.path.mkdir()
    assert release.record is None
    (release.path / "release.json").write_text(json.dumps({"build_id": "another"}))
    assert release.record is None
    (release.path / "release.json").write_text(json.dumps({"build_id": release.build_id}))
    assert release.record is not None
