"""Reads a host once: what it is, what it holds, and what its GPU and torch say of themselves. Changes nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Asked in a child process: a driver library that crashes must not take the probe with it. Numbers are the CUDA
# driver API's CUdevice_attribute: 8 shared memory per block, 97 the same with opt-in, 75 and 76 the capability.
_CUDA = """
import ctypes, json
cuda = ctypes.CDLL("libcuda.so.1")
def ask(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        raise SystemExit(f"{name} answered {code}")
ask("cuInit", 0)
version, count, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
ask("cuDriverGetVersion", ctypes.byref(version))
ask("cuDeviceGetCount", ctypes.byref(count))
gpus = []
for index in range(count.value):
    device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
    ask("cuDeviceGet", ctypes.byref(device), index)
    ask("cuDeviceGetName", name, 128, device)
    ask("cuDeviceTotalMem_v2", ctypes.byref(size), device)
    def attribute(number):
        ask("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value
    gpus.append({"name": name.value.decode(), "capability": f"{attribute(75)}.{attribute(76)}",
        "memory_bytes": size.value, "shared_memory_per_block_bytes": attribute(8),
        "shared_memory_per_block_optin_bytes": attribute(97)})
print(json.dumps({"cuda": f"{version.value // 1000}.{version.value % 1000 // 10}", "gpus": gpus}))
"""
_TORCH = """
import json, torch
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda or "",
    "arch_list": list(torch._C._cuda_getArchFlags().split()) if torch.version.cuda else []}))
"""


def read_host(paths: Sequence[str], torch_prefixes: Sequence[str], swapfile: str, cache: Path) -> dict[str, Any]:
    """Everything the plan is made from.

    Args:
        paths: where builds and releases write; a path that is not there yet counts as its nearest parent.
        torch_prefixes: environments in which torch may be, the first that holds one wins.
        swapfile: this project's own swapfile, which no decision may count on.
        cache: file of torch's own answer, which is asked again only where its files changed.
    """
    gpu = _gpus()
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return {
        "architecture": platform.machine(),
        "os": {
            "id": release.get("ID", "").strip('"'),
            "version_id": release.get("VERSION_ID", "").strip('"'),
            "codename": release.get("VERSION_CODENAME", "").strip('"'),
        },
        "python": platform.python_version(),
        "memory": _memory(swapfile),
        "filesystems": {path: _filesystem(path) for path in paths},
        "gpus": gpu["gpus"],
        "gpu_error": gpu["error"],
        "driver": {"version": _driver(), "cuda": gpu["cuda"]},
        "torch": _torch(torch_prefixes, cache),
    }


def read_model(path: str, checkpoint_bytes: int) -> dict[str, Any]:
    """What a local model's folder holds; for a name on the hub only the size that was given is known."""
    folder = Path(path)
    known: dict[str, Any] = {
        "path": path,
        "exists": False,
        "config": False,
        "chat_template": False,
        "model_type": "",
    }
    known |= {"largest_bytes": checkpoint_bytes, "weights_bytes": checkpoint_bytes}
    if not path.startswith("/") or not folder.is_dir():
        return known
    sizes = _weights(folder)
    config = _json(folder / "config.json")
    template = any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json"))
    return {
        **known,
        "exists": True,
        "config": (folder / "config.json").is_file(),
        "chat_template": template or "chat_template" in _json(folder / "tokenizer_config.json"),
        "model_type": str(config.get("model_type", "")),
        "largest_bytes": max(sizes, default=checkpoint_bytes),
        "weights_bytes": sum(sizes) or checkpoint_bytes,
    }


def _weights(folder: Path) -> list[int]:
    """Sizes of the weight files that are loaded: safetensors where there are any, else the older formats."""
    for patterns in (("*.safetensors",), ("*.bin", "*.pt", "*.pth"), ("*.gguf",)):
        sizes = [file.stat().st_size for pattern in patterns for file in folder.glob(pattern)]
        if sizes:
            return sizes
    return []


def _gpus() -> dict[str, Any]:
    command = [sys.executable, "-c", _CUDA]
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return {"gpus": [], "cuda": "", "error": "the driver library did not answer within 60 s"}
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return {"gpus": [], "cuda": "", "error": words}
    return {**json.loads(done.stdout), "error": ""}


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def _memory(swapfile: str) -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    table = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    own = 0
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        name, _, size = line.split()[:3]
        if name == swapfile:
            own = int(size) * 1024
    return {
        "total_bytes": table["MemTotal"],
        "swap_total_bytes": table["SwapTotal"],
        "own_swap_bytes": own,
        "overcommit_memory": int(Path("/proc/sys/vm/overcommit_memory").read_text()),
        "commit_limit_bytes": table["CommitLimit"],
    }


def _filesystem(path: str) -> dict[str, Any]:
    place = Path(path)
    while not place.exists():
        place = place.parent
    found = os.statvfs(place)
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [m for m in mounts if place == Path(m[1]) or Path(m[1]) in place.resolve().parents]
    # Of two mounts on one folder the later one is seen.
    device, mount, fstype, options = max(reversed(inside), key=lambda m: len(m[1]))[:4]
    return {
        "device": device,
        "mount": mount,
        "fstype": fstype,
        "noexec": "noexec" in options.split(","),
        "free_bytes": found.f_bavail * found.f_frsize,
        "free_inodes": found.f_favail,
        "total_inodes": found.f_files,
    }


def _torch(prefixes: Sequence[str], cache: Path) -> dict[str, Any]:
    nothing = {"prefix": "", "python": "", "site_packages": "", "version": "", "cuda": "", "arch_list": []}
    for prefix in prefixes:
        for site in sorted(Path(prefix).glob("lib/python3*/site-packages")):
            python = Path(prefix) / "bin" / "python"
            version = site / "torch" / "version.py"
            if version.is_file() and python.exists():
                place = {"prefix": prefix, "python": str(python), "site_packages": str(site)}
                return {**nothing, **place, **_ask_torch(python, version, cache)}
    return nothing


def _ask_torch(python: Path, version: Path, cache: Path) -> dict[str, Any]:
    """torch's own answer; importing it takes seconds, so an answer for the same file is kept."""
    key = f"{version}:{version.stat().st_mtime_ns}"
    kept = _json(cache)
    if kept.get("key") == key:
        return dict(kept["answer"])
    # A neutral folder: a `torch` beside the caller would shadow the image's.
    done = subprocess.run([str(python), "-c", _TORCH], cwd="/", capture_output=True, text=True, check=False)
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return {"version": _version_text(version), "error": words}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def torch_cache(host: dict[str, Any]) -> dict[str, Any]:
    """What to keep so that torch need not be asked again."""
    torch = host["torch"]
    if not torch["site_packages"] or torch.get("error"):
        return {}
    version = Path(torch["site_packages"]) / "torch" / "version.py"
    answer = {key: torch[key] for key in ("version", "cuda", "arch_list")}
    return {"key": f"{version}:{version.stat().st_mtime_ns}", "answer": answer}


def _version_text(version: Path) -> str:
    for line in version.read_text().splitlines():
        if line.startswith("__version__"):
            return line.split("=")[1].strip().strip("'\"")
    return "unknown"


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
