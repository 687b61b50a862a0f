"""Runs vLLM's attention kernels on the GPU at hand, stock and patched, as the card compiles them and as 7.5 does.

`python3 tests/gpu/kernels.py --stock DIR --patched DIR` prints a table: error against a float32 reference, time, shared
memory. Each DIR holds `vllm/` of the same version; `./runner.py patch apply` makes the second from a copy of the first.
Needs torch, Triton and an NVIDIA GPU, nothing of this project's environment. Exits 1 where a patched kernel's error is
larger than the stock one's by more than rounding, or a launch of 7.5 asks for more than 65,536 bytes.

With `TRITON_OVERRIDE_ARCH=sm75` Triton lowers for 7.5 down to PTX and assembles that for the card: the very code that a
Turing card would run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_PROJECT / "roles" / "triton_patch" / "files"))

import compile_check  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

_TURING_LIMIT = 65536
# float16 has 10 bits of mantissa; a result of order 1 is rounded by 0.0005, and two roundings may differ.
_ROUNDING = 0.001
_HEADS, _KV_HEADS, _BLOCK, _SEGMENTS, _WINDOW = 8, 1, 16, 16, 512
_HEAD_SIZES = (512, 256, 128, 64)
# Phase: (queries, context) of each sequence. At a context of 200 a wrong tile in the reduction reads too few segments.
_PHASES = {
    "prefill": [(512, 512), (77, 77)],
    "chunked prefill": [(64, 1000), (33, 300)],
    "decode": [(1, 16000), (1, 200), (1, 5)],
}


def main() -> int:
    """Runs all four combinations, each in a process of its own, and prints the table."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    words.add_argument("--stock", type=Path, required=True)
    words.add_argument("--patched", type=Path, required=True)
    words.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    given = words.parse_args()
    if given.one:
        print(json.dumps(measured(given.one)))
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    print("| lowered for | head | phase | error stock | patched | time stock, µs | patched | bytes stock | patched |")
    print("|---|---|---|---|---|---|---|---|---|")
    wrong = []
    for name, more in (("the card", {}), ("7.5", {"TRITON_OVERRIDE_ARCH": "sm75"})):
        stock, patched = (in_process(tree, more) for tree in (given.stock, given.patched))
        for old, new in zip(stock, patched, strict=True):
            figures = [f"{one['error']:.5f}" for one in (old, new)] + [f"{one['us']:.0f}" for one in (old, new)]
            bytes_asked = [f"{one['shared']:,}" for one in (old, new)]
            print("|", " | ".join([name, str(new["head"]), new["phase"], *figures, *bytes_asked]), "|")
            too_wide = name == "7.5" and new["shared"] > _TURING_LIMIT
            if not new["error"] <= old["error"] + _ROUNDING or too_wide:
                wrong.append(f"{name}, head {new['head']}, {new['phase']}")
    print(f"wrong: {'; '.join(wrong)}" if wrong else "all within rounding, and all of 7.5 within 65,536 bytes")
    return int(bool(wrong))


def in_process(tree: Path, more: dict[str, str]) -> list[dict[str, Any]]:
    """The figures of one tree under one lowering; the compiler reads its variables when it is imported."""
    argv = [sys.executable, __file__, "--stock", str(tree), "--patched", str(tree), "--one", str(tree)]
    done = subprocess.run(argv, env={**os.environ, **more}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree} {more}: {done.stderr[-3000:]}")
    figures: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measured(tree: Path) -> list[dict[str, Any]]:
    """Error, median time (µs) and shared memory (bytes) of every head size and phase."""
    properties = torch.cuda.get_device_properties
    module = compile_check.load(tree, tree / compile_check.ATTENTION, (7, 5), _TURING_LIMIT)
    asked_by_host_code, torch.cuda.get_device_properties = torch.cuda.get_device_properties, properties
    module.torch = Torch(asked_by_host_code)
    shared: list[int] = []
    for kernel in ("kernel_unified_attention", "reduce_segments"):
        setattr(module, kernel, Noted(getattr(module, kernel), shared))
    found = []
    for head in _HEAD_SIZES:
        for phase, sequences in _PHASES.items():
            torch.manual_seed(0)
            call, out, want = problem(module, head, phase, sequences)
            shared.clear()
            call()
            torch.cuda.synchronize()
            error = float((out.float() - want).abs().max())
            most = max(shared)
            us = float(triton.testing.do_bench(call, warmup=20, rep=200, return_mode="median")) * 1000
            found.append({"head": head, "phase": phase, "error": error, "us": us, "shared": most})
    return found


