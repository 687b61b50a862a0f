"""The source patches this fleet knows, each with its reason and what would end it."""

from __future__ import annotations

from collections.abc import Sequence

from ansible.module_utils.launch_shapes import Shape, table
from ansible.module_utils.patch_engine import Edit, Patch

ATTENTION = "vllm/v1/attention/ops/triton_unified_attention.py"
FLEX = "vllm/v1/attention/backends/flex_attention.py"
# Every version on the package index from the first on whose sources were read.
_SHOWN_ON = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.34.0")

# Below 8.0 Triton stages operands as float32 whatever their type, hence 4 bytes; the compiler has the last word. A
# device that does not tell its limit gets the smallest tile. 8-bit types need a tile of 32.
_FUNCTIONS = '''\
# (capability, phase, head size, bytes of an element): launch shapes (BLOCK_M, tile, warps, shared bytes), best first.
_FLEET_SHAPES = {{
{rows}
}}


def _fleet_limit(device):
    """Shared memory that a block may ask for, bytes, below capability 8.0; None from there on."""
    capability = current_platform.get_device_capability()
    if capability is None or capability[0] >= 8:
        return None
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def _fleet_shape(q, head_size, queries_per_kv, max_seqlen_q):
    """(BLOCK_M, tile, warps) of the best launch shape that fits, None where upstream's own is to be taken."""
    limit = _fleet_limit(q.device)
    if limit is None:
        return None
    major, minor = current_platform.get_device_capability()
    phase = "decode" if max_seqlen_q == 1 else "prefill"
    key = ((major, minor), phase, triton.next_power_of_2(head_size), q.element_size())
    for *shape, shared in _FLEET_SHAPES.get(key, ()):
        if shape[0] >= queries_per_kv and shared <= limit:
            return shape
    return None


def _fleet_tile(tile, rows, head_size, q):
    """The tile, halved until its block fits; unchanged from capability 8.0 on."""
    limit = _fleet_limit(q.device)
    least = 16 if q.element_size() >= 2 else 32
    row_bytes = 4 * triton.next_power_of_2(head_size)
    # Keys and values of float32 are staged both.
    staged = 2 if q.element_size() == 4 else 1
    while limit is not None and tile > least and (rows + staged * tile) * row_bytes > limit:
        tile //= 2
    return tile


'''
_ROWS = """\
_fleet_launch = _fleet_shape(q, head_size, num_queries_per_kv, max_seqlen_q)
if _fleet_launch is not None:
    BLOCK_M, _, launch_num_warps = _fleet_launch
    BLOCK_Q = BLOCK_M // num_queries_per_kv
"""
_TILES = """\
if _fleet_launch is not None:
    TILE_SIZE_PREFILL = TILE_SIZE_DECODE = _fleet_launch[1]
TILE_SIZE_PREFILL = _fleet_tile(TILE_SIZE_PREFILL, BLOCK_M, head_size, q)
TILE_SIZE_DECODE = _fleet_tile(TILE_SIZE_DECODE, BLOCK_M, head_size, q)
"""
# What the compiler says of inductor's kernel is 4 * (BLOCK_M + BLOCK_N) * head bytes, and 4 * BLOCK_M * BLOCK_N more in
# float32. Blocks are powers of 2, so a half divides what the whole does. One set by hand comes after it and stands.
_FLEX_BLOCKS = """\
_fleet_capability = current_platform.get_device_capability()
if _fleet_capability is not None and _fleet_capability[0] < 8:
    _fleet_limit = getattr(torch.cuda.get_device_properties(query.device), "shared_memory_per_block_optin", 0)
    _fleet_width = 1 << (self.head_size - 1).bit_length()
    _fleet_scores = 1 if query.element_size() == 4 else 0
    _fleet_m, _fleet_n = kernel_options["BLOCK_M"], kernel_options["BLOCK_N"]
    while max(_fleet_m, _fleet_n) > 16 and (
        4 * ((_fleet_m + _fleet_n) * _fleet_width + _fleet_scores * _fleet_m * _fleet_n) > _fleet_limit
    ):
        if _fleet_m >= _fleet_n:
            _fleet_m //= 2
        else:
            _fleet_n //= 2
    kernel_options["BLOCK_M"], kernel_options["BLOCK_N"] = _fleet_m, _fleet_n
"""


def patches(shapes: Sequence[Shape]) -> tuple[Patch, ...]:
    """Every patch, with these launch shapes."""
    rows = "\n".join(f"    {key!r}: {value!r}," for key, value in table(shapes).items())
    return (
        Patch(
            id="triton-tile-clamp",
            revision=3,
            reason="below capability 8.0 a block has 64 KiB of shared memory, and a 512-wide head asks for 96 KiB",
            links=("vllm#57712", "vllm#38918", "vllm#36802", "vllm#39018"),
            removal="upstream's own shapes fit: compile_check.py says so of the pristine files",
            since="0.26.0",
            shown_on=_SHOWN_ON,
            verify="compile_check.py",
            edits=(
                Edit(
                    target=ATTENTION,
                    scope="unified_attention",
                    block=_FUNCTIONS.format(rows=rows).replace("{\n\n}", "{}"),
                    needs=("torch", "triton", "current_platform"),
                ),
                Edit(
                    target=ATTENTION,
                    scope="unified_attention",
                    block=_ROWS,
                    names=("BLOCK_M", "BLOCK_Q"),
                    # From 0.34.0 on AMD's cards get other shapes further down.
                    until="total_num_q_blocks",
                    needs=("q", "head_size", "num_queries_per_kv", "max_seqlen_q", "launch_num_warps"),
                ),
                Edit(
                    target=ATTENTION,
                    scope="unified_attention",
                    block=_TILES,
                    names=("TILE_SIZE_PREFILL", "TILE_SIZE_DECODE"),
                    until="use_3d",
                    from_call="_get_tile_size",
                    needs=("q", "head_size", "BLOCK_M", "_fleet_launch"),
                ),
                Edit(
                    target=FLEX,
                    scope="FlexAttentionImpl.forward",
                    block=_FLEX_BLOCKS,
                    names=("kernel_options",),
                    from_call="get_kernel_options",
                    needs=("self", "query"),
                ),
            ),
        ),
    )
