#!/usr/bin/env python3
"""Searches launch shapes for the attention kernels: what the compiler says of each, and its time on the GPU at hand.

`shape_search.py REQUEST.json` prints JSON: `{"vllm", "triton", "torch", "gpu", "lowered_for", "stages_matter",
"shapes"}`; a shape is `{head_size, dtype, phase, block_m, tile, warps, shared_bytes, registers, stack_bytes, us,
stock}`, `us` the median time of each problem in microseconds (empty where it was not timed), `stock` whether upstream
would take it.

The request: `capability` and `limit_bytes` of the GPU to search for, `site_packages` that holds vllm/, `source` (the
attention file with the patch in it, whose table of shapes is what is varied), `head_sizes`, `dtype`, `heads`,
`kv_heads`, `block_size`, `vllm` (version, for the record), `time` (whether to run them) and `lowered` (whether the GPU
at hand is another one: kernels are then lowered for the capability asked for, assembled for the one at hand, and no
more blocks share one of its multiprocessors than would on a Turing one). A shape is timed where it fits, does not spill
much, and gives the same output as the field report's shape.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

# Memory of one process that compiles, and of one that has the GPU open besides, bytes of the machine's.
_PROCESS_BYTES, _GPU_PROCESS_BYTES = 1_000_000_000, 3_000_000_000
# What the registers do not hold goes to memory; the field report's shape is timed whatever it spills.
_MOST_STACK_BYTES = 512
_REPORTED = (16, 16, 4)
_ROWS, _TILES, _WARPS = (8, 16, 32, 64), (16, 32, 64), (1, 2, 4, 8)
_STAGES = (1, 2, 3)
# Shapes that are compiled and not timed: the narrowest for each width, type and number of rows, so that a model which
# cannot fit is known before it is built for. 8 rows are half the fewest that upstream takes.
_WIDTHS, _TYPES, _NARROWEST = (64, 128, 256, 512), ("float16", "float32"), [(rows, 16, 4) for rows in (8, 16, 32, 64)]
# Sequences, queries of each, context of each. Decoding is timed long, and with many sequences at once.
_PROBLEMS = {
    "prefill": {"prefill of 512": (1, 512, 512), "prefill of 2,048": (1, 2048, 2048)},
    "decode": {"decode at 16,000": (1, 1, 16000), "16 decodes at 2,000": (16, 1, 2000)},
}
_SEGMENTS = 16
# float16 rounds a value of order 1 by 0.0005; two shapes add in another order.
_ROUNDING = 0.004

Shape = tuple[int, int, int]


def main(request_path: str) -> int:
    """Compiles all, times what is worth it, prints the figures."""
    request = json.loads(Path(request_path).read_text())
    pool = multiprocessing.get_context("spawn").Pool
    searched = itertools.product(
        request["head_sizes"], [request["dtype"]], _PROBLEMS, itertools.product(_ROWS, _TILES, _WARPS)
    )
    jobs = list(dict.fromkeys([*searched, *itertools.product(_WIDTHS, _TYPES, _PROBLEMS, _NARROWEST)]))
    with pool(_workers(_PROCESS_BYTES), _prepare, (request,)) as workers:
        found = [row for row in workers.map(_compiled, jobs, chunksize=1) if row]
        stages_matter = len(set(workers.map(_code_with_stages, _STAGES))) > 1
    result = {key: request[key] for key in ("vllm",)} | {"lowered_for": request["capability"]} | _versions()
    if request["time"]:
        timed = (request["head_sizes"], request["dtype"])
        if request["lowered"]:
            os.environ["TRITON_OVERRIDE_ARCH"] = f"sm{request['capability'].replace('.', '')}"
        worth = [
            row for row in found
            if row["head_size"] in timed[0] and row["dtype"] == timed[1] and _worth_timing(row, request["limit_bytes"])
        ]  # fmt: skip
        # All are compiled by many processes into Triton's cache, then timed by one.
        with pool(min(8, _workers(_GPU_PROCESS_BYTES)), _prepare_gpu, (request,)) as workers:
            workers.map(_launched, worth, chunksize=1)
        _prepare_gpu(request)
        _time(worth)
        result |= _gpu()
    result |= {"stages_matter": stages_matter, "shapes": found}
    print(json.dumps(result))
    return 0


def _workers(process_bytes: int) -> int:
    """As many as there are cores and room in half of the memory for; at least one."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, memory // 2 // process_bytes))


def _worth_timing(row: dict[str, Any], limit: int) -> bool:
    known = _shape(row) == _REPORTED or row["stock"]
    return row["shared_bytes"] <= limit and (known or row["stack_bytes"] <= _MOST_STACK_BYTES)


