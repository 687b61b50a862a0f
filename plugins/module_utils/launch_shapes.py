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

    capability: tuple[int, int]
    phase: str
    head_size: int
    element_bytes: int
    rows: int
    tile: int
    warps: int
    shared: int


def shapes_for(figures: Mapping[str, Any], measured: Mapping[str, Any] | None = None) -> list[Shape]:
    """The shapes to use, of every capability.

    Args:
        figures: `launch_shapes.json`: per capability the report of `shape_search.py`.
        measured: report of `shape_search.py` from the host itself, which stands before the other of its capability.
    """
    reports = {**figures.get("capabilities", {}), **(_timed(measured) or {})}
    return [shape for capability, report in sorted(reports.items()) for shape in chosen(capability, report)]


def origin(figures: Mapping[str, Any], capability: str, measured: Mapping[str, Any] | None = None) -> str:
    """Where the shapes for a capability come from, in words."""
    if capability in (_timed(measured) or {}):
        return f"launch shapes timed on this host's {(measured or {})['gpu']}"
    known = figures.get("capabilities", {}).get(capability)
    if not known:
        return f"no launch shape was searched for capability {capability}: upstream's own, with narrower tiles"
    return f"launch shapes timed on an {known['gpu']} with code lowered for {capability}, untried on such a card"


def _timed(measured: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The host's own report by its capability, None where it timed nothing or is no whole report."""
    if measured and measured.keys() >= {"lowered_for", "limit_bytes", "gpu", "shapes"}:
        return {str(measured["lowered_for"]): measured} if any(row["us"] for row in measured["shapes"]) else None
    return None


def chosen(capability: str, report: Mapping[str, Any]) -> list[Shape]:
    """The shapes of one capability, best first for each phase, head size and type.

    Args:
        capability: major.minor.
        report: `limit_bytes` and `shapes`: `phase`, `head_size` (a power of 2), `dtype`, `block_m`, `tile`, `warps`,
            `shared_bytes`, `us` (median time of each problem, empty where it was not timed) and `stock` (whether it is
            upstream's own).

    Returns:
        For each number of rows the fastest that fits. A phase, head size and type is left out where none saves a
        tenth of the time of upstream's own shape (where that does not fit, of the field report's).
    """
    groups: dict[tuple[str, int, int], list[Mapping[str, Any]]] = {}
    for row in report["shapes"]:
        if row["us"] and row["shared_bytes"] <= report["limit_bytes"]:
            groups.setdefault((row["phase"], row["head_size"], _ELEMENT_BYTES[row["dtype"]]), []).append(row)
    major, minor = (int(part) for part in capability.split("."))
    found = []
    for (phase, head, size), rows in sorted(groups.items()):
        known = [row for row in rows if row["stock"]] or [row for row in rows if _shape(row) == REPORTED]
        cost = {_shape(row): _cost(row, known[0]) for row in rows if known}
        if not cost or min(cost.values()) > 1 - _LEAST_GAIN:
            continue
        best: dict[int, Mapping[str, Any]] = {}
        for _, row in sorted(((cost[_shape(row)], row) for row in rows), key=lambda pair: pair[0]):
            best.setdefault(int(row["block_m"]), row)
        found += [
            Shape((major, minor), phase, head, size, *_shape(row), int(row["shared_bytes"])) for row in best.values()
        ]
    return found


Key = tuple[tuple[int, int], str, int, int]


def table(shapes: Sequence[Shape]) -> dict[Key, tuple[tuple[int, int, int, int], ...]]:
    """(capability, phase, head size, bytes of an element) to (rows, tile, warps, shared bytes), best first."""
    found: dict[Key, tuple[tuple[int, int, int, int], ...]] = {}
    for shape in shapes:
        key = (shape.capability, shape.phase, shape.head_size, shape.element_bytes)
        found[key] = (*found.get(key, ()), (shape.rows, shape.tile, shape.warps, shape.shared))
    return found


def _cost(row: Mapping[str, Any], known: Mapping[str, Any]) -> float:
    """Time as a share of the known shape's: the geometric mean over the problems, but the worst where one is slower."""
    shares = [float(row["us"][problem]) / float(known["us"][problem]) for problem in known["us"]]
    worst = max(shares)
    return worst if worst > 1 else math.prod(shares) ** (1 / len(shares))


def _shape(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return (int(row["block_m"]), int(row["tile"]), int(row["warps"]))
