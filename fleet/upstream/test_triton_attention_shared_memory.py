# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Launches of the unified attention kernel fit the shared memory of the device.

Needs no GPU: the kernels are replaced by recorders, and only the host code runs.
"""

from types import SimpleNamespace

import pytest
import torch

import vllm.v1.attention.ops.triton_unified_attention as attention

BLOCK_SIZE = 16
SEGMENTS = 16
# Opt-in shared memory per block of compute capabilities 7.5 and 8.0, in bytes.
TURING = ((7, 5), 65536)
AMPERE = ((8, 0), 166912)


class Recorder:
    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append(kwargs)


def launches_on(monkeypatch, device, head_size, queries, heads=8):
    """Keyword arguments of the launches for one sequence of 300 tokens."""
    capability, limit = device
    found = []
    properties = SimpleNamespace(
        shared_memory_per_block_optin=limit, major=capability[0], minor=capability[1]
    )
    monkeypatch.setattr(
        attention.current_platform, "get_device_capability", lambda *a: capability
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *a: properties)
    # The host code takes arithmetic alone from Triton, which may be a placeholder.
    arithmetic = SimpleNamespace(
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
        cdiv=lambda a, b: -(-a // b),
    )
    monkeypatch.setattr(attention, "triton", arithmetic)
    for kernel in ("kernel_unified_attention", "reduce_segments"):
        monkeypatch.setattr(attention, kernel, Recorder(found))

    q = torch.zeros(queries, heads, head_size, dtype=torch.float16)
    blocks = 300 // BLOCK_SIZE + 1
    kv = torch.zeros(blocks, BLOCK_SIZE, 1, head_size, dtype=torch.float16)
    attention.unified_attention(
        q=q,
        k=kv,
        v=kv,
        out=torch.zeros_like(q),
        cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32),
        max_seqlen_q=queries,
        seqused_k=torch.tensor([300], dtype=torch.int32),
        max_seqlen_k=300,
        softmax_scale=1.0,
        causal=True,
        window_size=(-1, -1),
        block_table=torch.zeros(1, blocks, dtype=torch.int32),
        softcap=0.0,
        q_descale=None,
        k_descale=torch.ones(1, 1),
        v_descale=torch.ones(1, 1),
        seq_threshold_3D=128,
        num_par_softmax_segments=SEGMENTS,
        softmax_segm_output=torch.zeros(queries, heads, SEGMENTS, head_size),
        softmax_segm_max=torch.zeros(queries, heads, SEGMENTS),
        softmax_segm_expsum=torch.zeros(queries, heads, SEGMENTS),
    )
    return found


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("head_size", [256, 512])
def test_launches_fit_turing(monkeypatch, head_size, queries):
    first, *reductions = launches_on(monkeypatch, TURING, head_size, queries)
    # Below 8.0 operands are staged as float32 whatever their type.
    shared = 4 * (first["BLOCK_M"] + first["TILE_SIZE"]) * head_size
    assert shared <= TURING[1]
    # A reduction with another tile would read segments that were not written.
    assert [r["TILE_SIZE"] for r in reductions] == (
        [first["TILE_SIZE"]] if queries == 1 else []
    )


@pytest.mark.parametrize(("queries", "tile"), [(1, 16), (40, 32)])
def test_launches_from_ampere_on_are_as_before(monkeypatch, queries, tile):
    first, *_ = launches_on(monkeypatch, AMPERE, 512, queries)
    assert (first["BLOCK_M"], first["TILE_SIZE"]) == (16, tile)
    assert "num_warps" not in first
