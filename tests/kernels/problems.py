"""Random attention problems and a plain reference for each. Needs torch alone; the device is a parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# The kernels that `unified_attention()` launches, by their names in its module.
KERNELS = ("kernel_unified_attention", "reduce_segments")
_BLOCK, _SEGMENTS = 16, 16
# float16 keeps 10 bits of mantissa: a rounding errs by at most half of the last one, 2^-11 of the value.
_ROUNDING = 2.0**-11
# The rest is in float32, which has 13 bits more; a sum of 512 products, all errors of one sign, costs nine of them.
_FLOAT32 = 1 + 2.0**-4


@dataclass(frozen=True, slots=True)
class Problem:
    """One call of `unified_attention()`.

    Attributes:
        phase: "decode" splits each sequence into segments; "batched decode", of more sequences than the backend splits,
            does not.
        window: tokens that a query sees, itself included; 0 where it sees all before it.
        sequences: (queries, context) of each, tokens; the queries are the last of the context.
    """

    phase: str
    head_size: int
    heads: int
    kv_heads: int
    window: int
    sequences: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A problem on a device: `call()` writes `out`; `want` and `bound` have its shape (queries, heads, head size)."""

    call: Callable[[], None]
    out: Any
    want: Any
    bound: Any

    def errors(self) -> tuple[float, float]:
        """The largest error, and the largest share of its bound that one takes; NaN where anything is NaN."""
        error = (self.out.float() - self.want).abs()
        return float(error.max()), float((error / self.bound).max())


def prepared(module: Any, problem: Problem, device: str) -> Prepared:
    """Random values in shuffled pages, float16. What no kernel may read, or must write first, is NaN."""
    torch.manual_seed(0)
    queries, contexts = zip(*problem.sequences, strict=True)
    heads, kv_heads, size, count = problem.heads, problem.kv_heads, problem.head_size, len(queries)
    half: dict[str, Any] = {"dtype": torch.float16, "device": device}
    # As many pages to a sequence as its last tile may touch.
    pages = 2 * (max(contexts) // (2 * _BLOCK) + 1)
    table = torch.randperm(count * pages, device=device).int().view(count, pages)
    q = torch.randn(sum(queries), heads, size, **half)
    k, v = (torch.full((count * pages, _BLOCK, kv_heads, size), torch.nan, **half) for _ in range(2))
    answers = []
    for own, pages_of_it, context in zip(q.split(queries), table.long(), contexts, strict=True):
        keys, values = (torch.randn(context, kv_heads, size, **half) for _ in range(2))
        at = torch.arange(context, device=device)
        k[pages_of_it[at // _BLOCK], at % _BLOCK] = keys
        v[pages_of_it[at // _BLOCK], at % _BLOCK] = values
        answers.append(reference(own, keys, values, problem.window))
    want, bound = (torch.cat(parts) for parts in zip(*answers, strict=True))
    out = torch.full_like(q, torch.nan)
    threshold = count - 1 if problem.phase == "batched decode" else count
    scratch: dict[str, Any] = {"device": device, "dtype": torch.float32, "fill_value": torch.nan}
    arguments = {
        "q": q, "k": k, "v": v, "out": out,
        "cu_seqlens_q": torch.tensor([0, *queries], device=device).cumsum(0).int(), "max_seqlen_q": max(queries),
        "seqused_k": torch.tensor(contexts, device=device).int(), "max_seqlen_k": max(contexts),
        "softmax_scale": size**-0.5, "causal": True, "block_table": table, "softcap": 0.0, "q_descale": None,
        "window_size": (problem.window - 1, 0) if problem.window else (-1, -1),
        "k_descale": torch.ones(count, kv_heads, device=device),
        "v_descale": torch.ones(count, kv_heads, device=device),
        "seq_threshold_3D": threshold, "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": torch.full((count, heads, _SEGMENTS, size), **scratch),
        "softmax_segm_max": torch.full((count, heads, _SEGMENTS), **scratch),
        "softmax_segm_expsum": torch.full((count, heads, _SEGMENTS), **scratch),
    }  # fmt: skip
    return Prepared(lambda: module.unified_attention(**arguments), out, want, bound)


def reference(q: Any, keys: Any, values: Any, window: int) -> tuple[Any, Any]:
    """Attention of one sequence in float32, and by how much a correct kernel in float16 may err from it.

    Args:
        q: (queries, heads, head size), the last of the context.
        keys, values: (context, KV heads, head size).
        window: as `Problem.window`.

    Returns:
        Both of q's shape. The kernel rounds twice: each softmax weight before it is multiplied with a value, and the
        result. So with weights w and values v the error is at most 2^-11 (Σ w |v| + |Σ w v|).
    """
    context, last = keys.shape[0], torch.arange(keys.shape[0] - q.shape[0], keys.shape[0], device=q.device)[:, None]
    at = torch.arange(context, device=q.device)[None]
    seen = (at <= last) & (at > last - (window or context))
    keys, values = (one.float().repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * q.shape[2] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    want, size = (torch.einsum("hqk,khd->qhd", weights, one) for one in (values, values.abs()))
    return want, _FLOAT32 * _ROUNDING * (size + want.abs())
