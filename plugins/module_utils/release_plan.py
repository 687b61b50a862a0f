"""Which releases a host should have, under which build id, and which of them are there."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.kernel_choices import identity as identity_of_kernels
from ansible.module_utils.kernel_choices import wrong_choice
from ansible.module_utils.records import read_json
from ansible.module_utils.release_health import damage
from ansible.module_utils.version_choice import told

# What the plan itself sets in a build's environment, and the variable of the role that decides it.
DECIDED = {
    "TORCH_CUDA_ARCH_LIST": "vllm_source_build_arch_list",
    "VLLM_TARGET_DEVICE": "vllm_source_build_releases[].target_device",
    "VLLM_VERSION_OVERRIDE": "vllm_source_build_releases[].version",
    "VLLM_REQUIRE_RUST_FRONTEND": "vllm_source_build_releases[].rust_frontend",
    "RUSTUP_TOOLCHAIN": "rust_toolchain",
}


class PlanError(Exception):
    """An entry that cannot be planned: what is wrong, in which variable, and what to set."""

    def __init__(self, what: str, where: str, mend: str) -> None:
        super().__init__(what)
        self.what, self.where, self.mend = what, where, mend


@dataclass(frozen=True, slots=True)
class Torch:
    """The AMI's torch, as preflight found it."""

    python: str
    site_packages: str
    version: str
    cuda: str | None
    arch_list: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """What of the host decides a binary: machine, Python (major.minor) and CUDA capabilities to build for."""

    architecture: str
    python: str
    arch_list: str


@dataclass(frozen=True, slots=True)
class Folders:
    """Where releases and their sources live, and the Rust toolchain that is pinned (empty: the source's own)."""

    root: Path
    sources: Path
    rust_toolchain: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """One wanted release and where it stands.

    `source` is what was fetched for it (kind, digest, rust_toolchain); empty where nothing was yet, or where the
    release is a wheel. Until then the build id of a source that is not held to a digest or a commit is provisional.
    """

    name: str
    build_id: str
    path: Path
    serve: bool
    spec: dict[str, Any]
    source: dict[str, Any]

    @property
    def record(self) -> dict[str, Any] | None:
        """The release's record; None where it is not (wholly) built, or not whole any more."""
        found = self._written()
        return found if found and not self.damage else None

    @property
    def damage(self) -> str:
        """What is wrong with a release that was built whole, in words; empty where nothing is."""
        found = self._written()
        if not found:
            return ""
        built_ns = (self.path / "release.json").stat().st_mtime_ns
        return str(damage(Path(found["site_packages"]), self.spec["torch"]["site_packages"], built_ns))

    def _written(self) -> dict[str, Any]:
        found = read_json(self.path / "release.json")
        return found if found.get("build_id") == self.build_id else {}

    @property
    def rust_toolchain(self) -> str:
        """The channel that the source's rust-toolchain.toml asks for, as built or as fetched; empty where none."""
        return str((self.record or {}).get("rust_toolchain") or self.source.get("rust_toolchain") or "")


def build_id(inputs: dict[str, Any]) -> str:
    """`<distribution>-<version>-<12 hex digits>` over everything that decides the binary."""
    digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:12]
    return f"{inputs['distribution']}-{inputs['version']}-{digest}"


