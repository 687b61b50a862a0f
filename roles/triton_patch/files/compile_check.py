#!/usr/bin/env python3
"""Compiles the real attention kernels of an installed vLLM for a capability, with no GPU, and reads what they ask for.

`compile_check.py REQUEST.json` prints JSON: `{"triton", "launches": [{kernel, phase, head_size, tile, block_m,
shared_bytes}], "fits"}`; a launch that was expected and did not come, or a tile that differs between the attention and
the reduction of its segments, ends it with words and no verdict. The release's own Python runs it, so its own Triton
compiles. The host code `unified_attention()` runs on CPU tensors; each kernel launch is turned into a compilation,
whose shared memory per block is the compiler's own figure. Of vLLM only what the two source files need is imported;
the rest is stubbed.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_ATTENTION = "vllm/v1/attention/ops/triton_unified_attention.py"
_KERNELS = {
    "prefill": ["unified_attention"],
    "chunked prefill": ["unified_attention"],
    "decode": ["unified_attention", "reduce_segments"],
}
_TOKENS = {"prefill": (40, 40), "chunked prefill": (24, 300), "decode": (1, 300)}
_SEGMENTS = 16


class Utils:
    """What the compiler asks of a driver about the device: its shared memory limit is the host's, not a table's."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def get_device_properties(self, _device: int) -> dict[str, int]:
        """The device's properties by the names that Triton uses."""
        return {
            "max_shared_mem": self._limit,
            "multiprocessor_count": 40,
            "warpSize": 32,
            "max_num_regs": 65536,
        }


class CompileOnlyDriver:
    """A driver that answers for the target and launches nothing."""

    def __init__(self, capability: int, limit: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = Utils(limit)

    def get_current_target(self) -> GPUTarget:
        """The target to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """The one device."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The null stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Tensors stay on the CPU."""
        return torch.device("cpu")


class Recorder:
    """Stands where a kernel stands: a launch compiles the kernel and notes what it asks for."""

    def __init__(self, kernel: Any, name: str, launches: list[dict[str, Any]]) -> None:
        self._kernel, self._name, self._launches = kernel, name, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            compiled = self._kernel.warmup(*args, grid=grid, **kwargs)
            self._launches.append(
                {
                    "kernel": self._name,
                    "tile": kwargs["TILE_SIZE"],
                    "block_m": kwargs.get("BLOCK_M"),
                    "shared_bytes": compiled.metadata.shared,
                }
            )

        return launch


def load(site_packages: Path, source: Path, capability: tuple[int, int], limit: int) -> Any:
    """The attention module from `source`, its neighbors from the installed vLLM, the rest of vLLM stubbed."""
    package = site_packages / "vllm"
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        module = types.ModuleType(name)
        module.__path__ = [str(site_packages.joinpath(*name.split(".")))]
        sys.modules[name] = module
    _stub(
        "vllm.logger",
        init_logger=lambda _name: types.SimpleNamespace(**dict.fromkeys(_LOG, lambda *_a, **_k: None)),
    )
    _stub("vllm.envs", VLLM_BATCH_INVARIANT=False, VLLM_TRITON_USE_TD=False)
    _stub("vllm.platforms", current_platform=Platform(capability))
    _stub("vllm.triton_utils", tl=tl, triton=triton)
    _stub("vllm.v1.kv_cache_interface", KVQuantMode=_quant_mode(package / "v1" / "kv_cache_interface.py"))
    # The patched code reads the limit from the device; the device is the one asked about.
    torch.cuda.get_device_properties = lambda _device=None: types.SimpleNamespace(
        shared_memory_per_block_optin=limit, major=capability[0], minor=capability[1]
    )
    spec = importlib.util.spec_from_file_location("vllm.v1.attention.ops.triton_unified_attention", source)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{source} is no Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_LOG = ("debug", "info", "warning", "error", "info_once", "warning_once", "debug_once")


class Platform:
    """vLLM's platform as the attention module asks it."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def get_device_capability(self, *_: Any) -> tuple[int, int]:
        """(major, minor)."""
        return self._capability

    def is_device_capability_family(self, family: int) -> bool:
        """Whether the capability is of a family such as 100."""
        return self._capability[0] == family // 10

    def fp8_dtype(self) -> torch.dtype:
        """The platform's 8-bit floating type."""
        return torch.float8_e4m3fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("is_"):
            return lambda *_a, **_k: name in ("is_cuda", "is_cuda_alike")
        raise AttributeError(name)


def _stub(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    if name == "vllm.envs":
        module.__getattr__ = lambda _name: False  # type: ignore[method-assign]
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)


def _quant_mode(path: Path) -> Any:
    """The enumeration from the installed source, without importing what surrounds it."""
    tree = ast.parse(path.read_text())
    found = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "KVQuantMode")
    scope: dict[str, Any] = {"IntEnum": enum.IntEnum, "Enum": enum.Enum}
    # Source of the very package that is to be run.
    exec(compile(ast.Module([found], []), str(path), "exec"), scope)  # noqa: S102
    return scope["KVQuantMode"]


