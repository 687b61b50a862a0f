"""Which launch shapes the attention kernels get below capability 8.0, from what was compiled and timed. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The field report's shape, which all others have to beat: rows of a block, tile, warps.
REPORTED = (16, 16, 4)
# A shape is taken for its speed only where it saves at least this share of the time: less is noise between cards.
_LEAST_GAIN = 0.1
_ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Shape:
    """One launch shape of one kernel: `rows` is BLOCK_M, `shared` what the compiler says it asks for, bytes."""

    phase: str
    head_size: int
    element_bytes: int
    rows: int
    tile: int
    warps: int
    shared: int


def shapes_for(
    figures: Mapping[str, Any], capability: str, limit_bytes: int, measured: Mapping[str, Any] | None = None
) -> tuple[list[Shape], str]:
    """The shapes to use and where they come from, in words.

    Args:
        figures: `launch_shapes.json`: per capability the report of `shape_search.py`.
        capability: of the GPU.
        limit_bytes: its opt-in shared memory per block.
        measured: report of `shape_search.py` from the host itself, taken where it is of this capability and timed.
    """
    own = measured or {}
    if own.get("lowered_for") == capability and any(row["us"] for row in own.get("shapes", ())):
        return chosen(own["shapes"], limit_bytes), f"launch shapes timed on this host's {own['gpu']}"
    known = figures.get("capabilities", {}).get(capability)
    if not known:
        return [], f"no launch shape was searched for capability {capability}: upstream's own, with narrower tiles"
    source = f"launch shapes timed on an {known['gpu']} with code lowered for {capability}, not on such a card"
    return chosen(known["shapes"], limit_bytes), source


def chosen(candidates: Sequence[Mapping[str, Any]], limit_bytes: int) -> list[Shape]:
    """The shapes to use, best first for each phase, head size and type.

    Args:
        candidates: `phase`, `head_size` (a power of 2), `dtype`, `block_m`, `tile`, `warps`, `shared_bytes`, `us`
            (median time of each problem, empty where it was not timed) and `stock` (whether it is upstream's own).
        limit_bytes: opt-in shared memory per block.

    Returns:
        For each number of rows the fastest that fits and is slower than upstream's own (where that does not fit, than
        the field report's) in no problem. A phase, head size and type is left out where none saves a tenth of its time.
    """
    groups: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for row in candidates:
        if row["us"] and row["shared_bytes"] <= limit_bytes:
            groups.setdefault((row["phase"], row["head_size"], _ELEMENT_BYTES[row["dtype"]]), []).append(row)
    found = []
    for (phase, head, size), rows in sorted(groups.items()):
        known = [row for row in rows if row["stock"]] or [row for row in rows if _shape(row) == REPORTED]
        if not known:
            continue
        cost = {_shape(row): _cost(row, known[0]) for row in rows}
        best = {}
        for row in sorted(rows, key=lambda row: cost[_shape(row)]):
            best.setdefault(row["block_m"], row)
        if min(cost.values()) > 1 - _LEAST_GAIN:
            continue
        order = sorted(best.values(), key=lambda row: cost[_shape(row)])
        found += [Shape(phase, head, size, *_shape(row), int(row["shared_bytes"])) for row in order]
    return found


def table(shapes: Sequence[Shape]) -> dict[tuple[str, int, int], tuple[tuple[int, int, int, int], ...]]:
    """(phase, head size, bytes of an element) to the shapes (rows, tile, warps, shared bytes), best first."""
    found: dict[tuple[str, int, int], tuple[tuple[int, int, int, int], ...]] = {}
    for shape in shapes:
        key = (shape.phase, shape.head_size, shape.element_bytes)
        found[key] = (*found.get(key, ()), (shape.rows, shape.tile, shape.warps, shape.shared))
    return found


def _cost(row: Mapping[str, Any], known: Mapping[str, Any]) -> float:
    """Time as a share of the known shape's: the mean over the problems, but the worst where one is slower."""
    shares = [row["us"][problem] / known["us"][problem] for problem in known["us"]]
    worst = max(shares)
    return worst if worst > 1 else math.prod(shares) ** (1 / len(shares))


def _shape(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return (int(row["block_m"]), int(row["tile"]), int(row["warps"]))
