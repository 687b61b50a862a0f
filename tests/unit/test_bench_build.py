"""The verdict of `bench build` on counted versions, and what it reads out of a source."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import build_units, cuda_parts
from bench.build_units import Counted
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from fleet.vllm_sources import Tree

# 0.33.0, counted on another day, and what one unit of each kind took there.
STOCK = {"_C_stable_libtorch": 51, "_moe_C_stable_libtorch": 16, "_vllm_fa2_C": 76, "_vllm_fa3_C": 192}
SAMPLED = {"_C_stable_libtorch": 27.0, "_moe_C_stable_libtorch": 49.0, "_vllm_fa2_C": 30.0, "_vllm_fa3_C": 87.0}


def counted(moe: int, sampled: dict[str, float]) -> Counted:
    stock = {**STOCK, "_moe_C_stable_libtorch": moe}
    ours = {name: number for name, number in stock.items() if "_fa" not in name}
    return Counted("0.33.0", ours, stock, True, sampled)


@pytest.mark.parametrize(
    ("moe", "allowed", "code", "line"),
    [
        (16, True, 0, "FIGURE build_units_ratio 0.2 share goal <=0.21\n"),
        (24, True, 1, "FIGURE build_units_ratio 0.219 share goal <=0.21\n"),
        (16, False, 1, "FIGURE build_variable_refused 0 share goal =1\n"),
    ],
)
def test_a_missed_goal_is_told(
    moe: int,
    allowed: bool,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = Tree(Path("/none"), "0.33.0")
    monkeypatch.setattr(build_units, "build_tree", lambda _version, _steps: tree)
    monkeypatch.setattr(build_units, "versions", lambda: ["0.33.0"])
    monkeypatch.setattr(cuda_parts, "torch_parts", lambda _version, _steps: Path("/none"))
    monkeypatch.setattr(build_units, "_counted", lambda *_: counted(moe, {}))
    monkeypatch.setattr(build_units, "_refuses", lambda _tree: allowed)
    assert build_units.run(terminal(), Steps(terminal(stderr=True), Durations(), "test")) == code
    said = capsys.readouterr().out
    assert line in said
    assert "_vllm_fa3_C (recorded)" in said


def test_core_minutes_are_told_where_every_kind_was_sampled() -> None:
    row = counted(16, SAMPLED)
    assert row.core_minutes(row.stock) == pytest.approx(352.4, abs=0.1)
    assert row.core_minutes(row.ours) == pytest.approx(36.0, abs=0.1)
    unsampled = counted(16, {name: seconds for name, seconds in SAMPLED.items() if name != "_vllm_fa3_C"})
    assert unsampled.core_minutes(unsampled.stock) is None


def test_what_a_source_pins_is_read(tmp_path: Path) -> None:
    # As vLLM 0.33.0 writes them: a variable for the one, a commit for the other.
    (tmp_path / "CMakeLists.txt").write_text(
        'set(CUTLASS_REVISION "v4.7.1")\nhttps://h/nvidia/cutlass.git\n# in sync\nGIT_TAG ${CUTLASS_REVISION}\n'
    )
    (tmp_path / "f.cmake").write_text("GIT_REPOSITORY https://h/flash-attention.git\n  GIT_TAG b273a02\n")
    tree = Tree(tmp_path, "0.33.0")
    assert build_units._pinned(tree, "CMakeLists.txt", "cutlass.git") == "v4.7.1"
    assert build_units._pinned(tree, "f.cmake", "flash-attention.git") == "b273a02"
