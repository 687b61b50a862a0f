"""Reads a host once: what it is, what it holds, and what its GPU and torch say of themselves. Changes nothing."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.driver_probe import read_compiler, read_driver, read_gpus
from ansible.module_utils.mounts import existing, mount_of, unescape
from ansible.module_utils.records import read_json

# Written by cloud-init at every boot; the part that every user may read.
_INSTANCE_DATA = Path("/run/cloud-init/instance-data.json")
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
    gpu = read_gpus()
    temporary = tempfile.gettempdir()
    torch = _torch(torch_prefixes, cache)
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return {
        "architecture": platform.machine(),
        "os": {
            "id": release.get("ID", "").strip('"'),
            "version_id": release.get("VERSION_ID", "").strip('"'),
            "codename": release.get("VERSION_CODENAME", "").strip('"'),
        },
        "ami": _ami(),
        "python": platform.python_version(),
        "memory": _memory(swapfile),
        "filesystems": {path: _filesystem(path) for path in paths},
        "temporary": {"path": temporary, **_filesystem(temporary)},
        "gpus": gpu["gpus"],
        "gpu_error": gpu["error"],
        "driver": {**read_driver(gpu["library"]), "cuda": gpu["cuda"]},
        "compiler": read_compiler(torch["python"] or sys.executable),
        "torch": torch,
    }


def _ami() -> str:
    """Image that the instance was started from; empty off EC2."""
    found: Any = read_json(_INSTANCE_DATA)
    for key in ("ds", "meta_data", "ami-id"):
        found = found.get(key, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, str) else ""


def _memory(swapfile: str) -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    table = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    own = 0
    for line in Path("/proc/swaps").read_text().splitlines()[1:]:
        name, _, size = line.split()[:3]
        if unescape(name) == swapfile:
            own = int(size) * 1024
    return {
        "total_bytes": table["MemTotal"],
        "swap_total_bytes": table["SwapTotal"],
        "own_swap_bytes": own,
        "swapfile_bytes": Path(swapfile).stat().st_size if swapfile and Path(swapfile).is_file() else 0,
        "overcommit_memory": int(Path("/proc/sys/vm/overcommit_memory").read_text()),
        "commit_limit_bytes": table["CommitLimit"],
    }


def _filesystem(path: str) -> dict[str, Any]:
    place = existing(Path(path))
    found, mount = os.statvfs(place), mount_of(place)
    return {
        # Two paths on one file system share its space, whatever their mounts are called.
        "id": place.stat().st_dev,
        "device": mount.device,
        "mount": mount.point,
        "fstype": mount.fstype,
        "noexec": "noexec" in mount.options,
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
    kept = read_json(cache)
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