def _shape(row: dict[str, Any]) -> Shape:
    return row["block_m"], row["tile"], row["warps"]


def _versions() -> dict[str, str]:
    import torch
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__}


def _gpu() -> dict[str, str]:
    import torch

    return {"gpu": torch.cuda.get_device_name()}


# What a worker process holds.
_held: dict[str, Any] = {}


def _prepare(request: dict[str, Any]) -> None:
    """Makes this process one whose launches are compilations."""
    import compile_check

    module, launches = compile_check.ready(
        request["capability"], request["limit_bytes"], Path(request["site_packages"]), Path(request["source"])
    )
    _held.update(request=request, module=module, launches=launches, check=compile_check)


def _compiled(job: tuple[int, str, str, Shape]) -> dict[str, Any] | None:
    """The compiler's figures of one shape, None where it does not compile."""
    head, dtype, phase, shape = job
    module, launches, request = _held["module"], _held["launches"], {**_held["request"], "dtype": job[1]}
    layer = {"head_size": head, "heads": request["heads"], "kv_heads": request["kv_heads"], "sliding_window": 0}

    def launched(table: dict[Any, Any]) -> dict[str, Any]:
        module._FLEET_SHAPES = table
        launches.clear()
        _held["check"].run_host_code(module, request, layer, phase)
        return dict(launches[0])

    try:
        row = launched(_only(head, phase, shape, module.torch, dtype))
    except Exception as error:
        # A shape that the compiler refuses is no candidate; whatever else is wrong shows on all of them.
        print(f"{job}: {type(error).__name__}", file=sys.stderr)
        return None
    if _shape(row) != shape:
        return None
    return {
        "head_size": head, "dtype": dtype, "phase": phase, "block_m": shape[0], "tile": shape[1],
        "warps": shape[2], **{key: row[key] for key in ("shared_bytes", "registers", "stack_bytes")}, "us": {},
        "stock": shape == (16, 32 if phase == "prefill" else 16, 4),
    }  # fmt: skip


def _only(head: int, phase: str, shape: Shape, torch: Any, dtype: str) -> dict[Any, Any]:
    """A table that holds this shape alone; that it asks for nothing lets it be tried whatever it asks for."""
    major, minor = (int(part) for part in _held["request"]["capability"].split("."))
    return {((major, minor), phase, head, getattr(torch, dtype).itemsize): ((*shape, 0),)}


def _code_with_stages(stages: int) -> str:
    """Digest of the reported shape's code with that many stages."""
    import hashlib

    module, launches, request = _held["module"], _held["launches"], _held["request"]
    recorder = module.kernel_unified_attention
    kernel, seen = recorder._kernel, []

    class Staged:
        """Compiles with a number of stages, and keeps the code."""

        @staticmethod
        def warmup(*args: Any, **kwargs: Any) -> Any:
            compiled = kernel.warmup(*args, **kwargs, num_stages=stages)
            seen.append(hashlib.sha256(compiled.asm["cubin"]).hexdigest())
            return compiled

    recorder._kernel = Staged
    try:
        head = request["head_sizes"][0]
        layer = {"head_size": head, "heads": request["heads"], "kv_heads": request["kv_heads"], "sliding_window": 0}
        module._FLEET_SHAPES = _only(head, "decode", _REPORTED, module.torch, request["dtype"])
        launches.clear()
        _held["check"].run_host_code(module, request, layer, "decode")
    finally:
        recorder._kernel = kernel
    return str(seen[0])


def _prepare_gpu(request: dict[str, Any]) -> None:
    """Makes this process one that launches on the GPU at hand, as a GPU of the capability asked for."""
    import compile_check
    import torch

    properties = torch.cuda.get_device_properties
    major, minor = (int(part) for part in request["capability"].split("."))
    module = compile_check.load(
        Path(request["site_packages"]), Path(request["source"]), (major, minor), request["limit_bytes"]
    )
    told, torch.cuda.get_device_properties = torch.cuda.get_device_properties, properties
    module.torch = Torch(torch, told)
    _held.update(request=request, module=module, torch=torch)


