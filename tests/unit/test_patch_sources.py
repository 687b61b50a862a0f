"""The shape of vLLM's attention host code as it stands in 0.26.0 to 0.33.0, in our own few lines."""

from __future__ import annotations

SOURCE = """\
def _get_tile_size(head, window, size, is_prefill):
    return 32 if is_prefill else 16


def unified_attention(q, k, head_size):
    BLOCK_M = 16
    TILE_SIZE_PREFILL = _get_tile_size(head_size, 0, 2, is_prefill=True)
    TILE_SIZE_DECODE = _get_tile_size(head_size, 0, 2, is_prefill=False)
    use_td = False
    if use_td:
        TILE_SIZE_PREFILL = min(TILE_SIZE_PREFILL, 16)
        TILE_SIZE_DECODE = min(TILE_SIZE_DECODE, 16)
    kernel(TILE_SIZE=TILE_SIZE_PREFILL)
    reduce_segments(TILE_SIZE=TILE_SIZE_DECODE)
"""
UPSTREAM_FIX = SOURCE.replace("return 32 if is_prefill else 16", "return 16")


class Device:
    """Device properties; a limit of None leaves the attribute out, as old torch does."""

    def __init__(self, limit: int | None) -> None:
        if limit is not None:
            self.shared_memory_per_block_optin = limit


def tiles(
    source: str, capability: tuple[int, int] | None, limit: int | None, head: int, element_size: int = 2
) -> dict[str, int]:
    """The tiles that the host code hands to its kernels on such a device."""
    seen: dict[str, int] = {}

    class Cuda:
        @staticmethod
        def get_device_properties(_device: object) -> Device:
            return Device(limit)

    class Torch:
        cuda = Cuda

    class Platform:
        @staticmethod
        def get_device_capability() -> tuple[int, int] | None:
            return capability

    class Triton:
        @staticmethod
        def next_power_of_2(number: int) -> int:
            return 1 << (number - 1).bit_length()

    class Query:
        device = "cuda:0"

        @staticmethod
        def element_size() -> int:
            return element_size

    scope = {
        "torch": Torch,
        "triton": Triton,
        "current_platform": Platform,
        "kernel": lambda TILE_SIZE: seen.update(prefill=TILE_SIZE),  # noqa: N803
        "reduce_segments": lambda TILE_SIZE: seen.update(reduce=TILE_SIZE),  # noqa: N803
    }
    exec(source, scope)  # noqa: S102
    scope["unified_attention"](Query(), None, head)  # type: ignore[operator]
    return seen