def resolved(wanted: dict[str, Any], method: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """An entry with what preflight decided where it leaves method (`auto`) or version (`newest`) open.

    Raises PlanError where no version was chosen for it.
    """
    found = {**wanted, "method": method if wanted.get("method", "auto") == "auto" else wanted["method"]}
    if wanted["version"] == "newest":
        found["version"] = versions.get(wanted["name"], "")
    if not found["method"] or not found["version"]:
        raise PlanError(
            "preflight decided no version and method for it, and the newest is asked for",
            f"vllm_source_build_releases: {wanted['name']}",
            "./runner.py converge --tags preflight",
        )
    return found


def source_request(wanted: dict[str, Any]) -> dict[str, Any]:
    """What to fetch for a release: kind (sdist or git), key (name of its folder), and what it is held to.

    Raises PlanError where the entry contradicts itself.
    """
    place = f"vllm_source_build_releases: {wanted['name']}"
    version = wanted["version"]
    if not wanted.get("repository"):
        stray = [key for key in ("tag", "commit") if wanted.get(key)]
        if stray:
            raise PlanError(f"{stray[0]} is set without a repository", place, "set repository in that entry")
        return {
            "kind": "sdist",
            "key": f"{wanted['distribution']}-{version}",
            "distribution": wanted["distribution"],
            "version": version,
            "digest": wanted.get("sha256") or "",
        }
    tag = wanted.get("tag") or f"v{version}"
    # The version of a changed tree is told to the build, so a release tag is the only thing that can gainsay it.
    if re.match(r"v\d", tag) and tag != f"v{version}":
        raise PlanError(f"tag {tag} and version {version} do not agree", place, f"set version to {tag[1:]}")
    if wanted.get("sha256"):
        raise PlanError("sha256 is an sdist's digest, and a repository is named", place, "set commit instead")
    repository = hashlib.sha256(wanted["repository"].encode()).hexdigest()[:8]
    return {
        "kind": "git",
        "key": f"{wanted['distribution']}-{re.sub(r'[^A-Za-z0-9.+_-]', '_', tag)}-{repository}",
        "repository": wanted["repository"],
        "tag": tag,
        "version": version,
        "digest": wanted.get("commit") or "",
    }


def fetched(request: dict[str, Any], sources: Path) -> dict[str, Any]:
    """The record of a source that is there and is the one asked for; empty where it has to be fetched.

    A checkout of another owner is none: git refuses to read it ("dubious ownership").
    """
    folder = sources / request["key"]
    found = read_json(folder / "source.json")
    if not found or folder.stat().st_uid != os.geteuid():
        return {}
    same = all(found.get(key) == request.get(key) for key in ("kind", "repository", "tag", "version"))
    return found if same and request["digest"] in ("", found["digest"]) else {}


def plan_release(wanted: dict[str, Any], torch: Torch, host: Host, folders: Folders) -> Release:
    """Turns one entry of `vllm_source_build_releases` into a release with its build id.

    Raises PlanError where the entry contradicts itself, or sets what would have no effect.
    """
    environment = dict(wanted.get("environment") or {})
    place = f"vllm_source_build_releases: {wanted['name']}"
    if wanted["method"] == "wheel" and wanted["target_device"] == "empty":
        raise PlanError("no wheel is published for target_device empty", place, "set method to source in that entry")
    for name in sorted(DECIDED.keys() & environment.keys()):
        raise PlanError(f"{name} in its environment has no effect", place, f"set {DECIDED[name]}")
    from_source = wanted["method"] == "source"
    cuda = wanted["target_device"] == "cuda"
    leave_out = sorted(wanted.get("leave_out") or [])
    if leave_out and not (from_source and cuda):
        raise PlanError(
            "leave_out has no effect but on a source build for cuda", place, "remove leave_out from that entry"
        )
    wrong = wrong_choice(leave_out, host.arch_list)
    if wrong:
        raise PlanError(wrong, place, "set leave_out in that entry to what can be left out, or to nothing")
    request = source_request(wanted) if from_source else {}
    source = fetched(request, folders.sources) if from_source else {}
    frontend = wanted.get("rust_frontend")
    frontend = from_source and (cuda if frontend is None else bool(frontend))
    inputs = {
        **{key: wanted.get(key) or "" for key in ("method", "distribution", "version", "target_device")},
        "source": source.get("digest") or request.get("digest") or wanted.get("sha256") or "",
        "environment": environment,
        "arch_list": host.arch_list if from_source and cuda else "",
        **(identity_of_kernels(leave_out, host.arch_list) if from_source and cuda else {}),
        "rust_frontend": frontend,
        "rust_toolchain": folders.rust_toolchain if frontend else "",
        **({"lock": wanted["lock"]} if wanted.get("lock") else {}),
        "torch": torch.version,
        "cuda": torch.cuda or "none",
        "python": host.python,
        "architecture": host.architecture,
    }
    identity = build_id(inputs)
    path = folders.root / identity
    spec = {
        **{key: wanted[key] for key in ("name", "method", "distribution", "version", "target_device")},
        "environment": environment,
        "arch_list": inputs["arch_list"],
        "leave_out": leave_out,
        "lock": wanted.get("lock") or "",
        "torch_judgement": told(wanted["version"], torch.version) if from_source and cuda else "",
        "rust_frontend": frontend,
        "rust_toolchain": folders.rust_toolchain or source.get("rust_toolchain") or "",
        "source": {**request, **source, "path": str(folders.sources / request["key"])} if from_source else {},
        "build_id": identity,
        "path": str(path),
        "inputs": inputs,
        "torch": {
            "python": torch.python,
            "site_packages": torch.site_packages,
            "version": torch.version,
            "cuda": torch.cuda,
            "arch_list": list(torch.arch_list),
        },
    }
    return Release(wanted["name"], identity, path, bool(wanted.get("serve")), spec, source)
