"""The release sees the AMI's torch and no other: judged after each step that installs or builds something.

What is looked at: packages of torch's in the release's own folder, files of the AMI's torch since the build began, and
version, CUDA and arch list as the release's Python imports them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from job import JobError

# What the AMI's own environment provides; a resolver that never sees these cannot replace them.
AMI_OWNED = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
_MODULES = (*AMI_OWNED, "functorch", "torchgen")
# As preflight asks: torch.cuda.get_arch_list() is empty where no GPU answers.
_PROBE = """
import json, torch
arches = torch._C._cuda_getArchFlags().split() if %r else []
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "file": torch.__file__, "arch_list": arches}))
"""


class TorchGuard:
    """Holds the AMI's torch, as preflight found it, against what a release sees of it."""

    def __init__(self, wanted: Mapping[str, Any], ask: Callable[[str], str]) -> None:
        """Takes down the state of the AMI's torch, before anything is done.

        Args:
            wanted: python, site_packages, version, cuda and, where torch has CUDA, arch_list.
            ask: runs a program text with the release's Python and returns what it prints.
        """
        self.wanted, self.ask = wanted, ask
        self.site = Path(wanted["site_packages"])
        self.before = _state(self.site)

    def judge(self, step: str, site_packages: Path) -> dict[str, Any]:
        """What the release sees of torch (torch, cuda, file, arch_list); a JobError names the step that changed it."""
        brought = list(_brought(site_packages))
        if brought:
            raise _replaced(
                step,
                "; ".join(brought),
                site_packages,
                "take what brings it out of the release's requirements, or hold that package to a version without it",
            )
        changed = _changes(self.before, _state(self.site))
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise _replaced(
                step,
                f"the AMI's torch {self.wanted['version']} was changed in place: {', '.join(changed[:3])}{more}",
                self.site,
                "start the host from its image again, and take what this step installed out of the release",
            )
        arches = list(self.wanted.get("arch_list") or [])
        found: dict[str, Any] = json.loads(self.ask(_PROBE % bool(arches)).splitlines()[-1])
        differs = [
            f"{name} {found[key] or 'none'} is seen and {wanted or 'none'} is wanted"
            for name, key, wanted in (
                ("torch", "torch", self.wanted["version"]),
                ("CUDA", "cuda", self.wanted.get("cuda") or None),
                ("arch list", "arch_list", arches),
            )
            if found[key] != wanted
        ]
        if not Path(found["file"]).is_relative_to(self.site):
            differs.append(f"torch comes from {found['file']}")
        if differs:
            mend = "grep -rl torch *.pth in that folder; remove the release and converge again"
            raise _replaced(step, "; ".join(differs), site_packages, mend)
        return found


def _replaced(step: str, what: str, where: Path, mend: str) -> JobError:
    return JobError(f"TORCH_REPLACED: {step}: {what}", str(where), mend)


def _brought(site_packages: Path) -> Iterator[str]:
    """What in the release's own folder is torch's, each with the distribution that brought it."""
    owned: set[str] = set()
    for found in distributions(path=[str(site_packages)]):
        name = re.sub(r"[-_.]+", "-", found.metadata["Name"] or "").lower()
        files = [str(file) for file in found.files or () if file.parts[0].partition(".")[0] in _MODULES]
        owned.update(Path(file).parts[0] for file in files)
        if name in AMI_OWNED:
            yield f"{name} {found.version} was installed"
        elif files:
            yield f"{name} {found.version} brings {files[0]}"
    for module in _MODULES:
        for path in (site_packages / module, site_packages / f"{module}.py"):
            if path.exists() and path.name not in owned:
                yield f"{path.name} appeared, of no distribution"


def _state(site: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file of the AMI's torch, byte-code left out, and of its distributions' records."""
    tops = [site / name for name in _MODULES]
    tops += [path for name in AMI_OWNED for path in site.glob(f"{name}-*.dist-info")]
    found = {}
    for top in tops:
        for folder, folders, files in os.walk(top):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in files:
                path = Path(folder) / name
                told = path.lstat()
                found[str(path.relative_to(site))] = (told.st_size, told.st_mtime_ns)
    return found


def _changes(before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> list[str]:
    """What appeared, went or changed; the distributions' records first, since they name a version."""
    changed = [
        f"{path} {'appeared' if path not in before else 'is gone' if path not in after else 'changed'}"
        for path in {*before, *after}
        if before.get(path) != after.get(path)
    ]
    return sorted(changed, key=lambda words: (".dist-info/" not in words, words))
