"""Folders of a host in which the role's builder builds the small source, without Ansible and without units."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet.paths import PROJECT
from sandbox.standins import small_vllm

LIB = PROJECT / "roles" / "vllm_source_build" / "files"
# What the AMI's torch says of itself; there is nothing else in it.
TORCH = "from types import SimpleNamespace\n__version__ = '2.12.0+cu132'\nversion = SimpleNamespace(cuda='13.2')\n"
_NO_ROOM_NEEDED = {"mib": 1, "inodes": 1}
_MEMORY = {"mib_per_job": 1024, "largest_mib": 3200}


def prepared(
    folder: Path, cuda_home: Path, *, build_id: str = "b1", changed: Mapping[str, bytes] | None = None, **more: Any
) -> Path:
    """Makes the folders, the sdist and the build's spec, whose path is returned.

    Args:
        folder: where all of it lies.
        cuda_home: the toolkit to compile with.
        build_id: names the build and its release.
        changed: files of the source with other contents.
        more: what is otherwise in the spec.
    """
    home, source, tools = folder / "builds" / build_id, folder / "sources" / "vllm", folder / "tools"
    for path in (home, source, tools, folder / "ami" / "torch"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "ami" / "torch" / "__init__.py").write_text(TORCH)
    # The tools' environment is this one: uv and pip are here.
    if not (tools / "bin").exists():
        (tools / "bin").symlink_to(Path(sys.executable).parent)
    (tools / "requirements.stamp").write_text((LIB / "tools-requirements.txt").read_text())
    sdist = small_vllm.build_sdist(source, changed).replace(source / "sdist.tar.gz")
    spec: dict[str, Any] = {
        "name": "small", "build_id": build_id, "method": "source", "distribution": small_vllm.NAME,
        "version": small_vllm.VERSION, "target_device": "cuda", "environment": {}, "arch_list": "7.5", "leave_out": [],
        "rust_frontend": False, "rust_toolchain": "", "inputs": {}, "path": str(folder / "releases" / build_id),
        "source": {"kind": "sdist", "digest": hashlib.sha256(sdist.read_bytes()).hexdigest(), "path": str(source)},
        "torch": {
            "python": sys.executable, "site_packages": str(folder / "ami"), "version": "2.12.0+cu132", "cuda": "13.2",
        },
        "cuda_home": str(cuda_home), "host_compiler": "/usr/bin/g++", "rust_home": "/nowhere/rust", "jobs": 2,
        "mib_per_job": 0, "memory": {"below_8_0": _MEMORY, "from_8_0": _MEMORY}, "cache": str(folder / "cache"),
        "cache_environment": {}, "tools": str(tools),
        "need": dict.fromkeys(("builds", "sources", "root", "cache"), _NO_ROOM_NEEDED), **more,
    }  # fmt: skip
    (home / "spec.json").write_text(json.dumps(spec))
    return home / "spec.json"


def command(spec: Path) -> list[str]:
    """The builder, as a host runs it."""
    return [sys.executable, "-EsB", str(LIB / "build_release.py"), str(spec)]
