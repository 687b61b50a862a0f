"""Which of vLLM's kernels a build may do without, and which take longest to compile: data, with where it is from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Kernels that a build leaves out where it is told to.

    Attributes:
        sources: what is not compiled, by the end of the path, since folders moved between versions.
        undefined: macro definitions that go with it, so that nothing calls what is not there.
        below: capabilities from this one on need it for more than `lost` says, and keep it.
        lost: what cannot be served without it.
    """

    sources: tuple[str, ...]
    undefined: tuple[str, ...]
    below: str
    lost: str


# scaled_mm_entry.cu of vLLM 0.26.0 to 0.33.0: without ENABLE_SCALED_MM_C2X it says that no cutlass_scaled_mm was
# compiled. On 8.9 the same unit holds the fp8 kernels too.
LEAVE_OUT = {
    "int8_scaled_mm": LeftOut(
        ("scaled_mm_c2x.cu",),
        ("-DENABLE_SCALED_MM_C2X=1",),
        "8.9",
        "models with int8 weights and int8 activations (w8a8)",
    ),
}

# FlashAttention 2 needs 8.0 (its CMakeLists.txt: "8.0+PTX"), FlashAttention 3 needs 9.0. Where every capability is
# below, a stub is built in its place; its revision is counted up with whatever changes what it installs.
FLASH_ATTENTION_FROM = "8.0"
STUB_REVISION = 1

# Seconds of one unit for 7.5 beside 15 others, longest first: vLLM 0.33.0, nvcc 13.0.88, 16 x86 cores; 51 core-minutes
# for 67 units.
LONGEST_S = {
    "scaled_mm_c2x.cu": 438,
    "grouped_topk_kernels.cu": 165,
    "topk_softplus_sqrt_kernels.cu": 159,
    "fused_muse_spark_qknorm_rope_kv_insert_kernel.cu": 143,
    "selective_scan_fwd.cu": 123,
}


def capabilities(arch_list: str) -> list[str]:
    """The bare capabilities of a TORCH_CUDA_ARCH_LIST: `7.5;9.0a+PTX` names 7.5 and 9.0."""
    words = arch_list.replace(";", " ").replace(",", " ").split()
    return [word.partition("+")[0].rstrip("abcdefghijklmnopqrstuvwxyz") for word in words]


def all_below(arch_list: str, capability: str) -> bool:
    """Whether every capability of the list is below the given one."""
    return all(_numbers(word) < _numbers(capability) for word in capabilities(arch_list))


def identity(names: list[str], arch_list: str) -> dict[str, object]:
    """What of these choices decides the binary of a build for CUDA; of the build id."""
    stub = {"flash_attention": f"stub {STUB_REVISION}"} if all_below(arch_list, FLASH_ATTENTION_FROM) else {}
    return {**stub, **({"leave_out": sorted(names)} if names else {})}


def wrong_choice(names: list[str], arch_list: str) -> str:
    """What is wrong with leaving these out for these capabilities, in words; empty where nothing is."""
    for name in names:
        if name not in LEAVE_OUT:
            return f"{name} is no kernel that can be left out, and there are {', '.join(sorted(LEAVE_OUT))}"
        if not all_below(arch_list, LEAVE_OUT[name].below):
            return f"{name} is to be left out, and {arch_list} needs it from {LEAVE_OUT[name].below} on"
    return ""


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
