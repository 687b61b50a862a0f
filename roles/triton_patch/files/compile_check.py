#!/usr/bin/env python3
"""Compiles the real attention kernels of an installed vLLM for a capability, with no GPU, and reads what they ask for.

`compile_check.py REQUEST.json` prints JSON: `{"triton", "torch", "launches": [{kernel, phase, head_size, heads,
kv_heads, tile, block_m, warps, shared_bytes, registers, stack_bytes}], "fits"}`; a launch that was expected and did not
come, or a tile that differs between the attention and the reduction of its segments, ends it with words and no verdict.
The release's own Python runs it, so its own Triton compiles. The host code `unified_attention()` runs on CPU tensors;
each kernel launch is turned into a compilation, whose shared memory per block is the compiler's own figure. Of vLLM
only what the two source files need is imported; the rest is stubbed.

The request: `capability`, `limit_bytes`, `site_packages`, `sources` (target to the file to judge) and `shape`:
`{"dtype", "block_size", "layers": [{head_size, heads, kv_heads, sliding_window}]}`, a window of 0 for none.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

ATTENTION = "vllm/v1/attention/ops/triton_unified_attention.py"
# Phase: queries, context and number of sequences, and the kernels that are launched. A batch of many decodes is not
# split into segments; the attention then runs as for a prefill.
PHASES = {
    "prefill": (40, 40, 1, ["unified_attention"]),
    "chunked prefill": (24, 300, 1, ["unified_attention"]),
    "decode": (1, 300, 1, ["unified_attention", "reduce_segments"]),
    "batched decode": (1, 300, 200, ["unified_attention"]),
}
_SPLIT = "decode"
_SEGMENTS = 16
_MOST_SPLIT = 128
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+)")


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
                    "warps": compiled.metadata.num_warps,
                    "shared_bytes": compiled.metadata.shared,
                    **resources(compiled.asm["cubin"]),
                }
            )

        return launch


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack of each thread, from the assembled kernel, by the tool that Triton brings along."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        argv = [str(tool), "--dump-resource-usage", file.name]
        told = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    registers, stack = max((int(r), int(s)) for r, s in _RESOURCES.findall(told))
    return {"registers": registers, "stack_bytes": stack}


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


def run_host_code(module: Any, shape: dict[str, Any], layer: dict[str, int], phase: str) -> None:
    """Calls `unified_attention()` as the backend does, for one kind of layer and one phase."""
    queries, context, sequences, _ = PHASES[phase]
    dtype = getattr(torch, shape["dtype"])
    head, heads, kv_heads, block = layer["head_size"], layer["heads"], layer["kv_heads"], shape["block_size"]
    blocks, tokens = context // block + 2, queries * sequences
    q = torch.zeros(tokens, heads, head, dtype=dtype)
    cache = torch.zeros(blocks, block, kv_heads, head, dtype=dtype)
    split = phase == _SPLIT
    segments = {
        "seq_threshold_3D": _MOST_SPLIT,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": torch.zeros(_MOST_SPLIT, heads, _SEGMENTS, triton.next_power_of_2(head)),
        "softmax_segm_max": torch.zeros(_MOST_SPLIT, heads, _SEGMENTS),
        "softmax_segm_expsum": torch.zeros(_MOST_SPLIT, heads, _SEGMENTS),
    }
    module.unified_attention(
        q=q, k=cache, v=cache.clone(), out=torch.zeros_like(q),
        cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32) * queries, max_seqlen_q=queries,
        seqused_k=torch.full((sequences,), context, dtype=torch.int32), max_seqlen_k=context,
        softmax_scale=1.0, causal=True,
        window_size=(layer["sliding_window"] - 1, 0) if layer["sliding_window"] else (-1, -1),
        block_table=torch.zeros(sequences, blocks, dtype=torch.int32), softcap=0.0,
        q_descale=None, k_descale=torch.ones(sequences, kv_heads), v_descale=torch.ones(sequences, kv_heads),
        **(segments if split or sequences > 1 else {}),
    )  # fmt: skip


def judge(launches: list[dict[str, Any]], head_size: int, phase: str) -> None:
    """Ends the check where the launches of a phase are not those that were to be judged."""
    found, wanted = [launch["kernel"] for launch in launches], PHASES[phase][-1]
    if found != wanted:
        raise SystemExit(f"{phase} of head size {head_size} launches {found}, and {wanted} are expected")
    if len({launch["tile"] for launch in launches}) != 1:
        tiles = [launch["tile"] for launch in launches]
        raise SystemExit(f"{phase} of head size {head_size} launches with tiles {tiles}, and they must be the same")


def ready(capability: str, limit: int, site_packages: Path, source: Path) -> tuple[Any, list[dict[str, Any]]]:
    """The module whose launches are compilations for that capability, and the list in which they are noted."""
    major, minor = (int(part) for part in capability.split("."))
    driver.set_active(CompileOnlyDriver(major * 10 + minor, limit))
    module = load(site_packages, source, (major, minor), limit)
    launches: list[dict[str, Any]] = []
    module.kernel_unified_attention = Recorder(module.kernel_unified_attention, "unified_attention", launches)
    module.reduce_segments = Recorder(module.reduce_segments, "reduce_segments", launches)
    return module, launches


def main(request_path: str) -> int:
    """Compiles every launch of the request and prints the report."""
    request = json.loads(Path(request_path).read_text())
    limit, shape = request["limit_bytes"], request["shape"]
    module, launches = ready(
        request["capability"], limit, Path(request["site_packages"]), Path(request["sources"][ATTENTION])
    )
    for layer in shape["layers"]:
        for phase in PHASES:
            before = len(launches)
            run_host_code(module, shape, layer, phase)
            for launch in launches[before:]:
                launch |= {key: layer[key] for key in ("head_size", "heads", "kv_heads")} | {"phase": phase}
            judge(launches[before:], layer["head_size"], phase)
    fits = all(launch["shared_bytes"] <= limit for launch in launches)
    print(json.dumps({"triton": triton.__version__, "torch": torch.__version__, "launches": launches, "fits": fits}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
