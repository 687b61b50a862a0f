#!/usr/bin/python
"""Ansible module: the source patches that a host's capability needs are in its releases, proven by compiling."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.launch_shapes import origin, shapes_for
from ansible.module_utils.patch_check import NoVerdict, compilers_of, question, run_check
from ansible.module_utils.patch_engine import Conflict, Patch, apply, carries, decoded, faults, too_old
from ansible.module_utils.patch_files import (
    installed_digest,
    replace_set,
    sha256,
    unpatched,
    vllm_version,
    write_whole,
)
from ansible.module_utils.patch_registry import patches as known_patches
from ansible.module_utils.records import read_json
from ansible.module_utils.refusals import Refusal, house_form

DOCUMENTATION = r"""
module: source_patch
short_description: Apply vLLM source patches to releases, decided and proven by the compiler
description:
  - For each release one of four outcomes, C(applied), C(in_place), C(not_needed) or C(conflict). The files are
    edited as copies, the copies are compiled for the capability, and only what fits is renamed into place.
options:
  releases: {type: list, elements: dict, required: true, description: "The releases: build_id, python, site_packages."}
  capability: {type: str, required: true, description: Capability to compile for.}
  limit_bytes: {type: int, required: true, description: "Opt-in shared memory per block, bytes."}
  shape: {type: dict, required: true, description: "dtype, block_size and layers of the model."}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
  caches: {type: path, default: /var/lib/vllm/cache, description: Folder of the compile caches by build id.}
  checkers: {type: dict, required: true, description: Texts of the compile checks by file name.}
  figures: {type: dict, required: true, description: Launch shapes by capability as the search found them.}
  check_timeout_s: {type: int, default: 600, description: "Longest time of one compile check, seconds."}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- source_patch: {releases: [], capability: '7.5', limit_bytes: 65536, shape: {}, checkers: {}, figures: {}}
