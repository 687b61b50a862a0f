"""What vLLM's CMake wants of torch and of CUDA, from the package index, kept in the cache: what is compiled with.

Of torch's CUDA build (530 MB) headers, CMake files and empty libraries of its names are kept; nothing that is built
with it is run. Of cuBLAS and its like the headers.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from fleet.environments import check_room, locked, out_of_reach
from fleet.paths import cache_dir
from fleet.steps import Steps
from sandbox.standins import nvidia_repository

_TORCH_PARTS = re.compile(r"torch/(include/.*|share/.*|utils/cpp_extension\.py)")
_TORCH_LIBRARY = re.compile(r"torch/lib/(lib[^/]+\.so[.\d]*)")
_HEADERS = re.compile(r"(.*)/include/[^/]+\.h")
# torch's headers include theirs, and the toolkit's wheels have none.
_WITH_HEADERS = ("nvidia-cublas", "nvidia-cusparse", "nvidia-cusolver", "nvidia-curand")
_BYTES = 2_500_000_000


def torch_parts(version: str, steps: Steps) -> Path:
    """torch's package folder, of it what CMake and a compiler read."""

    def made(part: Path) -> None:
        for wheel in _downloaded(part, f"torch=={version}", "3.12"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part, [name for name in archive.namelist() if _TORCH_PARTS.fullmatch(name)])
                (part / "torch" / "lib").mkdir()
                for name in filter(None, map(_TORCH_LIBRARY.fullmatch, archive.namelist())):
                    _empty_library(part / "torch" / "lib" / name[1])

    return _kept(f"torch-{version}-{platform.machine()}", f"headers of torch {version}", steps, made) / "torch"


def toolkit(steps: Steps) -> Path:
    """A toolkit with the real nvcc 13.2 and CCCL's headers."""

    def made(part: Path) -> None:
        names = (*nvidia_repository.TOOLKIT, "nvidia-cuda-cccl")
        for wheel in nvidia_repository.toolkit_wheels(cache_dir() / "cuda-wheels", names=names):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part)
        [home] = part.glob("nvidia/cu*")
        (home / "lib64").symlink_to("lib")
        for library in home.glob("lib/lib*.so.*"):
            bare = library.with_name(library.name.partition(".so")[0] + ".so")
            if not bare.exists():
                bare.symlink_to(library.name)
        for program in [*home.glob("bin/*"), *home.glob("nvvm/bin/*")]:
            program.chmod(0o755)

    home = _kept(f"toolkit-{nvidia_repository.CUDA}-{platform.machine()}", "CUDA toolkit", steps, made)
    return next(home.glob("nvidia/cu*"))


def headers(steps: Steps) -> Path:
    """The headers of cuBLAS and its like."""

    def made(part: Path) -> None:
        (part / "include").mkdir()
        for name in _WITH_HEADERS:
            for wheel in _downloaded(part, name, "3.12"):
                with zipfile.ZipFile(wheel) as archive:
                    for member in filter(_HEADERS.fullmatch, archive.namelist()):
                        (part / "include" / Path(member).name).write_bytes(archive.read(member))

    return _kept("cuda-headers", "headers of cuBLAS and its like", steps, made) / "include"


def _kept(name: str, what: str, steps: Steps, made: Callable[[Path], None]) -> Path:
    """A folder of the cache, made whole the first time."""
    home = cache_dir() / "cuda-parts"
    home.mkdir(exist_ok=True)
    place = home / name
    with locked(home):
        if not place.is_dir():
            check_room(home, what, _BYTES)
            part = home / f".{name}.part"
            shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
            part.mkdir()
            try:
                with steps.step(what):
                    made(part)
                shutil.rmtree(part / "wheels", ignore_errors=True)
                part.rename(place)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return place


def _downloaded(folder: Path, requirement: str, python: str) -> list[Path]:
    """The wheel, in a folder of its own, which is not kept."""
    machine = platform.machine()
    tags = ("manylinux1", "manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")
    argv = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        "--python-version",
        python,
    ]
    argv += [word for tag in tags for word in ("--platform", f"{tag}_{machine}")]
    wheels = folder / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    done = subprocess.run([*argv, "-d", str(wheels), requirement], capture_output=True, text=True, check=False)
    if done.returncode:
        raise out_of_reach(f"{requirement} could not be fetched: {' '.join(done.stderr.split())[-300:]}")
    return list(wheels.glob("*.whl"))


def _empty_library(path: Path) -> None:
    argv = ["gcc", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", str(path), "-x", "c", "/dev/null"]
    subprocess.run(argv, check=True)
