#!/usr/bin/env python3
"""Compiles the kernel of vLLM's Flex attention for a capability, with no GPU, and reads what it asks for.

`flex_check.py REQUEST.json` takes the request and prints the report of `compile_check.py`; its launches are of kernel
`flex_attention`, `tile` being BLOCK_N. Torch's inductor writes that kernel for a mask that vLLM's host code builds from
tensors on the device. So the whole path runs for real, on tensors without storage (FakeTensorMode) that say they are on
the card: vLLM's metadata builder, `FlexAttentionImpl.forward`, dynamo, inductor. What inductor wrote is compiled for
the target in the way inductor does it, and nothing is launched. The request may hold `attention_config`, the fields
`flex_attn_*` of vLLM's attention configuration where the service sets any.

Seen with torch 2.11.0 and 2.14.0 (CUDA builds, no GPU) and 2.13.0 (CPU build), Triton 3.6.0, 3.7.1 and 3.8.0, vLLM
0.26.0 to 0.33.0; it reaches into torch, and another torch may need another way in. With all of them the bytes are those
of q, k and v, which 7.5 keeps as float32: 4 * (BLOCK_M + BLOCK_N) * head size rounded up to a power of 2, whatever the
mask, the phase and the number of heads; in float32 4 * BLOCK_M * BLOCK_N more, at a head of 512 not even that.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import json
import os
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The check is the same on a machine with a GPU, and takes none of its memory.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import triton
from compile_check import CompileOnlyDriver, Platform, resources
from triton.runtime.driver import driver

FLEX = "vllm/v1/attention/backends/flex_attention.py"
# Phase: queries of each sequence.
PHASES = {"prefill": 40, "decode": 1}
_FLEX_FIELDS = ("flex_attn_q_block_size", "flex_attn_kv_block_size", "flex_attn_block_m", "flex_attn_block_n")
_CONTEXT, _SEQUENCES, _BLOCKS = 300, 3, 1000
_LONGEST, _MOST_SEQUENCES, _MOST_TOKENS = 8192, 16, 2048


class Written(Exception):
    """Ends a compilation as soon as inductor has written its source."""


class Inductor:
    """Keeps what inductor writes instead of loading it."""

    def __init__(self) -> None:
        self.source = ""
        # Fresh, since a kernel from a cache would not be written; and gone when the check ends.
        self._folder = tempfile.TemporaryDirectory()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = self._folder.name

    def install(self) -> None:
        """Puts itself between inductor's writing and its loading."""
        from torch._inductor.graph import GraphLowering

        codegen = GraphLowering.codegen

        def written(graph: Any) -> Any:
            self.source = codegen(graph)[0].value
            raise Written

        GraphLowering.codegen = written

    def kernel(self) -> tuple[str, str]:
        """Name and source of the one Triton kernel in what was written; ends the check where there is not just one."""
        calls = [
            node for node in ast.walk(ast.parse(self.source))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "async_compile.triton"
        ]  # fmt: skip
        if len(calls) != 1:
            raise SystemExit(f"inductor wrote {len(calls)} kernels for Flex attention, and one is expected")
        name, source = (ast.literal_eval(argument) for argument in calls[0].args[:2])
        return name, source


class Anything(type):
    """Whatever the source takes from vLLM and the check does not use: bases, annotations, names of values."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name

    def __getitem__(cls, _key: Any) -> Any:
        return cls


class Builder(metaclass=Anything):
    """vLLM's base of all metadata builders: it keeps what it is given."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device


def prepare(capability: tuple[int, int], limit: int) -> Inductor:
    """Lets torch and Triton believe in one card of that capability and that shared memory per block, in bytes."""
    properties = types.SimpleNamespace(
        name="compile only", major=capability[0], minor=capability[1], shared_memory_per_block_optin=limit,
        multi_processor_count=40, warp_size=32, regs_per_multiprocessor=65536, max_threads_per_block=1024,
        max_threads_per_multi_processor=1024, total_memory=1 << 34, gcnArchName="",
    )  # fmt: skip
    driver.set_active(CompileOnlyDriver(capability[0] * 10 + capability[1], limit))
    # dynamo keeps these functions when it is imported.
    torch.cuda.get_device_properties = lambda _device=None: properties
    torch.cuda.get_device_capability = lambda _device=None: capability
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    _device_guard()
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.runtime import triton_helpers

    class Card(device_interface.CudaInterface):  # type: ignore[misc]
        """What inductor asks of a device; torch itself goes on knowing that there is none."""

        @staticmethod
        def is_available() -> bool:
            """There is one to write for."""
            return True

    device_interface.get_interface_for_device("cuda")
    device_interface.register_interface_for_device("cuda", Card)
    # It would compute constants on the card; written into the kernel they are the same numbers.
    config.joint_graph_constant_folding = False
    triton_helpers.set_driver_to_gpu = lambda: None
    inductor = Inductor()
    inductor.install()
    return inductor


