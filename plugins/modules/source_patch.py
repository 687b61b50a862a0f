#!/usr/bin/python
"""Ansible module: the source patches that a host's capability needs are in its releases, proven by compiling."""

from __future__ import annotations

import hashlib
import json
import os
import py_compile
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.source_edit import TILE_CLAMP, Conflict, Patch, apply, marked_revision, revert

DOCUMENTATION = r"""
module: source_patch
short_description: Apply vLLM source patches to releases, decided and proven by the compiler
description:
  - For each release one of four outcomes, C(applied), C(in_place), C(not_needed) or C(conflict). The file is
    edited as a copy, the copy is compiled for the capability, and only what fits is renamed into place.
options:
  releases: {type: list, elements: dict, required: true, description: "The releases: build_id, python, site_packages."}
  capability: {type: str, required: true, description: Capability to compile for.}
  limit_bytes: {type: int, required: true, description: "Opt-in shared memory per block, bytes."}
  shape: {type: dict, required: true, description: "heads, kv_heads, head_sizes, block_size, dtype, sliding_window."}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
  caches: {type: path, default: /var/lib/vllm/cache, description: Folder of the compile caches by build id.}
  checker: {type: str, required: true, description: Text of the compile check program.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- source_patch: {releases: [], capability: '7.5', limit_bytes: 65536, shape: {}, checker: ''}
"""
RETURN = "patches: {type: list, returned: always, description: One record per release.}"


@dataclass(slots=True)
class Refused(Exception):
    """A release that cannot be patched."""

    what: str
    where: str
    mend: str


