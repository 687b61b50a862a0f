"""What a CUDA build needs, judged on the real nvcc 13.2 (no GPU needed) and the real g++."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cuda_build import judge_toolchain
from job import JobError

GXX = shutil.which("g++") or ""
# As vLLM 0.32.0's CMakeLists.txt asks, at its lines 24 and 1566.
CMAKE = """
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS "11.3")
if (VLLM_GPU_LANG STREQUAL "CUDA"
    AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS "13")
"""


def toolkit(folder: Path, release: str, newest: int = 15) -> Path:
    """A toolkit that says a version and takes g++ up to `newest`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").write_text(
        f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.86'\n"
    )
    (folder / "bin" / "nvcc").chmod(0o755)
    (folder / "include" / "crt").mkdir(parents=True)
    (folder / "include" / "crt" / "host_config.h").write_text(f"#if __GNUC__ > {newest}\n#error\n#endif\n")
    return folder


def gxx(folder: Path, version: str) -> str:
    """A compiler that says a version."""
    path = folder / f"g++-{version}"
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("nvcc", "torch", "compiler", "words"),
    [
        # torch's cpp_extension: another major is an error, another minor a warning.
        ("13.2", "12.8", "13.3.0", "nvcc is 13.2 and torch is built for CUDA 12.8"),
        ("12.9", "13.0", "13.3.0", "nvcc is 12.9 and torch is built for CUDA 13.0"),
        ("13.2", None, "13.3.0", "torch has no CUDA"),
        # vLLM 0.32.0: "GCC >= 13 is required to build vLLM with CUDA".
        ("13.2", "13.2", "12.2.0", "g++ is 12.2.0, and the source wants 13 or newer"),
        # nvcc 13.2: "gcc versions later than 15 are not supported!"
        ("13.2", "13.2", "16.1.0", "g++ is 16.1.0, and nvcc 13.2 takes none above 15"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, nvcc: str, torch: str | None, compiler: str, words: str
) -> None:
    with pytest.raises(JobError) as caught:
        judge_toolchain(toolkit(tmp_path / "cuda", nvcc), gxx(tmp_path, compiler), torch, CMAKE)
    assert caught.value.what.startswith(words)
    assert caught.value.refused


def test_what_goes_together_is_taken(tmp_path: Path) -> None:
    home = toolkit(tmp_path / "cuda", "13.2")
    for version in ("13", "13.3.0", "15.2.0"):
        assert judge_toolchain(home, gxx(tmp_path, version), "13.2", CMAKE) == []
    assert judge_toolchain(home, gxx(tmp_path, "13.3.0"), "13.0", CMAKE) == [
        "nvcc is 13.2 and torch is built for CUDA 13.0: same major"
    ]
    # A source that asks for no more than 11.3, as those before 0.32, takes g++ 12.
    assert judge_toolchain(home, gxx(tmp_path, "12.2.0"), "13.2", CMAKE.split("if (VLLM")[0]) == []


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(JobError) as caught:
        judge_toolchain(tmp_path, "/usr/bin/g++", "13.2", CMAKE)
    assert caught.value.mend == "./runner.py converge --tags cuda_toolkit_sbsa"
    with pytest.raises(JobError, match="the host compiler is not there"):
        judge_toolchain(toolkit(tmp_path / "cuda", "13.2"), str(tmp_path / "none"), "13.2", CMAKE)


def test_the_real_toolkit_and_compiler_are_judged(cuda_home: Path) -> None:
    version = subprocess.run([GXX, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
    major = int(re.match(r"\d+", version)[0])  # type: ignore[index]
    assert major <= 15, "a machine with a g++ that nvcc 13.2 does not take: adapt this test"
    assert judge_toolchain(cuda_home, GXX, "13.2", "") == []
    with pytest.raises(JobError, match=f"the source wants {major + 1} or newer"):
        judge_toolchain(cuda_home, GXX, "13.2", f'CMAKE_CXX_COMPILER_VERSION VERSION_LESS "{major + 1}"')
