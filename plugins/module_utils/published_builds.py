"""What the published builds hold, and how an arch list is read. Pure.

The arch lists were read from the cubins inside the wheels on the package index, vLLM 0.33.0 and torch 2.14.0, and the
CUDA from that torch's metadata (it requires cuda-toolkit 13.0.3), on 2026-12-01.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ansible.module_utils.host_plan import version_pair

VERSIONS = {"vllm": "0.33.0", "torch": "2.14.0"}
CUDA = "13.0"
ARCH_LISTS: dict[str, dict[str, tuple[str, ...]]] = {
    "aarch64": {
        "vllm": ("8.0", "8.6", "8.7", "8.9", "9.0", "9.0a", "10.0", "11.0", "12.0"),
        "torch": ("8.0", "9.0", "10.0", "10.3", "11.0", "12.0"),
    },
    "x86_64": {
        "vllm": ("7.5", "8.0", "8.6", "8.9", "9.0", "9.0a", "10.0", "12.0"),
        "torch": ("7.5", "8.0", "8.6", "9.0", "10.0", "10.3", "12.0"),
    },
}


def listed(arches: Sequence[str], capability: str) -> str:
    """The entry of an arch list whose code runs on `capability`, or an empty string.

    Takes `7.5`, `sm_75`, `9.0a`, `sm_90a` and `compute_90`. A cubin runs on its own major at the same or
    a higher minor, an arch-specific one (`a`, `f`) on its own capability alone, PTX on anything newer.
    """
    wanted = version_pair(capability)
    for arch in arches:
        found = re.fullmatch(r"(sm_|compute_)?(\d+?)\.?(\d)([af]?)", arch)
        if not found:
            continue
        have = (int(found[2]), int(found[3]))
        if found[1] == "compute_":
            fits = have <= wanted and not found[4]
        elif found[4]:
            fits = have == wanted
        else:
            fits = have[0] == wanted[0] and have[1] <= wanted[1]
        if fits:
            return arch
    return ""
