"""One well-known host and model, to be changed where a test wants another."""

from __future__ import annotations

from typing import Any

from ansible.module_utils.host_plan import MIB, Wishes

GEMMA = 10_246_621_918


def figure(head_size: int, block_m: int, shared_bytes: int, **changes: Any) -> dict[str, Any]:
    """What the compiler said of one launch shape."""
    known = {"head_size": head_size, "dtype": "float16", "phase": "prefill", "block_m": block_m, "tile": 16, "warps": 4}
    return {**known, "shared_bytes": shared_bytes, "registers": 255, "stack_bytes": 0, "us": None, **changes}


# FACTS, "The kernel patch"; the wider tile of 16 rows is stock's. Of float32 without a window, by Triton 3.7.1.
FIGURES = [
    figure(512, 8, 49_152), figure(512, 16, 65_536), figure(512, 16, 98_304, tile=32), figure(512, 32, 98_304),
    figure(512, 8, 49_152, phase="decode"), figure(512, 16, 65_536, phase="decode"),
    figure(512, 32, 98_304, phase="decode"), figure(256, 16, 32_768), figure(256, 32, 49_152),
    figure(256, 16, 49_152, dtype="float32"),
]  # fmt: skip
WISHES = Wishes(
    capabilities=("7.5", "8.0", "8.6", "8.9", "9.0"), kernel_figures={"capabilities": {"7.5": {"shapes": FIGURES}}}
)


def memory(
    total_mib: int, *, mode: int = 0, swap_mib: int = 0, limit_mib: int = 0, swapfile_mib: int = 0
) -> dict[str, int]:
    """Memory and swap as the probe reads them."""
    return {
        "total_bytes": total_mib * MIB,
        "swap_total_bytes": swap_mib * MIB,
        "overcommit_memory": mode,
        "commit_limit_bytes": limit_mib * MIB,
        "own_swap_bytes": swapfile_mib * MIB,
        "swapfile_bytes": swapfile_mib * MIB,
    }


def gpu(**changes: Any) -> dict[str, Any]:
    """A T4G (FACTS)."""
    known = {
        "name": "NVIDIA T4G",
        "capability": "7.5",
        "memory_bytes": 15360 * MIB,
        "shared_memory_per_block_bytes": 49152,
        "shared_memory_per_block_optin_bytes": 65536,
    }
    return {**known, **changes}


def driver(**changes: Any) -> dict[str, Any]:
    """A driver whose halves agree, on a kernel that has its module."""
    known = {
        "version": "595.71.05", "cuda": "13.2", "module": "595.71.05", "library": "595.71.05",
        "kernel": "6.14.0-1018-aws", "newest_kernel": "6.14.0-1018-aws", "without_module": [], "packages": [],
        "hold": [],
    }  # fmt: skip
    return {**known, **changes}


def torch(**changes: Any) -> dict[str, Any]:
    """The AMI's torch (FACTS)."""
    known = {
        "prefix": "/opt/pytorch",
        "python": "/opt/pytorch/bin/python",
        "site_packages": "/opt/pytorch/lib/python3.12/site-packages",
        "version": "2.12.0+cu132",
        "cuda": "13.2",
        "arch_list": ["sm_75", "sm_80", "sm_90", "sm_100", "sm_110", "sm_120"],
    }
    return {**known, **changes}


def filesystem(**changes: Any) -> dict[str, Any]:
    """A disk with room."""
    known = {
        "id": 1, "device": "/dev/root", "mount": "/", "fstype": "ext4", "noexec": False,
        "free_bytes": 60_000 * MIB, "free_inodes": 900_000, "total_inodes": 1_000_000,
    }  # fmt: skip
    return {**known, **changes}


def host(**changes: Any) -> dict[str, Any]:
    """A g5g.xlarge with the AMI's torch."""
    known = {
        "architecture": "aarch64",
        "os": {"id": "ubuntu", "version_id": "24.04", "codename": "noble"},
        "ami": "ami-0123456789abcdef0",
        "python": "3.12.3",
        "memory": memory(7680),
        "filesystems": {},
        "temporary": {"path": "/tmp", **filesystem()},
        "gpus": [gpu()],
        "gpu_error": "",
        "driver": driver(),
        "compiler": {"path": "/usr/bin/gcc", "headers": "/usr/include/python3.12", "python": "3.12", "error": ""},
        "torch": torch(),
    }
    return {**known, **changes}


def model(**changes: Any) -> dict[str, Any]:
    """Gemma 4 E2B as a hub tells it; heads and head sizes from FACTS."""
    known = {
        "name": "google/gemma-4-E2B-it", "local": False, "exists": True, "config": True, "missing": [],
        "model_type": "gemma4", "weights_dtype": "bfloat16", "vision": False,
        "attention": [[256, 8, 1, 512], [512, 8, 1, 0]], "chat_template": True,
        "largest_bytes": GEMMA, "weights_bytes": GEMMA, "source": "told by https://hub", "silence": {},
    }  # fmt: skip
    return {**known, **changes}
