"""What a CUDA build needs and what it made, judged on the real nvcc 13.2 (no GPU needed) and the real g++."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.cubin import capabilities_in, capability_of, runs_on
from cuda_build import architectures, judge_architectures, judge_toolchain
from job import JobError

GXX = shutil.which("g++") or ""
# As vLLM 0.32.0's CMakeLists.txt asks, at its lines 24 and 1566.
CMAKE = """
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS "11.3")
if (VLLM_GPU_LANG STREQUAL "CUDA"
    AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS "13")
"""


def test_device_code_is_read_from_libraries(libraries: dict[str, Path]) -> None:
    found = {name: capabilities_in(path.read_bytes()) for name, path in libraries.items()}
    assert found["t75"] == {"7.5": 1}
    assert found["t80"] == {"8.0": 1}
    assert found["both"] == {"7.5": 1, "8.0": 1}
    assert found["squeezed"] == {"7.5": 1}
    assert found["two"] == {"7.5": 2}
    assert found["padded"]["7.5"] == 2
    assert set(found["separate"]) == {"7.5"}
    assert found["host"] == {}


def test_a_cubin_says_its_capability(cuda_home: Path, tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(float *x) { x[0] = 1; }\n")
    for capability in ("7.5", "8.0", "12.0"):
        out = tmp_path / "k.cubin"
        code = capability.replace(".", "")
        subprocess.run(
            [str(cuda_home / "bin/nvcc"), f"-arch=sm_{code}", "-cubin", "-o", str(out), str(source)], check=True
        )
        assert capability_of(out.read_bytes()) == capability
    with pytest.raises(ValueError, match="not a cubin"):
        capability_of(Path("/bin/sh").read_bytes())


@pytest.mark.parametrize(
    ("code", "capability", "runs"),
    [("7.5", "7.5", True), ("8.0", "8.9", True), ("8.9", "8.6", False), ("8.0", "7.5", False), ("8.0", "9.0", False)],
)
def test_a_cubin_runs_on_its_own_major_upwards(code: str, capability: str, runs: bool) -> None:
    assert runs_on(code, capability) is runs


@pytest.mark.parametrize(
    ("names", "arch_list", "words"),
    [
        (("t75", "host"), "7.5", ""),
        (("t75", "both", "separate"), "7.5", ""),
        (("t75", "t80"), "7.5", "t80.so holds code for 8.0, and 7.5 is wanted"),
        (("t75",), "8.0", "t75.so holds code for 7.5; no library holds code for 8.0, and 8.0 is wanted"),
        (("host",), "7.5", "no library holds code for 7.5, and 7.5 is wanted"),
        (("t75", "t80"), "7.5;8.0+PTX", ""),
        (("t75",), "7.5 8.0", "no library holds code for 8.0, and 7.5 8.0 is wanted"),
        (("t80",), "8.9", ""),
    ],
)
def test_built_code_is_held_to_the_arch_list(
    libraries: dict[str, Path], names: tuple[str, ...], arch_list: str, words: str
) -> None:
    found = architectures(libraries[name] for name in names)
    assert "host.so" not in found
    if not words:
        judge_architectures(found, arch_list, Path("/r/vllm"))
        return
    with pytest.raises(JobError) as caught:
        judge_architectures(found, arch_list, Path("/r/vllm"))
    assert caught.value.what == words


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
