"""Run with a request: vLLM's Python with the stub in flash-attention's place, on a GPU of 7.5 as vLLM's platform tells.

No GPU is here: the platform says 7.5, and the compiled modules, which none of this calls, are empty.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

request = json.loads(Path(sys.argv[1]).read_text())
sys.path.insert(0, request["tree"])
for name in ("_C", "_moe_C", "_C_stable_libtorch", "_moe_C_stable_libtorch"):
    sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")

import torch  # noqa: E402
from vllm import platforms  # noqa: E402
from vllm.platforms import cuda  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class Turing(cuda.CudaPlatformBase):  # type: ignore[misc]
    """A platform for CUDA that asks no driver."""

    @classmethod
    def get_device_capability(cls, *_: object, **__: object) -> DeviceCapability:
        """As a T4G."""
        return DeviceCapability(7, 5)

    @classmethod
    def get_device_name(cls, *_: object, **__: object) -> str:
        """As a T4G."""
        return "NVIDIA T4G"

    @classmethod
    def get_device_total_memory(cls, *_: object, **__: object) -> int:
        """As a T4G, bytes."""
        return 15360 << 20


platforms._current_platform = Turing()

from vllm import vllm_flash_attn  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb  # noqa: E402
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend  # noqa: E402
from vllm.v1.attention.selector import get_attn_backend  # noqa: E402

generator = torch.Generator().manual_seed(1)


def some(*shape: int) -> torch.Tensor:
    """Values around zero."""
    return torch.randn(*shape, generator=generator).to(torch.float16)


differences = []
with set_current_vllm_config(VllmConfig()):
    backend = get_attn_backend(256, torch.float16, "auto", use_mla=False).get_name()
    for neox in (True, False):
        layer = ApplyRotaryEmb(enforce_enable=True, is_neox_style=neox)
        for shape in ((2, 7, 3, 16), (7, 3, 16)):
            x, cos, sin = some(*shape), some(7, 8), some(7, 8)
            got, wanted = layer.forward_cuda(x, cos, sin), layer.forward_static(x, cos, sin, neox, True)
            differences.append(float((got - wanted).abs().max()) if got.dtype == x.dtype else float("inf"))
from vllm.vllm_flash_attn.layers import rotary  # noqa: E402

x, cos, sin = some(1, 5, 2, 24), some(9, 8), some(9, 8)
part = rotary.apply_rotary_emb(x, cos, sin)
rest_kept = bool((part[..., 16:] == x[..., 16:]).all())
wanted = ApplyRotaryEmb.forward_static(x[..., :16], cos[:5], sin[:5], True, True)
differences.append(float((part[..., :16] - wanted).abs().max()))
print(
    json.dumps(
        {
            "backend": backend,
            "rotary": max(differences),
            "rest_kept": rest_kept,
            "rotary_from": rotary.__file__,
            "imported": [Attention.__name__, FlashAttentionBackend.get_name()],
            "fa2": vllm_flash_attn.fa_version_unsupported_reason(2),
            "fa3": vllm_flash_attn.fa_version_unsupported_reason(3),
            "modules": [
                vllm_flash_attn.flash_attn_interface.FA2_AVAILABLE,
                vllm_flash_attn.flash_attn_interface.FA3_AVAILABLE,
            ],
        }
    )
)
