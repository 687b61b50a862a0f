"""What a CUDA build needs of the host, judged before it starts."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from job import JobError


def judge_toolchain(cuda_home: Path, compiler: str, torch_cuda: str | None, cmake_lists: str) -> list[str]:
    """Whether nvcc, torch's CUDA and the host compiler go together; warnings, or a refusal.

    The rule for nvcc and torch is the one of torch's cpp_extension: another major is an error, another minor a
    warning. The newest compiler is what the toolkit's own crt/host_config.h takes, the oldest what the source's
    CMakeLists.txt takes.
    """
    nvcc = cuda_home / "bin" / "nvcc"
    if not nvcc.is_file():
        raise _refusal(
            "there is no nvcc, and a CUDA build needs one", nvcc, "./runner.py converge --tags cuda_toolkit_sbsa"
        )
    release = re.search(r"release (\d+)\.(\d+)", _say([str(nvcc), "--version"]))
    if release is None:
        raise _refusal("nvcc does not tell its version", nvcc, f"{nvcc} --version")
    if not torch_cuda:
        raise _refusal(
            "torch has no CUDA, and a CUDA build needs one that has",
            "preflight_torch_prefixes",
            "set preflight_torch_prefixes to a torch built for CUDA",
        )
    have = f"{release[1]}.{release[2]}"
    if release[1] != torch_cuda.split(".")[0]:
        raise _refusal(
            f"nvcc is {have} and torch is built for CUDA {torch_cuda}, and the same major is wanted",
            nvcc,
            f"set cuda_toolkit_sbsa_toolkit: cuda-toolkit-{torch_cuda.replace('.', '-')}",
        )
    _judge_compiler(cuda_home, compiler, have, cmake_lists)
    return [] if have == torch_cuda else [f"nvcc is {have} and torch is built for CUDA {torch_cuda}: same major"]


def _judge_compiler(cuda_home: Path, compiler: str, nvcc: str, cmake_lists: str) -> None:
    try:
        version = _say([compiler, "-dumpfullversion", "-dumpversion"]).strip()
    except FileNotFoundError as error:
        raise _refusal("the host compiler is not there", compiler, "apt-get install g++") from error
    major = int(version.split(".")[0])
    config = cuda_home / "include" / "crt" / "host_config.h"
    newest = re.search(r"#if __GNUC__ > (\d+)", config.read_text() if config.is_file() else "")
    mend = "set vllm_source_build_host_compiler to a g++ of a version in between"
    if newest and major > int(newest[1]):
        raise _refusal(f"g++ is {version}, and nvcc {nvcc} takes none above {newest[1]}", compiler, mend)
    bounds = re.findall(r'CMAKE_CXX_COMPILER_VERSION\s+VERSION_LESS\s+"([\d.]+)"', cmake_lists)
    oldest = max(bounds, key=_numbers, default="0")
    if _numbers(version) < _numbers(oldest):
        raise _refusal(f"g++ is {version}, and the source wants {oldest} or newer", compiler, mend)


def _refusal(what: str, where: Path | str, mend: str) -> JobError:
    return JobError(what, str(where), mend, refused=True)


def _say(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
