"""The shape of vLLM's attention host code as it stands in 0.26.0 to 0.33.0, in our own few lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

SOURCE = """\
torch, triton, current_platform = WORLD


def _get_tile_size(head, window, size, is_prefill):
    return 32 if is_prefill else 16


def unified_attention(q, k, head_size, num_queries_per_kv, max_seqlen_q):
    BLOCK_M = 16 if num_queries_per_kv <= 16 else 32
    BLOCK_Q = BLOCK_M // num_queries_per_kv
    launch_num_warps = None
    if q is None:
        BLOCK_M = 32
        BLOCK_Q = BLOCK_M // num_queries_per_kv
    total_num_q_blocks = 100 // BLOCK_Q
    TILE_SIZE_PREFILL = _get_tile_size(head_size, 0, 2, is_prefill=True)
    TILE_SIZE_DECODE = _get_tile_size(head_size, 0, 2, is_prefill=False)
    use_td = False
    if use_td:
        TILE_SIZE_PREFILL = min(TILE_SIZE_PREFILL, 16)
        TILE_SIZE_DECODE = min(TILE_SIZE_DECODE, 16)
    use_3d = not use_td
    kernel(BLOCK_M, total_num_q_blocks, launch_num_warps, TILE_SIZE=TILE_SIZE_PREFILL)
    reduce_segments(TILE_SIZE=TILE_SIZE_DECODE)
"""
UPSTREAM_FIX = SOURCE.replace("return 32 if is_prefill else 16", "return 16")
FLEX_SOURCE = """\
torch, current_platform = FLEX_WORLD


def get_kernel_options(query, block_m, block_n, direct):
    return {"BLOCK_M": block_m, "BLOCK_N": block_n}


class FlexAttentionImpl:
    def __init__(self, head_size, block_m):
        self.head_size, self.block_m = head_size, block_m

    def forward(self, query, block_m, block_n):
        kernel_options = get_kernel_options(query, block_m, block_n, False)
        if self.block_m is not None:
            kernel_options["BLOCK_M"] = self.block_m
        return flex(kernel_options)
"""
FLEX_FIX = FLEX_SOURCE.replace('"BLOCK_M": block_m, "BLOCK_N": block_n', '"BLOCK_M": 16, "BLOCK_N": 16')
SOURCES = {
    "vllm/v1/attention/ops/triton_unified_attention.py": SOURCE,
    "vllm/v1/attention/backends/flex_attention.py": FLEX_SOURCE,
}


def world(capability: tuple[int, int] | None, limit: int | None) -> tuple[Any, Any]:
    """torch and vLLM's platform on such a device; a limit of None leaves the attribute out, as old torch does."""
    told = {} if limit is None else {"shared_memory_per_block_optin": limit}
    cuda = SimpleNamespace(get_device_properties=lambda _device: SimpleNamespace(**told))
    return SimpleNamespace(cuda=cuda), SimpleNamespace(get_device_capability=lambda: capability)


def launches(
    source: str, capability: tuple[int, int] | None, limit: int | None, head: int, *,
    element_size: int = 2, group: int = 8, queries: int = 40,
) -> dict[str, Any]:  # fmt: skip
    """What the host code hands to its kernels on such a device: rows, blocks, warps, tile, and the reduction's tile."""
    seen: dict[str, Any] = {}

    def kernel(rows: int, blocks: int, warps: int | None, TILE_SIZE: int) -> None:  # noqa: N803
        seen.update(rows=rows, blocks=blocks, warps=warps, prefill=TILE_SIZE)

    torch, platform = world(capability, limit)
    triton = SimpleNamespace(next_power_of_2=lambda number: 1 << (number - 1).bit_length())
    scope: dict[str, Any] = {
        "WORLD": (torch, triton, platform),
        "kernel": kernel,
        "reduce_segments": lambda TILE_SIZE: seen.update(reduce=TILE_SIZE),  # noqa: N803
    }
    exec(source, scope)  # noqa: S102
    query = SimpleNamespace(device="cuda:0", element_size=lambda: element_size)
    scope["unified_attention"](query, None, head, group, queries)
    return seen


def tiles(source: str, capability: tuple[int, int] | None, limit: int | None, head: int, **more: int) -> dict[str, int]:
    """The tiles of the attention and of the reduction."""
    found = launches(source, capability, limit, head, **more)
    return {name: found[name] for name in ("prefill", "reduce")}


def flex_blocks(
    source: str, capability: tuple[int, int] | None, limit: int | None, head: int, blocks: tuple[int, int],
    by_hand: int | None = None, element_size: int = 2,
) -> tuple[int, int]:  # fmt: skip
    """The blocks that Flex's host code hands to its kernel, where these are the logical ones."""
    seen: dict[str, int] = {}
    scope: dict[str, Any] = {"FLEX_WORLD": world(capability, limit), "flex": seen.update}
    exec(source, scope)  # noqa: S102
    scope["FlexAttentionImpl"](head, by_hand).forward(
        SimpleNamespace(device="cuda:0", element_size=lambda: element_size), *blocks
    )
    return seen["BLOCK_M"], seen["BLOCK_N"]
