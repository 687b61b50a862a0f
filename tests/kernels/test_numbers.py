"""What the kernels compute, in Triton's interpreter on a CPU: stock and patched, against a float32 reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kernels.conftest import Run

# (queries, context) of each sequence. In a chunked prefill another sequence decodes. With a tile of 16 a context of 200
# fills 13 of 16 segments, and a reduction that takes the tile for 32 reads 7; at 300 both are right.
_SEQUENCES = {
    "prefill": [(35, 35), (10, 10)],
    "chunked prefill": [(13, 75), (1, 40), (6, 200)],
    "decode": [(1, 300), (1, 200), (1, 5)],
    "batched decode": [(1, 70), (1, 33), (1, 5)],
}
# (heads, KV heads): 8 and 16 query heads to a KV head fill half a block of 16 rows and all of it, 2 leave room for 8
# queries.
_HEADS = {(8, 1): (512, 256, 128, 64), (4, 2): (512, 256), (16, 1): (512, 256)}
_WINDOW = 24


def problem(head_size: int, heads: int, kv_heads: int, phase: str) -> dict[str, Any]:
    """A Problem as JSON; layers with 256-wide heads have a window, as Gemma 4's do."""
    window = _WINDOW if head_size == 256 else 0
    about = {"phase": phase, "head_size": head_size, "heads": heads, "kv_heads": kv_heads}
    return about | {"window": window, "sequences": _SEQUENCES[phase]}


_CASES = [(size, *group, phase) for group, sizes in _HEADS.items() for size in sizes for phase in _SEQUENCES]
# What is wrong, where, and the problem that has to tell it.
_WRONG = {
    "reduction with another tile": (["reduce_segments", "TILE_SIZE", 16], (512, 8, 1, "decode")),
    "prefill that leaves out rows": (["kernel_unified_attention", "BLOCK_Q", 1], (512, 8, 1, "prefill")),
    "decode that leaves out rows": (["kernel_unified_attention", "BLOCK_M", -8], (512, 16, 1, "decode")),
    "window of one more": (["kernel_unified_attention", "SLIDING_WINDOW", 1], (256, 8, 1, "decode")),
    "window of one less": (["kernel_unified_attention", "SLIDING_WINDOW", -1], (256, 8, 1, "chunked prefill")),
}


@pytest.fixture(scope="module")
def computed(stock: Path, patched: Path, run: Run) -> dict[str, list[dict[str, Any]]]:
    """The reports of both trees, of all cases and then of all that is wrong, run as for capability 7.5."""
    runs: list[dict[str, Any]] = [{"problem": problem(*case), "altered": None} for case in _CASES]
    runs += [{"problem": problem(*case), "altered": altered} for altered, case in _WRONG.values()]
    asked: dict[str, Any] = {"capability": "7.5", "limit_bytes": 65536}
    trees = {
        "stock": {"tree": str(stock), **asked, "runs": runs[: len(_CASES)]},
        "patched": {"tree": str(patched), **asked, "runs": runs},
    }
    with ThreadPoolExecutor() as pool:
        reports = pool.map(lambda request: run("interpreted.py", request, {"TRITON_INTERPRET": "1"}), trees.values())
    return dict(zip(trees, reports, strict=True))


@pytest.mark.parametrize("tree", ["stock", "patched"])
@pytest.mark.parametrize("case", _CASES, ids=lambda case: " ".join(map(str, case)))
def test_the_numbers_are_right_to_float16s_rounding(
    computed: dict[str, list[dict[str, Any]]], case: tuple[int, int, int, str], tree: str
) -> None:
    found = computed[tree][_CASES.index(case)]
    assert found["of_bound"] <= 1, found


@pytest.mark.parametrize("wrong", _WRONG)
def test_what_is_wrong_is_told(computed: dict[str, list[dict[str, Any]]], wrong: str) -> None:
    found = computed["patched"][len(_CASES) + list(_WRONG).index(wrong)]
    # Hundreds of times the bound, or a row that nothing was written to.
    assert not found["of_bound"] <= 100, found


def test_the_patched_path_was_taken(computed: dict[str, list[dict[str, Any]]]) -> None:
    """FACTS: at 7.5 a 512-wide head's prefill has a tile of 32, and fits with one of 16."""
    at = _CASES.index((512, 8, 1, "prefill"))
    assert [computed[tree][at]["launches"][0]["tile"] for tree in ("stock", "patched")] == [32, 16]