def _device_guard() -> None:
    """Sees to a guard of CUDA devices that does nothing: a CUDA build has one, a CPU build is lent that of the CPU.

    Indexing a tensor asks for the guard of its device, by the order of c10's DeviceType: CPU, CUDA.
    """
    torch._C._ensureCUDADeviceGuardSet()
    if torch.version.cuda is None:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
        guards[1] = guards[0]


def load(source: Path, capability: tuple[int, int]) -> Any:
    """The module of Flex attention from `source`; whatever it imports of vLLM stands for itself by name alone."""
    given = {
        "init_logger": lambda _name: types.SimpleNamespace(),
        "current_platform": Platform(capability),
        "cdiv": lambda a, b: -(a // -b),
        "is_torch_equal_or_newer": lambda version: torch.__version__ >= version,
        "is_quantized_kv_cache": lambda _dtype: False,
        "async_tensor_h2d": lambda tensor, device: tensor.to(device),
        "AttentionMetadataBuilder": Builder,
    }
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            module = _module(node.module or "")
            for name in (alias.name for alias in node.names):
                setattr(module, name, given.get(name, Anything(name, (), {})))
        elif isinstance(node, ast.Import):
            for name in (alias.name for alias in node.names if alias.name.partition(".")[0] == "vllm"):
                _module(name)
    sys.modules["vllm.envs"].VLLM_BATCH_INVARIANT = False  # type: ignore[attr-defined]
    spec = importlib.util.spec_from_file_location("vllm.v1.attention.backends.flex_attention", source)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{source} is no Python source")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    setattr(module, "get_kernel_options", _told_of_a_card(module.get_kernel_options))  # noqa: B010  (a source's own)
    return module


def _told_of_a_card(host_code: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run while torch says that there is a GPU; at all other times torch would initialize it."""

    def told(*args: Any, **kwargs: Any) -> Any:
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        try:
            return host_code(*args, **kwargs)
        finally:
            torch.cuda.is_available = available

    return told


def _module(name: str) -> types.ModuleType:
    """An empty module in place of one of vLLM, put where imports and attributes find it."""
    parent, _, child = name.rpartition(".")
    if name not in sys.modules:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
        if parent:
            setattr(_module(parent), child, sys.modules[name])
    return sys.modules[name]


def run_host_code(
    module: Any, shape: dict[str, Any], layer: dict[str, int], phase: str, attention_config: dict[str, int]
) -> None:
    """Builds the metadata and calls `forward()` as vLLM does, for one kind of layer and one phase.

    Ends in `Written`, wrapped by torch.
    """
    head, heads, kv_heads = layer["head_size"], layer["heads"], layer["kv_heads"]
    block, dtype, queries = shape["block_size"], getattr(torch, shape["dtype"]), PHASES[phase]
    tokens, device = queries * _SEQUENCES, torch.device("cuda", 0)
    attention = types.SimpleNamespace(**dict.fromkeys(_FLEX_FIELDS) | attention_config)
    config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(
            get_num_attention_heads=lambda _parallel: heads, get_num_kv_heads=lambda _parallel: kv_heads,
            get_head_size=lambda: head, max_model_len=_LONGEST, rswa_window=None,
        ),
        cache_config=types.SimpleNamespace(num_gpu_blocks=_BLOCKS), parallel_config=None,
        scheduler_config=types.SimpleNamespace(max_num_seqs=_MOST_SEQUENCES, max_num_batched_tokens=_MOST_TOKENS),
        compilation_config=types.SimpleNamespace(cudagraph_mode=None), attention_config=attention,
    )  # fmt: skip
    whole: dict[str, Any] = {"dtype": torch.int32, "device": device}
    batch = types.SimpleNamespace(
        num_reqs=_SEQUENCES, num_actual_tokens=tokens, max_query_len=queries, max_seq_len=_CONTEXT,
        query_start_loc=torch.empty(_SEQUENCES + 1, **whole), query_start_loc_cpu=torch.empty(_SEQUENCES + 1),
        seq_lens=torch.empty(_SEQUENCES, **whole), slot_mapping=torch.empty(tokens, device=device, dtype=torch.int64),
        block_table_tensor=torch.empty(_SEQUENCES, _LONGEST // block, **whole), causal=True,
        compute_num_computed_tokens=lambda: torch.empty(_SEQUENCES, **whole), mm_req_doc_ranges=None,
        rswa_prefix_lens=None,
    )  # fmt: skip
    # The program that makes a mask's blocks, where vLLM compiles one, is not the one to judge.
    module.create_block_mask_compiled = module.create_block_mask
    # Which request a token is of depends on values, and these tensors have none.
    module._offsets_to_doc_ids_tensor = lambda *_offsets: torch.empty(tokens, **whole)
    builder = module.FlexAttentionMetadataBuilder(types.SimpleNamespace(block_size=block), [], config, device)
    implementation = module.FlexAttentionImpl(
        heads, head, head**-0.5, kv_heads, None, layer["sliding_window"] or None, "auto",
        block_m=attention.flex_attn_block_m, block_n=attention.flex_attn_block_n,
    )  # fmt: skip
    values: dict[str, Any] = {"dtype": dtype, "device": device}
    query, output = (torch.empty(tokens, heads, head, **values) for _ in range(2))
    key, value = (torch.empty(tokens, kv_heads, head, **values) for _ in range(2))
    cache = torch.empty(_BLOCKS, block, kv_heads, 2 * head, **values).transpose(1, 2)
    implementation.forward(types.SimpleNamespace(), query, key, value, cache, builder.build(0, batch), output)


def launch(
    module: Any,
    inductor: Inductor,
    shape: dict[str, Any],
    layer: dict[str, int],
    phase: str,
    attention_config: dict[str, int],
) -> dict[str, Any]:
    """The launch of one kind of layer in one phase, as a row of the report; ends the check where there is none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    inductor.source = ""
    torch._dynamo.reset()
    failed = ""
    try:
        with FakeTensorMode(), torch.inference_mode():
            run_host_code(module, shape, layer, phase, attention_config)
    except Exception as error:
        failed = f": {error}"
    if not inductor.source:
        raise SystemExit(f"{phase} of head size {layer['head_size']}: no kernel of Flex attention was written{failed}")
    name, source = inductor.kernel()
    compiled, blocks = compile_as_inductor(name, source)
    return {
        "kernel": "flex_attention", "phase": phase, **{key: layer[key] for key in ("head_size", "heads", "kv_heads")},
        "tile": blocks["BLOCK_N"], "block_m": blocks["BLOCK_M"], "warps": compiled.metadata.num_warps,
        "shared_bytes": compiled.metadata.shared, **resources(compiled.asm["cubin"]),
    }  # fmt: skip


def compile_as_inductor(name: str, source: str) -> tuple[Any, dict[str, int]]:
    """The compiled kernel and the sizes that inductor fixed in it."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_heuristics

    kernel = getattr(PyCodeCache.load(source), name)
    kept: list[Any] = []
    compiling = triton_heuristics.triton.compile

    def keep(*args: Any, **kwargs: Any) -> Any:
        kept.append(compiling(*args, **kwargs))
        return kept[-1]

    triton_heuristics.triton.compile = keep
    try:
        kernel._precompile_config(kernel.configs[0])
    finally:
        triton_heuristics.triton.compile = compiling
    return kept[0], kernel.inductor_meta["config_args"]


def launches(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Every launch of the request, as rows of the report. Nothing may have imported dynamo before."""
    major, minor = (int(part) for part in request["capability"].split("."))
    inductor = prepare((major, minor), request["limit_bytes"])
    module = load(Path(request["sources"][FLEX]), (major, minor))
    shape, attention_config = request["shape"], request.get("attention_config", {})
    return [
        launch(module, inductor, shape, layer, phase, attention_config)
        for layer in shape["layers"] for phase in PHASES
    ]  # fmt: skip


def main(request_path: str) -> int:
    """Compiles every launch of the request and prints the report."""
    request = json.loads(Path(request_path).read_text())
    found = launches(request)
    fits = all(one["shared_bytes"] <= request["limit_bytes"] for one in found)
    print(json.dumps({"triton": triton.__version__, "torch": torch.__version__, "launches": found, "fits": fits}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
