"""Whether a built release is still as its installer left it, by the lists of files that wheels carry."""

from __future__ import annotations

import csv
from functools import lru_cache
from pathlib import Path

from ansible.module_utils.patch_registry import patches

PATH_FILE = "ami_torch.pth"
# What triton_patch may alter; it judges these by digest itself.
_PATCHED = {target for patch in patches([]) for target in patch.targets}


@lru_cache(maxsize=16)
def damage(site_packages: Path, torch: str, built_ns: int) -> str:
    """The first thing in words that is not as installed, or nothing.

    Sizes are compared, not contents: a release holds some ten thousand files and some GB.

    Args:
        site_packages: the release's own folder of packages.
        torch: the folder of the AMI's torch, which the release's path file must name.
        built_ns: when its record was written; a release built anew is looked at anew.
    """
    del built_ns
    path_file = site_packages / PATH_FILE
    if not path_file.is_file() or path_file.read_text().strip() != torch:
        return f"{PATH_FILE} does not lead to torch in {torch}"
    lists = sorted(site_packages.glob("*.dist-info/RECORD"))
    if not lists:
        return f"no package is in {site_packages}"
    for listing in lists:
        with listing.open(newline="", encoding="utf-8") as file:
            for name, *_, size in csv.reader(file):
                # A list cannot tell its own size.
                if not size or name in _PATCHED or name.endswith(".dist-info/RECORD"):
                    continue
                try:
                    found = (site_packages / name).stat().st_size
                except OSError:
                    return f"{name} is gone"
                if found != int(size):
                    return f"{name} has {found:,} bytes, and {int(size):,} were installed"
    return ""
