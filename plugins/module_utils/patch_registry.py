"""The source patches this fleet knows, each with its reason and what would end it."""

from __future__ import annotations

from ansible.module_utils.patch_engine import Edit, Patch

ATTENTION = "vllm/v1/attention/ops/triton_unified_attention.py"

TILE_CLAMP = Patch(
    id="triton-tile-clamp",
    revision=2,
    reason="below capability 8.0 a block has 64 KiB of shared memory, and a 512-wide head asks for 96 KiB",
    links=("vllm#57712", "vllm#38918", "vllm#36802", "vllm#39018"),
    removal="upstream's own tiles fit: compile_check.py reports it on the pristine file",
    shown_on=("0.32.0",),
    edits=(
        Edit(
            target=ATTENTION,
            scope="unified_attention",
            names=("TILE_SIZE_PREFILL", "TILE_SIZE_DECODE"),
            from_call="_get_tile_size",
            needs=("BLOCK_M", "head_size", "q"),
            # Below 8.0 Triton stages operands as float32 whatever their type, hence 4 bytes; the compiler has the
            # last word. A device that does not tell its limit gets the smallest tile. 8-bit types need a tile of 32.
            block="""\
_fleet_capability = current_platform.get_device_capability()
if _fleet_capability is not None and _fleet_capability[0] < 8:
    _fleet_limit = getattr(torch.cuda.get_device_properties(q.device), "shared_memory_per_block_optin", 0)
    _fleet_row_bytes = 4 * triton.next_power_of_2(head_size)
    _fleet_least = 16 if q.element_size() >= 2 else 32
    while TILE_SIZE_PREFILL > _fleet_least and (BLOCK_M + TILE_SIZE_PREFILL) * _fleet_row_bytes > _fleet_limit:
        TILE_SIZE_PREFILL //= 2
    while TILE_SIZE_DECODE > _fleet_least and (BLOCK_M + TILE_SIZE_DECODE) * _fleet_row_bytes > _fleet_limit:
        TILE_SIZE_DECODE //= 2
""",
        ),
    ),
)

PATCHES = (TILE_CLAMP,)