class Patcher:
    """Brings one release to its outcome."""

    def __init__(self, module: AnsibleModule, release: dict[str, Any], patch: Patch) -> None:
        self.module, self.release, self.patch = module, release, patch
        self.params: dict[str, Any] = module.params
        self.state = Path(self.params["state"])
        self.target = Path(release["site_packages"]) / patch.target
        self.record_path = self.state / "patches" / f"{release['build_id']}.json"

    def run(self) -> dict[str, Any]:
        """Returns the record, `changed` beside it."""
        if not self.target.is_file():
            raise Refused(
                "the file to patch is missing",
                str(self.target),
                "reinstall the release: ./runner.py converge",
            )
        before = self.target.read_bytes()
        question = self.question(before)
        known = self.known()
        if known and known.get("question") == question and known["outcome"] != "conflict":
            return {
                **known,
                "outcome": "in_place" if known["outcome"] == "applied" else known["outcome"],
                "changed": False,
            }
        source = before.decode()
        if int(self.params["capability"].split(".")[0]) >= 8:
            return self.settle("not_needed", f"capability {self.params['capability']} is 8.0 or above", before, [])
        pristine = self.pristine(source)
        stock = self.check(pristine)
        if stock["fits"]:
            if pristine != source:
                self.replace(pristine)
            return self.settle(
                "not_needed",
                "upstream's own tiles fit, by the compiler",
                pristine.encode(),
                stock["launches"],
            )
        patched = self.edited(pristine)
        report = self.check(patched)
        if not report["fits"]:
            worst = max(launch["shared_bytes"] for launch in report["launches"])
            raise Refused(
                f"the patched kernel asks for {worst} bytes of shared memory of {self.params['limit_bytes']}",
                f"{self.target} {json.dumps(self.params['shape'])}",
                "serve a model with fewer query heads per KV head or narrower heads (triton_patch_shape)",
            )
        if patched == source:
            return self.settle("in_place", self.patch.reason, before, report["launches"], stock["launches"])
        self.replace(patched)
        return self.settle("applied", self.patch.reason, patched.encode(), report["launches"], stock["launches"])

    def edited(self, pristine: str) -> str:
        """The patched text, or a conflict in words."""
        try:
            return str(apply(pristine, self.patch))
        except Conflict as conflict:
            digest = hashlib.sha256(pristine.encode()).hexdigest()
            raise Refused(
                f"conflict: {conflict} (file sha256 {digest}); nothing was changed",
                str(self.target),
                f"serve a vLLM that patch {self.patch.id} knows, or extend it: see {', '.join(self.patch.links)}",
            ) from conflict

    def pristine(self, source: str) -> str:
        """The text without any revision of the patch; the block of an older one is taken out, never stacked on."""
        try:
            found = marked_revision(source, self.patch)
            return source if found is None else revert(source, self.patch)
        except Conflict as conflict:
            kept = self.state / "pristine" / str(self.release["build_id"])
            if kept.is_file():
                return kept.read_text()
            raise Refused(
                f"conflict: {conflict}, and no pristine copy is kept; nothing was changed",
                str(self.target),
                f"rm -r {self.release['path']} && ./runner.py converge (builds the release again)",
            ) from conflict

    def check(self, text: str) -> dict[str, Any]:
        """What the compiler says of a version of the file."""
        with tempfile.TemporaryDirectory(prefix="vllm-patch-", dir=self.state) as folder:
            source = Path(folder) / self.target.name
            source.write_text(text)
            program = Path(folder) / "compile_check.py"
            program.write_text(self.params["checker"])
            request = Path(folder) / "request.json"
            keys = ("capability", "limit_bytes", "shape")
            site = {"site_packages": self.release["site_packages"], "source": str(source)}
            request.write_text(json.dumps({**{key: self.params[key] for key in keys}, **site}))
            done = subprocess.run(
                [self.release["python"], str(program), str(request)],
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "TRITON_CACHE_DIR": f"{folder}/cache"},
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            tail = (done.stderr.strip().splitlines() or ["no word"])[-1]
            raise Refused(
                f"conflict: the kernels do not compile for {self.params['capability']}: {tail}; nothing was changed",
                str(self.target),
                f"check the release with {self.release['python']} -c 'import torch, triton'",
            )
        report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return report

    def replace(self, text: str) -> None:
        """Puts the new text in place whole, and takes away what the old one left compiled."""
        if self.module.check_mode:
            return
        kept = self.state / "pristine" / str(self.release["build_id"])
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            _write(kept, self.pristine(self.target.read_text()), self.target.stat().st_mode)
        _write(self.target, text, self.target.stat().st_mode)
        for stale in (self.target.parent / "__pycache__").glob(f"{self.target.stem}.*.pyc"):
            stale.unlink()
        py_compile.compile(str(self.target), doraise=True)
        # 32 becomes 16 and keeps the file's size: what was compiled before would be used again.
        shutil.rmtree(Path(self.params["caches"]) / self.release["build_id"], ignore_errors=True)
        for litter in (
            *self.target.parent.glob(f"{self.target.name}.orig"),
            *self.target.parent.glob(f"{self.target.name}.rej"),
        ):
            litter.unlink()

    def settle(
        self, outcome: str, reason: str, content: bytes, launches: list[Any], stock: list[Any] | None = None
    ) -> dict[str, Any]:
        """Writes the record and returns it."""
        record = {
            "outcome": "applied" if outcome == "in_place" else outcome,
            "reason": reason,
            "patch": self.patch.id,
            "revision": self.patch.revision,
            "build_id": self.release["build_id"],
            "capability": self.params["capability"],
            "limit_bytes": self.params["limit_bytes"],
            "launches": launches,
            "stock_launches": stock or launches,
            "question": self.question(content),
        }
        if not self.module.check_mode:
            self.record_path.parent.mkdir(parents=True, exist_ok=True)
            _write(self.record_path, json.dumps(record, indent=1, sort_keys=True) + "\n", 0o644)
        return {**record, "outcome": outcome, "changed": outcome == "applied"}

    def question(self, content: bytes) -> str:
        """Digest of all that decides the outcome: the file, the patch, the checker, Triton, the shape, the limit."""
        triton = sorted(str(p.name) for p in self.triton_versions())
        keys = ("capability", "limit_bytes", "shape", "checker")
        asked = json.dumps(
            [{key: self.params[key] for key in keys}, self.patch.begin, self.patch.block, triton],
            sort_keys=True,
        )
        return hashlib.sha256(content + asked.encode()).hexdigest()

    def triton_versions(self) -> list[Path]:
        """Folders that name the Triton which the release sees: its own, and the AMI's through the path files."""
        site = Path(self.release["site_packages"])
        places = [site] + [Path(line) for pth in site.glob("ami_*.pth") for line in pth.read_text().split()]
        return [found for place in places for found in place.glob("triton-*.dist-info")]

    def known(self) -> dict[str, Any] | None:
        """The record of an earlier run."""
        try:
            found: dict[str, Any] = json.loads(self.record_path.read_text())
        except (OSError, ValueError):
            return None
        return found


def _write(path: Path, text: str, mode: int) -> None:
    """Writes beside and renames, so that a reader sees the old or the new and nothing between."""
    part = path.with_name(f".{path.name}.part")
    with part.open("w", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.chmod(mode & 0o777)
    part.replace(path)


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "releases": {"type": "list", "elements": "dict", "required": True},
            "capability": {"type": "str", "required": True},
            "limit_bytes": {"type": "int", "required": True},
            "shape": {"type": "dict", "required": True},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
            "caches": {"type": "path", "default": "/var/lib/vllm/cache"},
            "checker": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    patches: list[dict[str, Any]] = []
    refusals: list[Refused] = []
    for release in module.params["releases"]:
        if not release.get("built", True):
            continue
        try:
            patches.append(Patcher(module, release, TILE_CLAMP).run())
        except Refused as refused:
            refusals.append(refused)
    changed = any(patch["changed"] for patch in patches)
    if refusals:
        first = refusals[0]
        module.fail_json(
            msg=f"triton_patch: {first.what}\n  where: {first.where}\n  mend:  {first.mend}",
            patches=patches,
            changed=changed,
            refused=True,
        )
    module.exit_json(changed=changed, patches=patches)


if __name__ == "__main__":
    main()
