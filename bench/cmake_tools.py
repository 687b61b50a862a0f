"""CMake and ninja for this machine, as vLLM's build requires them, in an environment of their own."""

from __future__ import annotations

from pathlib import Path

from fleet.environments import NotThere, environment, out_of_reach, site_packages
from fleet.steps import Steps

# Of vLLM 0.33.0's pyproject.toml (CMake 3.26, ninja, jinja2, which generates kernels); measured 190 MB.
_PACKAGES = ("cmake>=3.26.1", "ninja", "jinja2")
_BYTES = 400_000_000


def python_with_cmake(steps: Steps) -> tuple[Path, str]:
    """A Python that imports jinja2, and the PATH's beginning with `cmake` and `ninja`; made once, then kept.

    Raises FleetError: refused where an index does not give them or the disk has no room.
    """
    try:
        python = environment("cmake", "CMake and ninja", list(_PACKAGES), _BYTES, steps)
    except NotThere as missing:
        raise out_of_reach(f"the package index has no CMake: {missing}") from missing
    # The program itself: the script beside Python names the place where it was made.
    return python, f"{site_packages(python) / 'cmake' / 'data' / 'bin'}:{python.parent}"
