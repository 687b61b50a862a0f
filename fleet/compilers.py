"""Triton compilers on this machine, for programs that need torch and a given Triton and no GPU.

One environment holds torch's CPU build, and a small one for each Triton reads torch from it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from fleet.environments import NotThere, environment, site_packages
from fleet.errors import ExitCode, FleetError
from fleet.steps import Steps

# What vLLM 0.27 to 0.32 pin; every Triton from 3.6.0 to 3.8.0 compiles vLLM's kernels beside it.
TORCH = "2.13.0"
# Names an index that carries torch's CPU build, where those of pip's configuration do not.
TORCH_INDEX = "VLLM_FLEET_TORCH_INDEX"
# Measured on x86_64, Python 3.11: torch with numpy 0.85 GB, Triton 3.8.0 0.94 GB; the rest is the download's.
_TORCH_BYTES, _TRITON_BYTES = 1_300_000_000, 1_300_000_000
# The Triton that a torch requires on Linux with CUDA, from the metadata of its wheels on the package index.
TRITON_OF_TORCH = {
    "2.11.0": "3.6.0",
    "2.12.0": "3.7.0",
    "2.12.1": "3.7.1",
    "2.13.0": "3.7.1",
    "2.14.0": "3.8.0",
    "2.14.1": "3.8.0",
}


def python_with(triton: str, steps: Steps) -> Path:
    """The Python of an environment with torch's CPU build, numpy and that Triton; made the first time, then kept.

    Raises FleetError: refused where an index does not give them or the disk has no room, 2 where no such Triton is.
    """
    mend = f"{sys.executable} -m pip index versions triton (names those that are)"
    if not re.fullmatch(r"\d+\.\d+\.\d+", triton):
        raise FleetError(
            f"Triton {triton!r} is no version, and major.minor.patch is wanted",
            where=f"--triton {triton}", mend=mend, who="patch",
        )  # fmt: skip
    torch = _torch(steps)
    try:
        return environment(
            f"triton-{triton}", f"Triton {triton}", ["--no-deps", f"triton=={triton}"], _TRITON_BYTES, steps,
            beside=site_packages(torch),
        )  # fmt: skip
    except NotThere as missing:
        raise FleetError(
            f"no Triton {triton} for this Python on the package indexes: {missing}",
            where=f"--triton {triton}", mend=mend, who="patch",
        ) from missing  # fmt: skip


def _torch(steps: Steps) -> Path:
    index = os.environ.get(TORCH_INDEX)
    packages = [*(["--index", index] if index else []), f"torch=={TORCH}+cpu", "numpy"]
    try:
        return environment(f"torch-{TORCH}", f"torch {TORCH}, CPU build", packages, _TORCH_BYTES, steps)
    except NotThere as missing:
        raise FleetError(
            f"no CPU build of torch {TORCH} for this Python on the package indexes: {missing}",
            where=TORCH_INDEX, mend=f"set {TORCH_INDEX} to the address of an index that carries torch's CPU builds",
            code=ExitCode.REFUSED, who="patch",
        ) from missing  # fmt: skip
