"""What the patch does to the host code: on Turing it fits, from 8.0 on nothing is another."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.launch_shapes import Shape, origin, shapes_for
from ansible.module_utils.patch_engine import apply
from ansible.module_utils.patch_registry import ATTENTION, FLEX, patches

from fleet.patch_trees import FIGURES, PATCHES
from tests.unit.test_patch_sources import FLEX_SOURCE, SOURCE, flex_blocks, launches, tiles

# A capability for which nothing was searched has upstream's shapes, with narrower tiles.
[PLAIN] = patches([])
CLAMPED = apply(SOURCE, PLAIN, ATTENTION)
PATCHED = apply(SOURCE, PATCHES[0], ATTENTION)
FLEX_PATCHED = apply(FLEX_SOURCE, PATCHES[0], FLEX)
TURING: tuple[tuple[int, int] | None, int] = ((7, 5), 65536)
OTHERS: list[tuple[tuple[int, int] | None, int]] = [((8, 6), 101376), ((8, 6), 65536), ((9, 0), 232448), (None, 0)]


def test_a_wide_head_is_clamped_on_turing_and_nowhere_else() -> None:
    # FACTS: head 512 at tile 32 asks for 98,304 bytes, at 16 for 65,536; head 256 at 32 for 49,152.
    assert tiles(CLAMPED, *TURING, 512) == {"prefill": 16, "reduce": 16}
    assert tiles(CLAMPED, *TURING, 256) == {"prefill": 32, "reduce": 16}
    for source in (CLAMPED, PATCHED):
        for head in (512, 256):
            for queries in (1, 40):
                # A byte threshold alone once sent 8.6 down the Turing path; the capability decides first.
                for device in OTHERS:
                    assert launches(source, *device, head, queries=queries) == launches(
                        SOURCE, *device, head, queries=queries
                    )


def test_a_device_that_does_not_tell_its_limit_gets_the_smallest_tile() -> None:
    for source in (CLAMPED, PATCHED):
        assert tiles(source, (7, 5), None, 256) == {"prefill": 16, "reduce": 16}
        # An 8-bit tile must be at least 32 wide, by upstream's own comment.
        assert tiles(source, (7, 5), None, 512, element_size=1) == {"prefill": 32, "reduce": 16}


def test_a_tile_at_the_very_limit_stays() -> None:
    for source in (CLAMPED, PATCHED):
        assert tiles(source, (7, 0), 98304, 512) == {"prefill": 32, "reduce": 16}
        assert tiles(source, (7, 0), 98303, 512) == {"prefill": 16, "reduce": 16}


@pytest.mark.parametrize("queries", [1, 40], ids=["decode", "prefill"])
@pytest.mark.parametrize(("group", "rows"), [(1, 8), (8, 8), (9, 16), (16, 16)])
def test_a_block_holds_all_query_heads_of_a_kv_head(queries: int, group: int, rows: int) -> None:
    found = launches(PATCHED, *TURING, 512, group=group, queries=queries)
    # FACTS: 8 rows where at most 8 query heads share a KV head; the grid follows.
    assert (found["rows"], found["blocks"]) == (rows, 100 // (rows // group))
    assert found["prefill"] == found["reduce"] == 16


def test_more_heads_than_a_shape_was_found_for_are_clamped() -> None:
    found = launches(PATCHED, *TURING, 512, group=32)
    assert (found["rows"], found["warps"], found["prefill"]) == (32, None, 16)


def test_the_reduction_has_the_tile_of_the_attention() -> None:
    [wide_tile] = patches([Shape((7, 5), "decode", 256, 2, 8, 32, 4, 40960)])
    source = apply(SOURCE, wide_tile, ATTENTION)
    assert tiles(source, *TURING, 256, queries=1) == {"prefill": 32, "reduce": 32}


def test_a_shape_that_asks_for_more_than_the_device_has_is_not_taken() -> None:
    assert launches(PATCHED, (7, 5), 65535, 512, group=16)["warps"] is None
    assert launches(PATCHED, (7, 5), 65536, 512, group=16)["warps"] == 4


def test_the_shapes_are_those_of_their_capability_alone() -> None:
    assert launches(PATCHED, (7, 0), 98304, 512) == launches(CLAMPED, (7, 0), 98304, 512)


@pytest.mark.parametrize(
    ("head", "blocks", "want"),
    [(512, (32, 32), (16, 16)), (512, (16, 16), (16, 16)), (512, (16, 32), (16, 16)), (256, (32, 32), (32, 32)),
     (256, (64, 64), (32, 32)), (128, (64, 64), (64, 64)), (512, (16, 256), (16, 16)), (512, (1, 16), (1, 16))],
)  # fmt: skip
def test_flex_blocks_are_halved_until_they_fit(head: int, blocks: tuple[int, int], want: tuple[int, int]) -> None:
    assert flex_blocks(FLEX_PATCHED, *TURING, head, blocks) == want
    for device in OTHERS:
        assert flex_blocks(FLEX_PATCHED, *device, head, blocks) == blocks


def test_in_float32_more_is_staged() -> None:
    """Without a window 256-wide heads ask for 81,920 bytes at tile 32 and 49,152 at 16 (Triton 3.7.1, vLLM 0.33.0)."""
    assert tiles(PATCHED, *TURING, 256, element_size=4) == {"prefill": 16, "reduce": 16}
    assert tiles(PATCHED, *TURING, 128, element_size=4) == {"prefill": 32, "reduce": 16}
    # Flex: 51,200 bytes at (16, 32), and 4 * BLOCK_M * BLOCK_N more than in float16 at (32, 32).
    assert flex_blocks(FLEX_PATCHED, *TURING, 256, (32, 32), element_size=4) == (16, 32)
    assert flex_blocks(FLEX_PATCHED, *TURING, 256, (32, 32)) == (32, 32)
    assert flex_blocks(FLEX_PATCHED, *TURING, 32, (128, 128), element_size=4) == (64, 128)


def test_a_flex_block_set_by_hand_stands() -> None:
    assert flex_blocks(FLEX_PATCHED, *TURING, 512, (32, 32), by_hand=64) == (64, 16)


def report(rows: list[tuple[str, int, int, int, float | None]], **more: object) -> dict[str, object]:
    """A search's report: phase, BLOCK_M, warps, shared bytes and time of shapes with tile 16 at head 512."""
    shapes = [
        {"head_size": 512, "dtype": "float16", "phase": phase, "block_m": block_m, "tile": 16, "warps": warps,
         "shared_bytes": shared, "us": {} if us is None else {"a": us, "b": 2 * us}, "stock": False}
        for phase, block_m, warps, shared, us in rows
    ]  # fmt: skip
    return {"limit_bytes": 65536, "lowered_for": "7.5", "gpu": "card", "shapes": shapes, **more}