class Torch:
    """torch as the module sees it: of the GPU it learns what one of the capability asked for would tell."""

    def __init__(self, torch: Any, get_device_properties: Any) -> None:
        self._torch = torch
        self.cuda = type("Cuda", (), {"get_device_properties": staticmethod(get_device_properties)})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class Confined:
    """A kernel of which no more blocks share a multiprocessor than on one of capability 7.5, for its first launch.

    A multiprocessor there has 65,536 bytes of shared memory, as many registers, 1,024 threads and 16 blocks (CUDA's
    programming guide). A newer one would hold several blocks where Turing holds one, and hide what each waits for. The
    shared memory that a launch asks for is therefore raised; the code stays the same.
    """

    def __init__(self, kernel: Any, row: dict[str, Any], here: int) -> None:
        threads = 32 * row["warps"]
        fit = (65536 // row["shared_bytes"], 65536 // (threads * row["registers"]), 1024 // threads, 16)
        self._kernel = kernel
        # Each block takes 1 KiB more than it asks for, and may ask for all but that.
        self._bytes = min(here // max(1, min(fit)), here) - 1024

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            compiled = self._kernel.warmup(*args, grid=grid, **kwargs)
            asked = compiled.metadata.shared
            if asked < self._bytes:
                compiled.metadata = compiled.metadata._replace(shared=self._bytes)
                warps, ctas, _, *more = compiled.packed_metadata
                compiled.packed_metadata = (warps, ctas, self._bytes, *more)
            self._kernel[grid](*args, **kwargs)

        return launch


def _call(row: dict[str, Any], problem: tuple[int, int, int]) -> tuple[Any, Any]:
    """A call of `unified_attention` with the row's shape on random values, and its output."""
    torch, request, module = _held["torch"], _held["request"], _held["module"]
    sequences, queries, context = problem
    head, heads, kv_heads, block = row["head_size"], request["heads"], request["kv_heads"], request["block_size"]
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, request["dtype"]), "device": "cuda"}
    each, tokens = context // block + 1, sequences * queries
    q = torch.randn(tokens, heads, head, **options)
    k, v = (torch.randn(each * sequences, block, kv_heads, head, **options) for _ in range(2))
    out = torch.empty_like(q)
    arguments = {
        "q": q, "k": k, "v": v, "out": out, "max_seqlen_q": queries, "max_seqlen_k": context,
        "cu_seqlens_q": torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * queries,
        "seqused_k": torch.full((sequences,), context, dtype=torch.int32, device="cuda"),
        "block_table": torch.randperm(each * sequences, device="cuda").int().view(sequences, each),
        "softmax_scale": head**-0.5, "causal": True, "window_size": (-1, -1), "softcap": 0.0, "q_descale": None,
        "k_descale": torch.ones(sequences, kv_heads, device="cuda"),
        "v_descale": torch.ones(sequences, kv_heads, device="cuda"),
    }  # fmt: skip
    if row["phase"] == "decode":
        arguments |= {
            "seq_threshold_3D": 128, "num_par_softmax_segments": _SEGMENTS,
            "softmax_segm_output": torch.empty(tokens, heads, _SEGMENTS, head, device="cuda"),
            "softmax_segm_max": torch.empty(tokens, heads, _SEGMENTS, device="cuda"),
            "softmax_segm_expsum": torch.empty(tokens, heads, _SEGMENTS, device="cuda"),
        }  # fmt: skip
    table = _only(head, row["phase"], _shape(row), torch, request["dtype"])

    def call() -> None:
        module._FLEET_SHAPES = table
        module.unified_attention(**arguments)

    return call, out


def _first(row: dict[str, Any], call: Any) -> None:
    """The first launch, confined where the GPU at hand stands for another."""
    module, torch, request = _held["module"], _held["torch"], _held["request"]
    kernel = module.kernel_unified_attention
    if request["lowered"]:
        here = torch.cuda.get_device_properties().shared_memory_per_multiprocessor
        module.kernel_unified_attention = Confined(kernel, row, here)
    try:
        call()
        torch.cuda.synchronize()
    finally:
        module.kernel_unified_attention = kernel


def _launched(row: dict[str, Any]) -> None:
    """Compiles the row's kernel for the GPU by launching it once; what cannot be launched shows when it is timed."""
    for problem in _PROBLEMS[row["phase"]].values():
        try:
            _first(row, _call(row, problem)[0])
        except Exception as error:
            print(f"{row}: {error}", file=sys.stderr)


def _time(rows: list[dict[str, Any]]) -> None:
    """Sets `us` of each row whose output is that of the field report's shape."""
    import triton

    wanted: dict[tuple[int, str], Any] = {}
    for row in sorted(rows, key=lambda row: _shape(row) != _REPORTED):
        times = {}
        for name, problem in _PROBLEMS[row["phase"]].items():
            try:
                call, out = _call(row, problem)
                _first(row, call)
            except Exception as error:
                print(f"{row}: {error}", file=sys.stderr)
                break
            want = wanted.setdefault((row["head_size"], name), out.clone())
            if float((out.float() - want.float()).abs().max()) > _ROUNDING:
                print(f"{row}: another output", file=sys.stderr)
                break
            bench = triton.testing.do_bench(call, warmup=20, rep=100, return_mode="median")
            times[name] = round(float(bench) * 1000, 1)
        else:
            row["us"] = times


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
