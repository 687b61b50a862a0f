"""Source patches on a tree of vLLM's at hand, with no host and no compiler: an unpacked sdist or site-packages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fleet import host_code  # noqa: F401  (before what it makes importable)
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT

from ansible.module_utils.launch_shapes import shapes_for  # isort: skip
from ansible.module_utils.patch_engine import Conflict, Patch, apply, carries, decoded, faults, too_old  # isort: skip
from ansible.module_utils.patch_files import installed_digest, replace_set, sha256, unpatched, vllm_version  # isort: skip
from ansible.module_utils.patch_registry import patches as known_patches  # isort: skip

# What the search of launch shapes found.
FIGURES = PROJECT / "roles" / "triton_patch" / "files" / "launch_shapes.json"
# Shared memory that a block may ask for, bytes, by capability (CUDA programming guide, technical specifications).
LIMITS = {"6.0": 49152, "6.1": 49152, "6.2": 49152, "7.0": 98304, "7.2": 98304, "7.5": 65536}
PATCHES = known_patches(shapes_for(json.loads(FIGURES.read_text())))


class Outcome(StrEnum):
    """What came of one patch."""

    APPLIED = "applied"
    IN_PLACE = "in_place"
    NOT_NEEDED = "not_needed"
    REVERTED = "reverted"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class File:
    """One file: as it was found, without the patch, and with it."""

    path: Path
    found: bytes
    pristine: bytes
    patched: bytes


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of one patch; `files` maps each target to hex digests: `sha256` as it is now, `pristine_sha256`."""

    patch: str
    revision: int
    outcome: Outcome
    reason: str
    files: dict[str, dict[str, str]]

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON."""
        return asdict(self)


def apply_all(tree: Path, capability: str, patches: Sequence[Patch] = PATCHES) -> list[Result]:
    """Applies every patch that the capability needs. All files of all patches are replaced, or none.

    Raises FleetError: 2 for a tree without vLLM or a capability that is none, 6 for a conflict.
    """
    if _major(capability) >= 8:
        return _not_needed(tree, capability, patches)
    found = _read(tree, patches)
    results = []
    for patch, files in found:
        there = all(file.found == file.patched for file in files.values())
        results.append(
            _result(patch, files, Outcome.IN_PLACE if there else Outcome.APPLIED, patch.reason, patched=True)
        )
    replace_set({f.path: f.patched for _, files in found for f in files.values() if f.found != f.patched})
    return results


def revert_all(tree: Path, patches: Sequence[Patch] = PATCHES) -> list[Result]:
    """Takes every patch out again, whatever its revision and whether it would fit anew; all else stays to the byte."""
    found = _read(tree, patches, fit=False)
    results = []
    for patch, files in found:
        there = any(file.found != file.pristine for file in files.values())
        reason = "the files are as they were before the patch"
        results.append(_result(patch, files, Outcome.REVERTED if there else Outcome.ABSENT, reason, patched=False))
    replace_set({f.path: f.pristine for _, files in found for f in files.values() if f.found != f.pristine})
    return results


def status_of(tree: Path, capability: str, patches: Sequence[Patch] = PATCHES) -> list[Result]:
    """What of the patches is in the tree; changes nothing."""
    if _major(capability) >= 8:
        return _not_needed(tree, capability, patches)
    results = []
    for patch, files in _read(tree, patches):
        if all(file.found == file.patched for file in files.values()):
            results.append(_result(patch, files, Outcome.IN_PLACE, patch.reason))
        else:
            others = [target for target, file in files.items() if carries(file.found, patch)]
            reason = f"another revision is in {', '.join(others)}" if others else "no file carries it"
            results.append(_result(patch, files, Outcome.ABSENT, f"{reason}, and {patch.reason}"))
    return results


def _not_needed(tree: Path, capability: str, patches: Sequence[Patch]) -> list[Result]:
    """Whatever the files hold, as on a host: nobody's own change of them is in the way there."""
    _hold_vllm(tree)
    reason = f"capability {capability} is 8.0 or above"
    return [Result(patch.id, patch.revision, Outcome.NOT_NEEDED, reason, {}) for patch in patches]


def _read(tree: Path, patches: Sequence[Patch], *, fit: bool = True) -> list[tuple[Patch, dict[str, File]]]:
    """Without `fit` nothing is applied, and `patched` is the pristine content."""
    _hold_vllm(tree)
    for fault in faults(patches):
        raise FleetError(fault, where="plugins/module_utils/patch_registry.py", mend="correct the entry", who="patch")
    version = vllm_version(tree)
    for patch in patches:
        if fit and too_old(version, patch):
            raise FleetError(
                f"vLLM {version} is older than {patch.since}, the first that patch {patch.id} is for",
                where=str(tree), mend=f"take vLLM {patch.since} or newer", code=ExitCode.REFUSED, who="patch",
            )  # fmt: skip
    return [(patch, {target: _file(tree, patch, target, fit) for target in patch.targets}) for patch in patches]


def _hold_vllm(tree: Path) -> None:
    if not (tree / "vllm").is_dir():
        raise FleetError(
            "no vllm/ is in the tree, and an unpacked sdist or a site-packages is wanted",
            where=f"--tree {tree}", mend=f"ls {tree}", who="patch",
        )  # fmt: skip


def _file(tree: Path, patch: Patch, target: str, fit: bool) -> File:
    path = tree / target
    if not path.is_file():
        raise _conflict(patch, path, "the file to patch is missing", "", "")
    found = path.read_bytes()
    expected = installed_digest(tree, target)
    try:
        if not fit:
            pristine = unpatched(found, patch, None)
            return File(path, found, pristine, pristine)
        pristine = unpatched(found, patch, expected)
        return File(path, found, pristine, apply(decoded(pristine), patch, target).encode())
    except Conflict as conflict:
        raise _conflict(patch, path, str(conflict), sha256(found), expected or "") from conflict


def _conflict(patch: Patch, path: Path, what: str, found: str, expected: str) -> FleetError:
    digests = f" sha256 {found or 'none'}, pristine sha256 {expected or 'not recorded'}"
    return FleetError(
        f"conflict: {what}; nothing was changed",
        where=f"{path}{digests}",
        mend=f"take a vLLM that patch {patch.id} knows ({', '.join(patch.shown_on)}): see {', '.join(patch.links)}",
        code=ExitCode.REFUSED,
        who="patch",
    )


def _result(
    patch: Patch, files: dict[str, File], outcome: Outcome, reason: str, *, patched: bool | None = None
) -> Result:
    """With `patched` the files hold that now, else what was found."""
    digests = {}
    for target, file in files.items():
        now = file.found if patched is None else file.patched if patched else file.pristine
        digests[target] = {"sha256": sha256(now), "pristine_sha256": sha256(file.pristine)}
    return Result(patch.id, patch.revision, outcome, reason, digests)


def _major(capability: str) -> int:
    if not re.fullmatch(r"\d{1,2}\.\d", capability):
        what = f"capability {capability!r} is none, and major.minor is wanted"
    elif int(capability.partition(".")[0]) < 8 and capability not in LIMITS:
        what = f"capability {capability} is of no GPU that vLLM knows; below 8.0 there are {', '.join(LIMITS)}"
    else:
        return int(capability.partition(".")[0])
    raise FleetError(
        what, where=f"--capability {capability}", mend="nvidia-smi --query-gpu=compute_cap --format=csv", who="patch"
    )
