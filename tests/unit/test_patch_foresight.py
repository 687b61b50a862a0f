"""A source that the patch will not fit is told before it is compiled, by the files that it will be put into."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.patch_foresight import conflict
from ansible.module_utils.patch_registry import ATTENTION, FLEX

from fleet.patch_trees import PATCHES
from sandbox.standins import small_vllm
from tests.unit.test_patch_sources import SOURCES


def spec(folder: Path, kind: str, files: dict[str, str], **more: Any) -> dict[str, Any]:
    """A release whose source of these files was fetched into the folder."""
    if kind == "git":
        for name, text in files.items():
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "checkout" / name).write_text(text)
    elif kind == "sdist":
        with tarfile.open(folder / "sdist.tar.gz", "w:gz") as tar:
            for name, text in files.items():
                member = tarfile.TarInfo(f"vllm-0.34.0/{name}")
                member.size = len(text)
                tar.addfile(member, io.BytesIO(text.encode()))
    source = {"kind": kind, "path": str(folder)}
    known = {"method": "source", "target_device": "cuda", "arch_list": "7.5", "version": "0.34.0", "source": source}
    return {**known, **more}


@pytest.mark.parametrize("kind", ["git", "sdist"])
def test_a_source_is_judged_by_the_files_that_the_patch_changes(tmp_path: Path, kind: str) -> None:
    assert conflict(spec(tmp_path, kind, SOURCES), PATCHES) == ""
    drifted = {**SOURCES, ATTENTION: SOURCES[ATTENTION].replace("    BLOCK_M = 16 if", "    BLOCK = 16 if")}
    told = conflict(spec(tmp_path, kind, drifted), PATCHES)
    assert told == f"patch triton-tile-clamp does not fit {ATTENTION}: BLOCK_M = ... stands 0 times, and once is wanted"


def test_the_small_source_takes_the_patch(tmp_path: Path) -> None:
    small_vllm.build_sdist(tmp_path).rename(tmp_path / "sdist.tar.gz")
    assert conflict(spec(tmp_path, "none", {}, source={"kind": "sdist", "path": str(tmp_path)}), PATCHES) == ""


def test_a_file_that_is_gone_is_a_conflict(tmp_path: Path) -> None:
    told = conflict(spec(tmp_path, "sdist", {ATTENTION: SOURCES[ATTENTION]}), PATCHES)
    assert told == f"patch triton-tile-clamp does not fit {FLEX}: the source has no such file"


@pytest.mark.parametrize("left", ["nothing", "half", "noise"])
def test_a_source_that_is_damaged_or_gone_is_left_for_the_build_to_tell(tmp_path: Path, left: str) -> None:
    asked = spec(tmp_path, "sdist", {name: text * 50 for name, text in SOURCES.items()})
    archive = tmp_path / "sdist.tar.gz"
    whole = archive.read_bytes()
    archive.unlink()
    if left != "nothing":
        archive.write_bytes(whole[: len(whole) // 2] if left == "half" else b"no archive")
    assert conflict(asked, PATCHES) == ""
    assert conflict(spec(tmp_path, "git", {}), PATCHES) == ""


@pytest.mark.parametrize(
    "more",
    [
        {"arch_list": "8.0"}, {"arch_list": "7.5;9.0a"}, {"target_device": "empty"}, {"method": "wheel"},
        {"version": "0.25.1"},
    ],
)  # fmt: skip
def test_what_gets_no_patch_is_not_judged(tmp_path: Path, more: dict[str, str]) -> None:
    assert conflict(spec(tmp_path, "sdist", {}, **more), PATCHES) == ""
