"""Flex attention as inductor writes it, compiled for 7.5: upstream's blocks and the patched ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet.patch_check import FLEX_CHECKER
from tests.kernels.conftest import Run

from ansible.module_utils.patch_registry import FLEX  # isort: skip

# A KV cache block of 32 tokens, as Gemma 4 31B's wide layers have: the block of the kernel is (16, 32).
_SHAPE = {
    "dtype": "float16",
    "block_size": 32,
    "layers": [
        {"head_size": 512, "heads": 8, "kv_heads": 1, "sliding_window": 0},
        {"head_size": 256, "heads": 8, "kv_heads": 1, "sliding_window": 512},
    ],
}


@pytest.fixture(scope="module")
def launches(stock: Path, patched: Path, run: Run) -> dict[str, list[dict[str, Any]]]:
    """The launches of the stock and the patched tree."""
    asked = {"capability": "7.5", "limit_bytes": 65536, "shape": _SHAPE, "site_packages": str(stock)}
    return {
        name: run(FLEX_CHECKER, {**asked, "sources": {FLEX: str(tree / FLEX)}}, {})["launches"]
        for name, tree in (("stock", stock), ("patched", patched))
    }


def test_upstreams_blocks_do_not_fit_a_wide_head_and_the_patched_do(launches: dict[str, list[dict[str, Any]]]) -> None:
    # Measured: 4 * (BLOCK_M + BLOCK_N) * head bytes, with Triton 3.6.0, 3.7.1 and 3.8.0. vLLM #39018 wants (16, 16).
    for name, wide in (("stock", (16, 32, 98304)), ("patched", (16, 16, 65536))):
        sizes = [(row["head_size"], row["block_m"], row["tile"], row["shared_bytes"]) for row in launches[name]]
        assert sizes == [(512, *wide)] * 2 + [(256, 16, 32, 49152)] * 2
        assert [row["phase"] for row in launches[name]] == ["prefill", "decode"] * 2
