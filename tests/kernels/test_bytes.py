"""From capability 8.0 on the patch changes nothing: the compiled code is the stock one's to the byte."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.patch_registry import ATTENTION

from tests.kernels.conftest import Run, copied

# Shared memory that a block may ask for, bytes: 163, 99, 99 and 227 KB by NVIDIA's tuning guides for Ampere, Ada and
# Hopper.
_LIMITS = {"8.0": 166_912, "8.6": 101_376, "8.9": 101_376, "9.0": 232_448}
_SEQUENCES = {
    "prefill": [(40, 40)],
    "chunked prefill": [(24, 300)],
    "decode": [(1, 300)],
    "batched decode": [(1, 300), (1, 40)],
}
_WINDOWS = {512: 0, 256: 512}
_PROBLEMS = [
    {"phase": phase, "head_size": size, "heads": 8, "kv_heads": 1, "window": window, "sequences": sequences}
    for size, window in _WINDOWS.items()
    for phase, sequences in _SEQUENCES.items()
]
_LAUNCHED = [
    (size, phase, kernel)
    for size in _WINDOWS
    for phase in _SEQUENCES
    for kernel in ("kernel_unified_attention", *(["reduce_segments"] if phase == "decode" else []))
]


_PLACE = ("capability", "head_size", "phase", "kernel")
# ptxas writes the size and the time of the source into the line table: all are made the same.
_SOURCE_BYTES, _SOURCE_TIME = 100_000, (0, 0)


def put(source: bytes, tree: Path) -> None:
    """Puts the attention module into the tree. All stand in one place, since the code carries its name too."""
    assert len(source) < _SOURCE_BYTES
    (tree / ATTENTION).write_bytes(source.ljust(_SOURCE_BYTES, b"#"))
    os.utime(tree / ATTENTION, _SOURCE_TIME)


@pytest.fixture(scope="module")
def tree(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the stock tree, to put sources into."""
    return copied(stock, tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def compiled(stock: Path, patched: Path, tree: Path, run: Run) -> dict[str, list[dict[str, Any]]]:
    """Every launch before and after the patch, for every capability, half of them in one process."""
    targets = list(_LIMITS.items())
    requests = [{"tree": str(tree), "targets": half, "problems": _PROBLEMS} for half in (targets[:2], targets[2:])]
    found = {}
    for name, one in (("stock", stock), ("patched", patched)):
        put((one / ATTENTION).read_bytes(), tree)
        with ThreadPoolExecutor() as pool:
            reports = pool.map(lambda request: run("compiled.py", request, {}), requests)
        found[name] = [launch for report in reports for launch in report]
    return found


@pytest.mark.parametrize("capability", _LIMITS)
def test_the_code_is_the_same_to_the_byte(compiled: dict[str, list[dict[str, Any]]], capability: str) -> None:
    stock, patched = ([one for one in compiled[name] if one["capability"] == capability] for name in compiled)
    assert [(one["head_size"], one["phase"], one["kernel"]) for one in stock] == _LAUNCHED
    assert patched == stock


def test_one_line_more_above_the_kernels_is_seen(
    compiled: dict[str, list[dict[str, Any]]], stock: Path, tree: Path, run: Run
) -> None:
    """The code carries line numbers, so that its digest tells even what changes no instruction."""
    problem = next(one for one in _PROBLEMS if one["phase"] == "decode" and one["head_size"] == 256)
    put(b"#\n" + (stock / ATTENTION).read_bytes(), tree)
    moved = run("compiled.py", {"tree": str(tree), "targets": [("8.0", _LIMITS["8.0"])], "problems": [problem]}, {})
    assert [one["kernel"] for one in moved] == ["kernel_unified_attention", "reduce_segments"]
    for after in moved:
        [before] = [one for one in compiled["stock"] if all(one[key] == after[key] for key in _PLACE)]
        assert before["ptx"] != after["ptx"]
        assert before["cubin"] != after["cubin"]
