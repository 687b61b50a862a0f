"""Attention as vLLM will launch it on each GPU: heads, type, blocks, and the least shared memory it asks for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible.module_utils.host_plan import Wishes

# vLLM's own on CUDA (config/cache.py, the same in 0.26.0 to 0.33.0).
_BLOCK_SIZE = 16
# Rows of a block: the fewest that vLLM takes, and the fewest that the patch does (FACTS, "The kernel patch").
_ROWS, _PATCHED_ROWS = 16, 8


def attention_shape(attention: Iterable[Sequence[int]], dtype: str, wishes: Wishes) -> dict[str, Any]:
    """What the kernel check compiles for.

    Args:
        attention: the kinds of layers of a model, each `[head size, query heads, KV heads, window]`, a window of 0
            for none.
        dtype: the type that the model is computed in, `float16`, `bfloat16` or `float32`.
        wishes: the server's arguments, of which `--block-size` and `--tensor-parallel-size` count.

    Returns:
        `{"dtype", "block_size", "layers": [{"head_size", "heads", "kv_heads", "sliding_window"}]}` of one GPU, the
        widest heads first; nothing where the model's attention is not known. A GPU has at least one KV head, which
        several then keep in copy. `block_size` is that of the widest heads, tokens.
    """
    gpus = wishes.number(1, "--tensor-parallel-size", "-tp")
    layers = {
        (head, max(1, heads // gpus), max(1, kv_heads // gpus), window) for head, heads, kv_heads, window in attention
    }
    if not layers:
        return {}
    ordered = sorted(layers, key=lambda layer: (-layer[0], layer[1:]))
    keys = ("head_size", "heads", "kv_heads", "sliding_window")
    return {
        "dtype": dtype,
        "block_size": _block_size(ordered, wishes.number(_BLOCK_SIZE, "--block-size")),
        "layers": [dict(zip(keys, layer, strict=True)) for layer in ordered],
    }


def _block_size(layers: Sequence[tuple[int, int, int, int]], asked: int) -> int:
    """Tokens in a KV cache block of the first of the layers.

    Where layers differ in their window, their blocks are made equal in bytes: those with fewer bytes a token get more
    tokens, where that comes out even (`unify_kv_cache_spec_page_size`, 0.26.0 to 0.33.0). So with Gemma 4 E2B 512-wide
    heads have blocks of 16 and 256-wide ones of 32, with 31B it is the other way round. The block size moves registers,
    and no shared memory: at 16, 32, 64 and 528 tokens heads of 128, 256 and 512 ask for the same (Triton 3.7.1).
    """
    widths = [head * kv_heads for head, _, kv_heads, _ in layers]
    times, rest = divmod(max(widths), widths[0])
    return asked * times if len({window for *_, window in layers}) > 1 and not rest else asked


def least_bytes(
    figures: Sequence[Mapping[str, Any]], head_size: int, heads: int, kv_heads: int, dtype: str
) -> int | None:
    """Shared memory per block without which the attention kernel cannot be launched, bytes; None where no figure says.

    Figures are of layers without a window. One changes nothing in float16. In float32 it saves up to a third, and
    none of the launches that 65,536 bytes refuse (Triton 3.7.1, heads of 64 to 512, 16 to 128 rows).

    Args:
        figures: what the compiler said for one capability, of each launch shape `head_size` (a power of 2), `dtype`,
            `phase`, `block_m` and `shared_bytes` (`roles/triton_patch/files/launch_shapes.json`).
        head_size: width of the heads.
        heads: query heads.
        kv_heads: KV heads, among which the query heads are shared out.
        dtype: type that the model is computed in.
    """
    group, width = -(-heads // kv_heads), _power_of_2(head_size)
    rows = {max(_ROWS, _power_of_2(group))} | ({_PATCHED_ROWS} if group <= _PATCHED_ROWS else set())
    least: dict[str, int] = {}
    for shape in figures:
        if (shape["head_size"], shape["dtype"]) == (width, dtype) and shape["block_m"] in rows:
            phase, asked = shape["phase"], int(shape["shared_bytes"])
            least[phase] = min(asked, least.get(phase, asked))
    return max(least.values(), default=None)


def largest_group(figures: Sequence[Mapping[str, Any]], head_size: int, dtype: str, limit_bytes: int) -> int:
    """The most query heads that can share a KV head of that width within a limit, by the figures; 0 for none."""
    rows = {int(shape["block_m"]) for shape in figures}
    asked = {group: least_bytes(figures, head_size, group, 1, dtype) for group in rows}
    return max((group for group, least in asked.items() if least is not None and least <= limit_bytes), default=0)


def _power_of_2(number: int) -> int:
    """The next power of 2 that is not smaller."""
    return 1 << (number - 1).bit_length()