def run_host_code(module: Any, shape: dict[str, Any], head_size: int, phase: str) -> None:
    """Calls `unified_attention()` as the backend does, for one head size and one phase."""
    queries, context = _TOKENS[phase]
    dtype = getattr(torch, shape["dtype"])
    heads, kv_heads, block = shape["heads"], shape["kv_heads"], shape["block_size"]
    blocks = context // block + 2
    q = torch.zeros(queries, heads, head_size, dtype=dtype)
    cache = torch.zeros(blocks, block, kv_heads, head_size, dtype=dtype)
    padded = triton.next_power_of_2(head_size)
    segments = {
        "seq_threshold_3D": 128 if phase == "decode" else None,
        "num_par_softmax_segments": _SEGMENTS if phase == "decode" else None,
        "softmax_segm_output": torch.zeros(queries, heads, _SEGMENTS, padded) if phase == "decode" else None,
        "softmax_segm_max": torch.zeros(queries, heads, _SEGMENTS) if phase == "decode" else None,
        "softmax_segm_expsum": torch.zeros(queries, heads, _SEGMENTS) if phase == "decode" else None,
    }
    module.unified_attention(
        q=q, k=cache, v=cache.clone(), out=torch.zeros_like(q),
        cu_seqlens_q=torch.tensor([0, queries], dtype=torch.int32), max_seqlen_q=queries,
        seqused_k=torch.tensor([context], dtype=torch.int32), max_seqlen_k=context,
        softmax_scale=1.0, causal=True,
        window_size=(shape["sliding_window"] - 1, 0) if shape["sliding_window"] and head_size < 512 else (-1, -1),
        block_table=torch.zeros(1, blocks, dtype=torch.int32), softcap=0.0,
        q_descale=None, k_descale=torch.ones(1, kv_heads), v_descale=torch.ones(1, kv_heads), **segments,
    )  # fmt: skip


def judge(launches: list[dict[str, Any]], head_size: int, phase: str) -> None:
    """Ends the check where the launches of a phase are not those that were to be judged."""
    found = [launch["kernel"] for launch in launches]
    if found != _KERNELS[phase]:
        raise SystemExit(f"{phase} of head size {head_size} launches {found}, and {_KERNELS[phase]} are expected")
    if len({launch["tile"] for launch in launches}) != 1:
        tiles = [launch["tile"] for launch in launches]
        raise SystemExit(f"{phase} of head size {head_size} launches with tiles {tiles}, and they must be the same")


def main(request_path: str) -> int:
    """Compiles every launch of the request and prints the report."""
    request = json.loads(Path(request_path).read_text())
    major, minor = (int(part) for part in request["capability"].split("."))
    limit = request["limit_bytes"]
    driver.set_active(CompileOnlyDriver(major * 10 + minor, limit))
    module = load(Path(request["site_packages"]), Path(request["sources"][_ATTENTION]), (major, minor), limit)
    launches: list[dict[str, Any]] = []
    module.kernel_unified_attention = Recorder(module.kernel_unified_attention, "unified_attention", launches)
    module.reduce_segments = Recorder(module.reduce_segments, "reduce_segments", launches)
    for head_size in request["shape"]["head_sizes"]:
        for phase in _TOKENS:
            before = len(launches)
            run_host_code(module, request["shape"], head_size, phase)
            for launch in launches[before:]:
                launch |= {"head_size": head_size, "phase": phase}
            judge(launches[before:], head_size, phase)
    fits = all(launch["shared_bytes"] <= limit for launch in launches)
    print(json.dumps({"triton": triton.__version__, "launches": launches, "fits": fits}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