def chosen(rows: list[tuple[str, int, int, int, float | None]]) -> list[tuple[int, int]]:
    found = shapes_for({"capabilities": {"7.5": report(rows)}})
    return [(shape.rows, shape.warps) for shape in found]


def test_the_fastest_that_fits_is_taken_for_each_number_of_rows() -> None:
    reported = ("decode", 16, 4, 65536, 100.0)
    assert chosen([reported, ("decode", 8, 4, 49152, 65.0), ("decode", 8, 2, 49152, 50.0)]) == [(8, 2), (16, 4)]
    assert chosen([reported, ("decode", 8, 2, 65537, 50.0)]) == []
    assert chosen([reported, ("decode", 8, 2, 49152, None)]) == []
    # A gain of less than a tenth is noise, and without the field report's shape nothing is compared.
    assert chosen([reported, ("decode", 8, 2, 49152, 91.0)]) == []
    assert chosen([("decode", 8, 2, 49152, 50.0)]) == []


def test_a_shape_that_is_slower_in_one_problem_is_not_taken() -> None:
    data = report([("decode", 16, 4, 65536, 100.0), ("decode", 8, 2, 49152, 10.0)])
    data["shapes"][1]["us"]["b"] = 201.0  # type: ignore[index]
    assert shapes_for({"capabilities": {"7.5": data}}) == []


def test_what_a_host_measured_itself_stands_before() -> None:
    figures = {"capabilities": {"7.5": report([("decode", 16, 4, 65536, 100.0), ("decode", 8, 2, 49152, 50.0)])}}
    own = report([("decode", 16, 4, 65536, 100.0), ("decode", 8, 4, 49152, 50.0)], gpu="NVIDIA T4G")
    assert [shape.warps for shape in shapes_for(figures)] == [2, 4]
    assert [shape.warps for shape in shapes_for(figures, own)] == [4, 4]
    assert "untried on such a card" in origin(figures, "7.5")
    assert origin(figures, "7.5", own) == "launch shapes timed on this host's NVIDIA T4G"
    assert "no launch shape was searched" in origin(figures, "7.0", own)
    # One that timed nothing, and one of another capability, say nothing.
    assert shapes_for(figures, report([("decode", 8, 4, 49152, None)])) == shapes_for(figures)
    assert "untried" in origin(figures, "7.5", {**own, "lowered_for": "7.0"})
    # Neither does what somebody else put there.
    for part in ("limit_bytes", "shapes", "gpu", "lowered_for"):
        assert shapes_for(figures, {key: value for key, value in own.items() if key != part}) == shapes_for(figures)


def test_the_figures_hold_what_the_issue_asks_of_them() -> None:
    """On the lowering: decode at 16,000 at most 0.7 of the field report's shape, prefill no slower than it."""
    data = json.loads(FIGURES.read_text())["capabilities"]["7.5"]
    wide = {(row["phase"], row["block_m"], row["tile"], row["warps"]): row for row in data["shapes"]
            if (row["head_size"], row["dtype"]) == (512, "float16")}  # fmt: skip
    best = {shape.phase: wide[shape.phase, shape.rows, shape.tile, shape.warps]
            for shape in reversed(shapes_for({"capabilities": {"7.5": data}})) if shape.head_size == 512}  # fmt: skip
    problem = "decode at 16,000"
    assert best["decode"]["us"][problem] <= 0.7 * wide["decode", 16, 16, 4]["us"][problem]
    for problem, us in wide["prefill", 16, 16, 4]["us"].items():
        assert best["prefill"]["us"][problem] <= us
    assert all(row["shared_bytes"] < 65536 for row in best.values())
