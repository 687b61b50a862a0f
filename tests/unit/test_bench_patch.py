"""The bench's own verdict, on a small source with a scripted compiler: all goals met, and each way to miss one."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.patch_registry import ATTENTION

from bench import patch
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from tests.unit import scripted_compiler
from tests.unit.test_patch_sources import SOURCES


def benched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_s: float = 20.0) -> int:
    """The exit code for one tree and one compiler."""
    root = tmp_path / "tree"
    for name, text in {**SOURCES, "PKG-INFO": "Name: vllm\nVersion: 0.33.0\n"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_text(text)
    monkeypatch.setattr(patch, "python_with", lambda _triton, _steps: None)
    monkeypatch.setattr(patch, "_timed", lambda *_: (cold_s, 0.1))
    return patch.run([str(root)], ["3.7.1"], terminal(), Steps(terminal(stderr=True), Durations(), "test"))


def test_all_goals_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripted_compiler.put(tmp_path, monkeypatch)
    code = benched(tmp_path, monkeypatch)
    said = capsys.readouterr().out
    assert (code, "wrong" in said) == (0, False), said
    assert "FIGURE patch_versions_ok 1 share goal =1\n" in said
    assert "FIGURE patch_shared_max_bytes 65536 bytes goal <=65536\n" in said
    assert said.count(" ok\n") == 6


def test_kernels_that_do_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted_compiler.put(tmp_path, monkeypatch, patched=98304)
    assert benched(tmp_path, monkeypatch) == 1
    said = capsys.readouterr().out
    assert "FIGURE patch_versions_ok 0 share goal =1\n" in said
    assert "FIGURE patch_shared_max_bytes 98304 bytes goal <=65536\n" in said


def test_a_slow_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripted_compiler.put(tmp_path, monkeypatch)
    assert benched(tmp_path, monkeypatch, cold_s=61.0) == 1
    assert "FIGURE patch_check_cold_s 61 s goal <60\n" in capsys.readouterr().out


def test_a_source_that_cannot_be_patched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted_compiler.put(tmp_path, monkeypatch)
    path = tmp_path / "tree" / ATTENTION
    path.parent.mkdir(parents=True)
    path.write_text(SOURCES[ATTENTION].replace("TILE_SIZE_PREFILL", "TILE"))
    assert benched(tmp_path, monkeypatch) == 1
    said = capsys.readouterr().out
    assert "wrong: conflict" in said
    assert "FIGURE patch_versions_ok 0 share goal =1\n" in said
