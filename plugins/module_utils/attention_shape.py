"""A model's attention as the compile check takes it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ansible.module_utils.model_decisions import NO_FLOAT16

# vLLM's default number of tokens in a block of the KV cache (CacheConfig, 0.26.0 to 0.33.0).
_BLOCK_SIZE = 16


def below_8(model_type: str, attention: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The shape to compile for a GPU below capability 8.0, which has no bfloat16.

    Args:
        model_type: as in `config.json`.
        attention: `[head size, query heads, KV heads, sliding window]` of each kind of layer, 0 for no window.

    Returns:
        `{"dtype", "block_size", "layers": [{"head_size", "heads", "kv_heads", "sliding_window"}]}`.
    """
    names = ("head_size", "heads", "kv_heads", "sliding_window")
    return {
        "dtype": "float32" if model_type in NO_FLOAT16 else "float16",
        "block_size": _BLOCK_SIZE,
        "layers": [dict(zip(names, [*layer, 0][:4], strict=True)) for layer in attention],
    }
