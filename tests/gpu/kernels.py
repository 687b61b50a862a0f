"""Runs vLLM's attention kernels on the GPU at hand, stock and patched, as the card compiles them and as 7.5 does.

`python3 tests/gpu/kernels.py --stock DIR --patched DIR` prints a table: error against a float32 reference, time, shared
memory. Each DIR holds `vllm/` of the same version; `./runner.py patch apply` makes the second from a copy of the first.
Needs torch, Triton and an NVIDIA GPU, nothing of this project's environment. Exits 1 where an error is larger than what
float16's rounding explains (tests/kernels/problems.py), or a patched launch of 7.5 asks for more than 65,536 bytes.

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
sys.path[:0] = [str(_PROJECT), str(_PROJECT / "roles" / "triton_patch" / "files")]

import compile_check  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

from tests.kernels.problems import KERNELS, Problem, prepared  # noqa: E402

_TURING_LIMIT = 65536
_HEADS, _KV_HEADS, _WINDOW = 8, 1, 512
_HEAD_SIZES = (512, 256, 128, 64)
# Phase: (queries, context) of each sequence. At a context of 200 a wrong tile in the reduction reads too few segments.
_PHASES = {
    "prefill": ((512, 512), (77, 77)),
    "chunked prefill": ((64, 1000), (33, 300), (1, 40)),
    "decode": ((1, 16000), (1, 200), (1, 5)),
    "batched decode": ((1, 300),) * 63 + ((1, 5),),
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
            if too_wide or not all(one["of_bound"] <= 1 for one in (old, new)):
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
    for kernel in KERNELS:
        setattr(module, kernel, Noted(getattr(module, kernel), shared))
    found = []
    for head in _HEAD_SIZES:
        for phase, sequences in _PHASES.items():
            window = _WINDOW if head == 256 else 0
            problem = prepared(module, Problem(phase, head, _HEADS, _KV_HEADS, window, sequences), "cuda")
            shared.clear()
            problem.call()
            torch.cuda.synchronize()
            error, of_bound = problem.errors()
            most = max(shared)
            us = float(triton.testing.do_bench(problem.call, warmup=20, rep=200, return_mode="median")) * 1000
            found.append({"head": head, "phase": phase, "error": error, "of_bound": of_bound, "us": us, "shared": most})
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


if __name__ == "__main__":
    raise SystemExit(main())
