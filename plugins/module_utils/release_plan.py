"""Which releases a host should have, under which build id, and which of them are there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Torch:
    """The AMI's torch, as preflight found it."""

    python: str
    site_packages: str
    version: str
    cuda: str | None


@dataclass(frozen=True, slots=True)
class Release:
    """One wanted release and where it stands."""

    name: str
    build_id: str
    path: Path
    serve: bool
    spec: dict[str, Any]

    @property
    def record(self) -> dict[str, Any] | None:
        """The release's record; None where it is not (wholly) built."""
        try:
            found: dict[str, Any] = json.loads((self.path / "release.json").read_text())
        except (OSError, ValueError):
            return None
        return found if found.get("build_id") == self.build_id else None


def build_id(inputs: dict[str, Any]) -> str:
    """`<distribution>-<version>-<12 hex digits>` over everything that decides the binary."""
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]
    return f"{inputs['distribution']}-{inputs['version']}-{digest}"


def plan_release(wanted: dict[str, Any], torch: Torch, host: dict[str, str], root: Path) -> Release:
    """Turns one entry of `vllm_source_build_releases` into a release with its build id.

    Args:
        wanted: name, method, distribution, version, sha256, git_url, target_device, environment, serve.
        torch: the torch it is built against.
        host: `architecture`, `python` (major.minor) and `arch_list` (CUDA capabilities to build for).
        root: folder of the releases.
    """
    environment = dict(wanted.get("environment") or {})
    if wanted["method"] == "source" and wanted["target_device"] == "cuda":
        environment["TORCH_CUDA_ARCH_LIST"] = host["arch_list"]
    inputs = {
        **{key: wanted.get(key) or "" for key in ("method", "distribution", "version", "sha256", "git_url")},
        "target_device": wanted["target_device"],
        "environment": environment,
        "torch": torch.version,
        "cuda": torch.cuda or "none",
        "python": host["python"],
        "architecture": host["architecture"],
    }
    identity = build_id(inputs)
    path = root / identity
    spec = {
        **wanted,
        "environment": environment,
        "build_id": identity,
        "path": str(path),
        "inputs": inputs,
        "torch": {
            "python": torch.python,
            "site_packages": torch.site_packages,
            "version": torch.version,
            "cuda": torch.cuda,
        },
    }
    return Release(wanted["name"], identity, path, bool(wanted.get("serve")), spec)
