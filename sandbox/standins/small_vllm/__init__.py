"""Stand-in for vLLM's sdist: real CUDA units that nvcc compiles for half a minute, built as vLLM's own sdist is built.

What of vLLM's build decides how a build is sized, cached, followed and resumed is the same: setuptools' `build_ext`
that configures CMake with Ninja below `build/temp…`, MAX_JOBS divided by NVCC_THREADS, sccache and then ccache as
launchers, CMAKE_ARGS appended, one abi3 module. It needs no torch headers, and of the attention it has what the
kernel patch is put into.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

NAME, VERSION = "vllm", "99.75.0"
# Compile units that nvcc takes, and all of them with the one that g++ takes, as ninja counts (the link is one more).
CUDA_UNITS, STEPS = 8, 10
SOURCE = Path(__file__).with_name("source")
_PKG_INFO = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n"


def build_sdist(folder: Path, changed: Mapping[str, bytes] | None = None) -> Path:
    """Writes `vllm-99.75.0.tar.gz` into a folder; its bytes depend on the source alone.

    Args:
        folder: where to.
        changed: files by name with other contents than the source's.
    """
    members = {"PKG-INFO": _PKG_INFO.encode()}
    for path in sorted(SOURCE.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            members[str(path.relative_to(SOURCE))] = path.read_bytes()
    members |= changed or {}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in sorted(members.items()):
            member = tarfile.TarInfo(f"{NAME}-{VERSION}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    out = folder / f"{NAME}-{VERSION}.tar.gz"
    # Stored: what a compressor makes of the same bytes differs between its versions.
    with out.open("wb") as file, gzip.GzipFile("", "wb", 0, file, mtime=0) as stream:
        stream.write(packed.getvalue())
    return out
