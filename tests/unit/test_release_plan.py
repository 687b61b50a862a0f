"""The build id changes with all that decides the binary, and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.kernel_choices import STUB_REVISION
from ansible.module_utils.release_plan import (
    Folders,
    Host,
    PlanError,
    Release,
    Torch,
    fetched,
    plan_release,
    source_request,
)

WANTED: dict[str, Any] = {
    "name": "vllm",
    "method": "source",
    "distribution": "vllm",
    "version": "0.33.0",
    "target_device": "cuda",
    "environment": {},
}
GIT = {**WANTED, "repository": "https://git.example/vllm.git"}
TORCH = Torch("/opt/pytorch/bin/python", "/opt/pytorch/lib/python3.12/site-packages", "2.12.0+cu132", "13.2")
HOST = Host("aarch64", "3.12", "7.5")
FOLDERS = Folders(Path("/r"), Path("/s"))


def plan(
    wanted: dict[str, Any] = WANTED, torch: Torch = TORCH, host: Host = HOST, folders: Folders = FOLDERS
) -> Release:
    release: Release = plan_release(wanted, torch, host, folders)
    return release


@pytest.mark.parametrize(
    "other",
    [
        {"wanted": {**WANTED, "version": "0.32.0"}},
        {"wanted": {**WANTED, "method": "wheel"}},
        {"wanted": {**WANTED, "sha256": "00"}},
        {"wanted": {**WANTED, "lock": "vllm-0.33.0.txt"}},
        {"wanted": {**GIT, "commit": "c" * 40}},
        {"wanted": {**WANTED, "environment": {"CMAKE_ARGS": "-DX=1"}}},
        {"wanted": {**WANTED, "rust_frontend": False}},
        {"wanted": {**WANTED, "leave_out": ["int8_scaled_mm"]}},
        {"folders": Folders(Path("/r"), Path("/s"), "1.96.1")},
        {"torch": Torch(TORCH.python, TORCH.site_packages, "2.14.0+cu132", "13.2")},
        {"torch": Torch(TORCH.python, TORCH.site_packages, TORCH.version, "13.0")},
        {"host": Host("x86_64", "3.12", "7.5")},
        {"host": Host("aarch64", "3.11", "7.5")},
        {"host": Host("aarch64", "3.12", "8.0")},
    ],
)
def test_what_decides_the_binary_decides_the_id(other: dict[str, Any]) -> None:
    assert plan(**other).build_id != plan().build_id


def test_what_does_not_decide_it_leaves_it() -> None:
    assert plan({**WANTED, "name": "other", "serve": True}).build_id == plan().build_id
    assert plan(folders=Folders(Path("/elsewhere"), Path("/other"))).build_id == plan().build_id
    # The same commit is the same source, wherever it is cloned from.
    here, there = (
        {**GIT, "repository": where, "commit": "c" * 40} for where in ("https://a.example", "https://b.example")
    )
    assert plan(here).build_id == plan(there).build_id


def test_the_stub_decides_the_id_below_8_0_alone() -> None:
    assert plan().spec["inputs"]["flash_attention"] == f"stub {STUB_REVISION}"
    assert "flash_attention" not in plan(host=Host("aarch64", "3.12", "7.5;8.0")).spec["inputs"]
    assert "flash_attention" not in plan({**WANTED, "method": "wheel"}).spec["inputs"]
    assert plan({**WANTED, "leave_out": ["int8_scaled_mm"]}).spec["leave_out"] == ["int8_scaled_mm"]


@pytest.mark.parametrize(
    ("more", "arch_list", "words"),
    [
        ({"leave_out": ["int8"]}, "7.5", "int8 is no kernel that can be left out"),
        ({"leave_out": ["int8_scaled_mm"]}, "7.5 8.9", "and 7.5 8.9 needs it from 8.9 on"),
        ({"leave_out": ["int8_scaled_mm"], "method": "wheel"}, "7.5", "leave_out has no effect"),
        ({"leave_out": ["int8_scaled_mm"], "target_device": "empty"}, "7.5", "leave_out has no effect"),
    ],
)
def test_kernels_that_cannot_be_left_out_are_refused(more: dict[str, Any], arch_list: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan({**WANTED, **more}, host=Host("aarch64", "3.12", arch_list))
    assert words in caught.value.what
    assert caught.value.where == "vllm_source_build_releases: vllm"


def test_the_arch_list_is_always_set_for_a_cuda_build() -> None:
    # CASES A17: unset on a builder without a GPU, no code for 7.5 is made.
    assert plan().spec["arch_list"] == "7.5"


@pytest.mark.parametrize(
    ("entry", "frontend"),
    [
        ({}, True),
        ({"rust_frontend": False}, False),
        ({"target_device": "empty"}, False),
        ({"target_device": "cpu"}, False),
        ({"target_device": "empty", "rust_frontend": True}, True),
        ({"method": "wheel"}, False),
    ],
)
def test_the_rust_frontend_is_required_where_the_gpu_serves(entry: dict[str, Any], frontend: bool) -> None:
    assert plan({**WANTED, **entry}).spec["rust_frontend"] is frontend


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"environment": {"TORCH_CUDA_ARCH_LIST": "8.0"}}, "TORCH_CUDA_ARCH_LIST in its environment has no effect"),
        ({"environment": {"VLLM_REQUIRE_RUST_FRONTEND": "0"}}, "VLLM_REQUIRE_RUST_FRONTEND in its environment"),
        ({"method": "wheel", "target_device": "empty"}, "no wheel is published for target_device empty"),
        ({"tag": "v0.33.0"}, "tag is set without a repository"),
        ({"commit": "c" * 40}, "commit is set without a repository"),
        ({"repository": "r", "tag": "v0.32.0"}, "tag v0.32.0 and version 0.33.0 do not agree"),
        ({"repository": "r", "sha256": "00"}, "sha256 is an sdist's digest"),
    ],
)
def test_an_entry_that_contradicts_itself_is_refused(entry: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan({**WANTED, **entry})


def keep(folder: Path, **found: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.json").write_text(json.dumps(found))


def test_a_fetched_commit_enters_the_id(tmp_path: Path) -> None:
    folders = Folders(Path("/r"), tmp_path)
    request = source_request(GIT)
    before = plan(GIT, folders=folders)
    ids = {before.build_id}
    for commit in ("a" * 40, "b" * 40):
        keep(tmp_path / request["key"], **{**request, "digest": commit, "rust_toolchain": "1.95"})
        found = plan(GIT, folders=folders)
        assert found.rust_toolchain == "1.95"
        assert found.build_id == plan({**GIT, "commit": commit}, folders=folders).build_id
        ids.add(found.build_id)
    assert len(ids) == 3


def test_another_source_than_the_one_asked_for_is_fetched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = source_request(GIT)
    keep(tmp_path / request["key"], **{**request, "digest": "a" * 40})
    assert fetched(request, tmp_path)
    assert not fetched({**request, "digest": "b" * 40}, tmp_path)
    assert not fetched({**request, "tag": "v0.34.0"}, tmp_path)
    # CASES A35: git refuses a checkout of another owner.
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert not fetched(request, tmp_path)


def test_a_release_without_its_record_is_not_there(tmp_path: Path) -> None:
    release = plan(folders=Folders(tmp_path, tmp_path))
    release.path.mkdir()
    assert release.record is None
    (release.path / "release.json").write_text(json.dumps({"build_id": "another"}))
    assert release.record is None
    site = release.path / "site-packages"
    (site / "vllm-1.dist-info").mkdir(parents=True)
    (site / "vllm-1.dist-info" / "RECORD").write_text("vllm.py,sha256=whatever,0\n")
    (site / "vllm.py").touch()
    (site / "ami_torch.pth").write_text(release.spec["torch"]["site_packages"])
    record = {"build_id": release.build_id, "site_packages": str(site)}
    (release.path / "release.json").write_text(json.dumps(record))
    assert release.record == record
    assert release.damage == ""


def test_a_release_that_lost_a_file_is_not_there_any_more(tmp_path: Path) -> None:
    release = plan(folders=Folders(tmp_path, tmp_path))
    release.path.mkdir()
    record = {"build_id": release.build_id, "site_packages": str(release.path)}
    (release.path / "release.json").write_text(json.dumps(record))
    assert release.record is None
    assert "does not lead to torch" in release.damage
