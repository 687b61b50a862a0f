"""Rotary embedding for vLLM's `ApplyRotaryEmb`, which takes it from here on every CUDA GPU, 7.5 included."""

from __future__ import annotations

import torch


def apply_rotary_emb(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotates the first `2 * cos.shape[-1]` values of each head, computed in float32, and leaves the rest.

    Args:
        x: (batch, tokens, heads, head size).
        cos: (at least tokens, half of what is rotated); token i takes row i.
        sin: as cos.
        interleaved: whether the values of a pair lie side by side, else half of what is rotated apart.
    """
    half, tokens = cos.shape[-1], x.shape[1]
    cosine, sine = (angle[:tokens].unsqueeze(-2).float() for angle in (cos, sin))
    turned = x[..., : 2 * half].float().unflatten(-1, (half, 2) if interleaved else (2, half))
    pair = -1 if interleaved else -2
    first, second = turned.unbind(pair)
    turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=pair)
    return torch.cat((turned.flatten(-2).to(x.dtype), x[..., 2 * half :]), dim=-1)
