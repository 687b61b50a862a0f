"""Which launch shapes the attention kernels get below capability 8.0, from what was compiled and timed. Pure."""

from __future__ import annotations

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


def chosen(candidates: Sequence[Mapping[str, Any]], limit_bytes: int) -> list[Shape]:
    """The shapes to use, best first for each phase, head size and type.

    Args:
        candidates: rows of `launch_shapes.json` or of a host's own measurement: `phase`, `head_size` (a power of 2),
            `dtype`, `block_m`, `tile`, `warps`, `shared_bytes` and `us` (median time, None where it was not timed).
        limit_bytes: opt-in shared memory per block.

    Returns:
        For each number of rows the fastest that fits. A phase, head size and type is left out where upstream's own
        shape fits and none saves a tenth of its time.
    """
    groups: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for row in candidates:
        if row["us"] is not None and row["shared_bytes"] <= limit_bytes:
            groups.setdefault((row["phase"], row["head_size"], _ELEMENT_BYTES[row["dtype"]]), []).append(row)
    found = []
    for (phase, head, size), rows in sorted(groups.items()):
        best = {rows_of: min(same, key=_us) for rows_of, same in _by_rows(rows).items()}
        reported = next((row for row in rows if _shape(row) == REPORTED), None)
        stock = next((row for row in rows if row.get("stock")), reported)
        if stock is None or min(map(_us, best.values())) > (1 - _LEAST_GAIN) * _us(stock):
            continue
        found += [
            Shape(phase, head, size, *_shape(row), int(row["shared_bytes"])) for row in sorted(best.values(), key=_us)
        ]
    return found


def table(shapes: Sequence[Shape]) -> dict[tuple[str, int, int], tuple[tuple[int, int, int, int], ...]]:
    """(phase, head size, bytes of an element) to the shapes (rows, tile, warps, shared bytes), best first."""
    found: dict[tuple[str, int, int], tuple[tuple[int, int, int, int], ...]] = {}
    for shape in shapes:
        key = (shape.phase, shape.head_size, shape.element_bytes)
        found[key] = (*found.get(key, ()), (shape.rows, shape.tile, shape.warps, shape.shared))
    return found


def _us(row: Mapping[str, Any]) -> float:
    return float(row["us"])


def _shape(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return (int(row["block_m"]), int(row["tile"]), int(row["warps"]))


def _by_rows(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(int(row["block_m"]), []).append(row)
    return found