class Torch:
    """torch as the module under test sees it: of the card it learns what a Turing card would tell."""

    def __init__(self, get_device_properties: Any) -> None:
        self.cuda = type("Cuda", (), {"get_device_properties": staticmethod(get_device_properties)})

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class Noted:
    """A kernel whose launches note the shared memory that they were compiled to ask for."""

    def __init__(self, kernel: Any, shared: list[int]) -> None:
        self._kernel, self._shared = kernel, shared

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self._shared.append(self._kernel[grid](*args, **kwargs).metadata.shared)

        return launch


def problem(module: Any, head: int, phase: str, sequences: list[tuple[int, int]]) -> tuple[Any, Any, Any]:
    """A call of `unified_attention` on random values, its output, and what a float32 reference says it must be."""
    options: dict[str, Any] = {"dtype": torch.float16, "device": "cuda"}
    queries = sum(count for count, _ in sequences)
    per_sequence = max(context for _, context in sequences) // _BLOCK + 1
    blocks = per_sequence * len(sequences)
    q = torch.randn(queries, _HEADS, head, **options)
    k, v = (torch.randn(blocks, _BLOCK, _KV_HEADS, head, **options) for _ in range(2))
    table = torch.randperm(blocks, device="cuda").int().view(len(sequences), per_sequence)
    out, scale = torch.empty_like(q), head**-0.5
    window = _WINDOW if head == 256 else 0
    decode = phase == "decode"
    padded = triton.next_power_of_2(head)
    scratch: dict[str, Any] = {
        "seq_threshold_3D": 128 if decode else None,
        "num_par_softmax_segments": _SEGMENTS if decode else None,
        "softmax_segm_output": torch.empty(queries, _HEADS, _SEGMENTS, padded, device="cuda") if decode else None,
        "softmax_segm_max": torch.empty(queries, _HEADS, _SEGMENTS, device="cuda") if decode else None,
        "softmax_segm_expsum": torch.empty(queries, _HEADS, _SEGMENTS, device="cuda") if decode else None,
    }
    starts = torch.tensor([0, *torch.tensor([count for count, _ in sequences]).cumsum(0)], dtype=torch.int32)
    contexts = torch.tensor([context for _, context in sequences], dtype=torch.int32)
    arguments = {
        "q": q, "k": k, "v": v, "out": out, "cu_seqlens_q": starts.cuda(),
        "max_seqlen_q": max(count for count, _ in sequences), "seqused_k": contexts.cuda(),
        "max_seqlen_k": int(contexts.max()), "softmax_scale": scale, "causal": True,
        "window_size": (window - 1, 0) if window else (-1, -1), "block_table": table, "softcap": 0.0, "q_descale": None,
        "k_descale": torch.ones(len(sequences), _KV_HEADS, device="cuda"),
        "v_descale": torch.ones(len(sequences), _KV_HEADS, device="cuda"), **scratch,
    }  # fmt: skip
    want = torch.cat(
        [
            reference(q[start : start + count], k, v, table[n], context, scale, window)
            for n, ((count, context), start) in enumerate(zip(sequences, starts.tolist(), strict=False))
        ]
    )
    return lambda: module.unified_attention(**arguments), out, want


def reference(q: Any, k: Any, v: Any, table: Any, context: int, scale: float, window: int) -> Any:
    """Attention of one sequence in float32: queries (n, heads, head), paged keys and values, one KV head."""
    keys, values = (cache[table.long()].flatten(0, 1)[:context, 0].float() for cache in (k, v))
    scores = torch.einsum("qhd,kd->hqk", q.float(), keys) * scale
    row = torch.arange(context - q.shape[0], context, device="cuda")[:, None]
    column = torch.arange(context, device="cuda")[None]
    hidden = (column > row) | ((column <= row - window) if window else torch.zeros_like(column > row))
    return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)


if __name__ == "__main__":
    raise SystemExit(main())
