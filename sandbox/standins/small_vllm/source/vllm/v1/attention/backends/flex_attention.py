"""The names that the kernel patch is put between, in the order in which vLLM's Flex attention has them."""

from __future__ import annotations

torch, current_platform = None, None


def get_kernel_options(query: object) -> dict[str, int]:
    """The blocks of a launch."""
    return {"BLOCK_M": 32, "BLOCK_N": 32} if query else {}


class FlexAttentionImpl:
    """Attention of one layer."""

    def forward(self, query: object) -> dict[str, int]:
        """What would be launched."""
        kernel_options = get_kernel_options(query)
        return dict(kernel_options)
