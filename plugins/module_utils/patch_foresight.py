"""Whether the patches will fit a release, told from its source: an hour before the release is there to be patched."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.kernel_choices import all_below
from ansible.module_utils.patch_engine import Conflict, Patch, apply, carries, decoded, too_old

# From here on the attention kernels fit, and the patches do nothing.
_NEEDED_BELOW = "8.0"


def conflict(spec: Mapping[str, Any], patches: Iterable[Patch]) -> str:
    """What keeps a patch from fitting a release's source, in words; empty where nothing does, or none is needed.

    A source that is damaged or gone is the build's to tell, which holds it to its digest.

    Args:
        spec: of the release: method, target_device, arch_list, version and, of its fetched source, kind and path.
        patches: those that the fleet knows.
    """
    if spec["method"] != "source" or spec["target_device"] != "cuda" or not all_below(spec["arch_list"], _NEEDED_BELOW):
        return ""
    wanted = [patch for patch in patches if not too_old(spec["version"], patch)]
    try:
        files = _read(spec["source"], {target for patch in wanted for target in patch.targets})
    except (OSError, EOFError, tarfile.TarError, zlib.error):
        return ""
    for patch in wanted:
        for target in patch.targets:
            try:
                if target not in files:
                    raise Conflict("the source has no such file")
                if not carries(files[target], patch):
                    apply(decoded(files[target]), patch, target)
            except Conflict as error:
                return f"patch {patch.id} does not fit {target}: {error}"
    return ""


def _read(source: Mapping[str, Any], targets: set[str]) -> dict[str, bytes]:
    """Those files of a fetched source that are there."""
    folder = Path(source["path"])
    if source["kind"] == "git":
        checkout = folder / "checkout"
        if not checkout.is_dir():
            raise FileNotFoundError(checkout)
        return {name: (checkout / name).read_bytes() for name in targets if (checkout / name).is_file()}
    with tarfile.open(folder / "sdist.tar.gz") as tar:
        members = {member.name.partition("/")[2]: member for member in tar if member.isfile()}
        return {name: file.read() for name in targets & members.keys() if (file := tar.extractfile(members[name]))}
