"""Whether the disk holds a sandbox, looked at before anything of it is made."""

from __future__ import annotations

import shutil
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir, state_dir

# Measured on x86_64: wheels 1.1 GB, images 2.2 GB, stand-ins' files 0.5 GB, a converged host 3.6 GB.
FIRST_BYTES = 9 * 10**9
AGAIN_BYTES = 4 * 10**9
# The hosts' swapfiles and the logs.
STATE_BYTES = 200 * 10**6


def check() -> None:
    """The caches' disk and the state's disk have room.

    Raises:
        FleetError: refused, with what is free and what is wanted, in bytes.
    """
    wheels = cache_dir() / "wheels"
    again = wheels.is_dir() and any(wheels.glob("torch-*.whl"))
    _check(cache_dir(), AGAIN_BYTES if again else FIRST_BYTES, "XDG_CACHE_HOME")
    _check(state_dir(), STATE_BYTES, "XDG_STATE_HOME")


def _check(folder: Path, wanted: int, variable: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise FleetError(
            f"{free:,} bytes free for the sandbox, and {wanted:,} are wanted",
            where=str(folder),
            mend=f"make room there, or set {variable} to a folder on a larger disk",
            code=ExitCode.REFUSED,
            who="sandbox",
        )