"""
RETURN = "patches: {type: list, returned: always, description: One record per release; also the fact vllm_patches.}"

_HOST = os.uname().nodename
_LEAST_LIMIT_BYTES = 16384  # of the oldest GPUs that CUDA knew


class Refused(Exception):
    """A release that cannot be patched; nothing of it was changed."""

    def __init__(self, what: str, where: str, mend: str) -> None:
        super().__init__(what)
        self.refusal = Refusal(what, where, mend)


@dataclass(slots=True)
class File:
    """One file of the patch: what was found, what was there before any patch, and what shall be there.

    `expected` is the digest of the pristine file as the wheel recorded it, else as an earlier run saw it; `foreign`
    says that what was found is neither that file nor that file with the patch.
    """

    path: Path
    found: bytes
    expected: str | None
    pristine: bytes
    wanted: bytes
    foreign: bool = False


class Patcher:
    """Brings one release to its outcome."""

    def __init__(self, module: AnsibleModule, release: dict[str, Any], patch: Patch, source: str) -> None:
        self.module, self.release, self.patch, self.source = module, release, patch, source
        self.params: dict[str, Any] = module.params
        self.build_id = str(release["build_id"])
        self.site = Path(release["site_packages"])
        self.patches = Path(self.params["state"]) / "patches"
        self.kept = Path(self.params["state"]) / "pristine"
        self.record_path = self.patches / f"{self.build_id}.json"
        # Stands from before the first file is replaced until all is done: an interrupted run leaves it.
        self.unfinished = self.patches / f"{self.build_id}.unfinished"
        self.files: dict[str, File] = {}

    def run(self) -> dict[str, Any]:
        """Returns the record with this run's outcome, `changed` beside it; a refusal is recorded and raised."""
        try:
            with self.told_as_refusal():
                return self.outcome()
        except Refused as refused:
            if not self.module.check_mode and self.files:
                why = refused.refusal
                self.write_record("conflict", why.what, where=why.where, mend=why.mend)
            raise

    def outcome(self) -> dict[str, Any]:
        self.files = self.read()
        question = self.question({target: file.found for target, file in self.files.items()})
        known = self.known()
        interrupted = self.unfinished.exists()
        if known.get("question") == question and known.get("outcome") != "conflict" and not interrupted:
            outcome = "in_place" if known["outcome"] == "applied" else known["outcome"]
            return {**known, "outcome": outcome, "changed": False}
        if int(self.params["capability"].split(".")[0]) >= 8:
            return self.settle("not_needed", f"capability {self.params['capability']} is 8.0 or above", False, [], [])
        for file in self.files.values():
            self.find_pristine(file)
        stock = self.check({target: file.pristine for target, file in self.files.items()})
        if stock["fits"]:
            for file in self.files.values():
                file.wanted = file.pristine
            changed = self.put_in_place(interrupted)
            reason = "upstream's own tiles fit, by the compiler"
            if any(file.foreign for file in self.files.values()):
                reason += "; the file is not the one that the wheel installed"
            return self.settle("not_needed", reason, changed, stock["launches"], stock["launches"])
        for target, file in self.files.items():
            file.wanted = self.edited(target, file)
        report = self.check({target: file.wanted for target, file in self.files.items()})
        if not report["fits"]:
            worst = max(launch["shared_bytes"] for launch in report["launches"])
            raise Refused(
                f"the patched kernel asks for {worst} bytes of shared memory of {self.params['limit_bytes']}; "
                "nothing was changed",
                f"{self.site / next(iter(self.files))} {json.dumps(self.params['shape'])}",
                "serve a model with fewer query heads per KV head or narrower heads (triton_patch_shape)",
            )
        changed = self.put_in_place(interrupted)
        reason = f"{self.patch.reason}; {self.source}"
        if interrupted:
            reason += "; an interrupted run was finished"
        outcome = "applied" if changed else "in_place"
        return self.settle(outcome, reason, changed, report["launches"], stock["launches"])

    @contextmanager
    def told_as_refusal(self) -> Iterator[None]:
        """What the file system refuses is told in the house form."""
        try:
            yield
        except OSError as error:
            raise Refused(
                f"{error.strerror or error} (errno {error.errno}), and the file must be readable and replaceable",
                str(error.filename or self.site),
                f"findmnt -T {self.site} and ls -ld {self.patches}: make both writable for root",
            ) from error

    def read(self) -> dict[str, File]:
        """The files of the patch as they are."""
        files = {}
        version = vllm_version(self.site)
        if too_old(version, self.patch):
            raise Refused(
                f"vLLM {version} is older than {self.patch.since}, the first that patch {self.patch.id} is for",
                str(self.site),
                f"set a version of {self.patch.since} or newer in vllm_source_build_releases",
            )
        known = self.known().get("files", {})
        for target in self.patch.targets:
            path = self.site / target
            if not path.is_file():
                raise Refused("the file to patch is missing", str(path), self.rebuild())
            expected = installed_digest(self.site, target) or known.get(target, {}).get("pristine_sha256")
            found = path.read_bytes()
            files[target] = File(path, found, expected, found, found)
        return files

    def rebuild(self) -> str:
        """The command that lays the release's files anew."""
        return f"rm -r {self.release['path']} && ./runner.py converge (builds the release again)"

    def find_pristine(self, file: File) -> None:
        """Finds what the file was before any patch; raises Refused where that cannot be known."""
        try:
            file.pristine = unpatched(file.found, self.patch, file.expected)
            return
        except Conflict as conflict:
            trouble = str(conflict)
        file.foreign = True
        kept = self.kept / str(file.expected)
        if kept.is_file() and sha256(kept.read_bytes()) == file.expected:
            file.pristine = kept.read_bytes()
        elif carries(file.found, self.patch):
            raise self.conflict(f"{trouble}, and no pristine copy is kept", file)
        # Else somebody's own edit: it may be upstream's fix, so the compiler is asked before it is refused.

    def edited(self, target: str, file: File) -> bytes:
        """The patched content, or a conflict in words."""
        if file.foreign and sha256(file.pristine) != file.expected:
            what = "it is not the file that the wheel installed, its tiles do not fit, and no pristine copy is kept"
            raise self.conflict(what, file)
        try:
            patched: str = apply(decoded(file.pristine), self.patch, target)
        except Conflict as conflict:
            raise self.conflict(str(conflict), file) from conflict
        return patched.encode()

    def conflict(self, what: str, file: File) -> Refused:
        """A conflict with both digests."""
        where = f"{file.path} sha256 {sha256(file.found)}, pristine sha256 {file.expected or 'not recorded'}"
        mend = self.rebuild()
        if file.expected in (None, sha256(file.found)):
            links = ", ".join(self.patch.links)
            mend = f"serve a vLLM that patch {self.patch.id} knows ({', '.join(self.patch.shown_on)}): see {links}"
        return Refused(f"conflict: {what}; nothing was changed", where, mend)

    def check(self, contents: dict[str, bytes]) -> dict[str, Any]:
        """What the compiler says of a version of the files; asked once for the same input."""
        cached = self.patches / "checks" / f"{self.question(contents)}.json"
        report: dict[str, Any] = read_json(cached)
        if report:
            return report
        report = self.compiled(contents)
        if not self.module.check_mode:
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cached, json.dumps(report, sort_keys=True).encode())
        return report

    def compiled(self, contents: dict[str, bytes]) -> dict[str, Any]:
        """Runs the compile check with the release's own Python."""
        python, timeout_s = self.release["python"], self.params["check_timeout_s"]
        asked = {key: self.params[key] for key in ("capability", "limit_bytes", "shape")}
        try:
            report: dict[str, Any] = run_check(
                python, self.params["checkers"], self.site, contents, asked,
                timeout_s=timeout_s, scratch=self.module.tmpdir,
            )  # fmt: skip
        except NoVerdict as error:
            mend = f"check the release with {python} -c 'import torch, triton'"
            raise Refused(
                f"{error}; nothing was changed"
                if error.slow
                else f"conflict: the kernels cannot be judged for {asked['capability']}: {error}; nothing was changed",
                str(self.site / next(iter(contents))),
                "set triton_patch_check_timeout_s higher" if error.slow else mend,
            ) from error
        return report

    def put_in_place(self, interrupted: bool) -> bool:
        """Makes the files what they shall be, and takes away what the old ones left compiled."""
        changes = {file.path: file.wanted for file in self.files.values() if file.wanted != file.found}
        if self.module.check_mode or not (changes or interrupted):
            return bool(changes or interrupted)
        self.kept.mkdir(parents=True, exist_ok=True)
        for file in self.files.values():
            _keep(self.kept, file.pristine)
            if file.foreign and file.found != file.pristine:
                _keep(self.kept.parent / "set_aside", file.found)
        self.patches.mkdir(parents=True, exist_ok=True)
        write_whole(self.unfinished, b"")
        try:
            replace_set(changes)
        except OSError:
            if not interrupted and all(file.path.read_bytes() == file.found for file in self.files.values()):
                self.unfinished.unlink()
            raise
        for file in self.files.values():
            for stale in (file.path.parent / "__pycache__").glob(f"{file.path.stem}.*.pyc"):
                stale.unlink()
            name = file.path.name
            for leaving in (f"{name}.orig", f"{name}.rej", f".{name}.part"):
                file.path.with_name(leaving).unlink(missing_ok=True)
        # What was compiled from the old files would be used again, silently.
        caches = Path(self.params["caches"]) / self.build_id
        if caches.is_dir():
            gone = caches.with_name(f".{self.build_id}.stale")
            shutil.rmtree(gone, ignore_errors=True)
            caches.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
        return True

    def settle(self, outcome: str, reason: str, changed: bool, launches: list[Any], stock: list[Any]) -> dict[str, Any]:
        """Writes the record and returns it."""
        record = self.write_record(
            "applied" if outcome == "in_place" else outcome,
            reason,
            launches=launches,
            stock_launches=stock,
            shared_max_bytes=max((launch["shared_bytes"] for launch in launches), default=None),
            stock_shared_max_bytes=max((launch["shared_bytes"] for launch in stock), default=None),
            question=self.question({target: file.wanted for target, file in self.files.items()}),
        )
        if not self.module.check_mode:
            self.unfinished.unlink(missing_ok=True)
        return {**record, "outcome": outcome, "changed": changed}

    def write_record(self, outcome: str, reason: str, **more: Any) -> dict[str, Any]:
        """The release's record: outcome, reason, digests, and what else is known."""
        record = {
            "outcome": outcome,
            "reason": reason,
            "patch": self.patch.id,
            "revision": self.patch.revision,
            "build_id": self.build_id,
            "capability": self.params["capability"],
            "limit_bytes": self.params["limit_bytes"],
            "files": {
                target: {
                    "pristine_sha256": file.expected or sha256(file.pristine),
                    "sha256": sha256(file.found if outcome == "conflict" else file.wanted),
                }
                for target, file in self.files.items()
            },
            **more,
        }
        if not self.module.check_mode:
            self.patches.mkdir(parents=True, exist_ok=True)
            write_whole(self.record_path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
        return record

    def question(self, contents: dict[str, bytes]) -> str:
        """Digest of all that decides an outcome: files, neighbors, patch, checkers, compilers, shape and limit."""
        asked = {key: self.params[key] for key in ("capability", "limit_bytes", "shape", "checkers")}
        asked["patch"] = [self.patch.begin, *(edit.block for edit in self.patch.edits)]
        return str(question(self.site, contents, compilers_of(self.site), asked))

    def known(self) -> dict[str, Any]:
        """The record of an earlier run, empty where there is none."""
        found: dict[str, Any] = read_json(self.record_path)
        return found


def _keep(folder: Path, content: bytes) -> None:
    """Keeps content under its digest."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / sha256(content)
    if not path.exists():
        write_whole(path, content)


def _bad_parameters(params: dict[str, Any]) -> list[Refusal]:
    """Refuses a capability that is none and a limit that no GPU has."""
    found = []
    if not re.fullmatch(r"\d{1,2}\.\d", params["capability"]):
        found.append(
            Refusal(
                f"capability {params['capability']!r} is none, and major.minor is wanted",
                "triton_patch_capability",
                "set triton_patch_capability to what nvidia-smi --query-gpu=compute_cap says, such as '7.5'",
            )
        )
    if params["limit_bytes"] < _LEAST_LIMIT_BYTES:
        found.append(
            Refusal(
                f"{params['limit_bytes']} bytes of shared memory per block are too few, "
                f"and at least {_LEAST_LIMIT_BYTES} are wanted",
                "triton_patch_limit_bytes",
                "set triton_patch_limit_bytes to the device's opt-in limit, 65536 for capability 7.5",
            )
        )
    return found


def _bad_registry() -> list[Refusal]:
    """Refuses entries that no release could be patched by."""
    found = faults(known_patches([]))
    return [Refusal(fault, "plugins/module_utils/patch_registry.py", "correct the entry") for fault in found]


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
            "checkers": {"type": "dict", "required": True},
            "figures": {"type": "dict", "required": True},
            "check_timeout_s": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    patches: list[dict[str, Any]] = []
    refusals = [*_bad_parameters(module.params), *_bad_registry()]
    if refusals:
        module.fail_json(msg=house_form(refusals, _HOST, "triton_patch"), patches=[], changed=False, refused=True)
    measured = read_json(Path(module.params["state"]) / "launch_shapes.json")
    figures = module.params["figures"]
    source = origin(figures, module.params["capability"], measured)
    for release in module.params["releases"]:
        if not release.get("built", True):
            continue
        for patch in known_patches(shapes_for(figures, measured)):
            try:
                patches.append(Patcher(module, release, patch, source).run())
            except Refused as refused:
                refusals.append(refused.refusal)
    changed = any(patch["changed"] for patch in patches)
    if refusals:
        module.fail_json(
            msg=house_form(refusals, _HOST, "triton_patch"), patches=patches, changed=changed, refused=True
        )
    module.exit_json(changed=changed, patches=patches, ansible_facts={"vllm_patches": patches})


if __name__ == "__main__":
    main()
