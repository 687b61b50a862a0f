"""The names that the kernel patch is put between, in the order in which vLLM's attention host code has them."""

from __future__ import annotations

torch, triton, current_platform = None, None, None


def _get_tile_size(head_size: int, *, is_prefill: bool) -> int:
    return 32 if is_prefill and head_size else 16


def unified_attention(q: object, head_size: int, num_queries_per_kv: int, max_seqlen_q: int) -> tuple[object, ...]:
    """What would be launched."""
    launch_num_warps = None
    BLOCK_M = 16 if num_queries_per_kv <= 16 else 32  # noqa: N806
    BLOCK_Q = BLOCK_M // num_queries_per_kv  # noqa: N806
    total_num_q_blocks = max_seqlen_q // BLOCK_Q
    TILE_SIZE_PREFILL = _get_tile_size(head_size, is_prefill=True)  # noqa: N806
    TILE_SIZE_DECODE = _get_tile_size(head_size, is_prefill=False)  # noqa: N806
    use_3d = q is None
    return BLOCK_M, total_num_q_blocks, launch_num_warps, TILE_SIZE_DECODE if use_3d else TILE_SIZE_PREFILL
