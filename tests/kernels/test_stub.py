"""The stub in flash-attention's place: built and installed by vLLM's own CMake file, and vLLM's Python on top of it."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loadable_kernels import decide
from rich.console import Console

from bench.cmake_tools import python_with_cmake
from fleet import compilers, environments, vllm_sources
from fleet.steps import Durations, Steps

_STEPS = Steps(Console(file=io.StringIO()), Durations(), "test")
# What vLLM's CMakeLists.txt has set where it includes that file.
_LISTS = """
cmake_minimum_required(VERSION 3.26)
project(vllm_extensions LANGUAGES CXX)
include(FetchContent)
install(CODE "set(CMAKE_INSTALL_LOCAL_ONLY TRUE)" ALL_COMPONENTS)
set(VLLM_GPU_LANG CUDA)
set(CUDA_ARCHS 7.5)
include(@TREE@/cmake/external_projects/vllm_flash_attn.cmake)
"""
# The components that vLLM's setup.py builds and installs for flash-attention.
_COMPONENTS = ("_vllm_fa2_C", "_vllm_fa3_C", "_vllm_fa4_cutedsl_C")

Package = Callable[[str], Path]


@pytest.fixture(scope="session")
def python() -> Path:
    """A Python that has what vLLM's own Python imports, with torch's CPU build."""
    listed = vllm_sources.build_tree("newest", _STEPS).path / "requirements" / "common.txt"
    index = os.environ.get(compilers.TORCH_INDEX)
    packages = [*(["--index", index] if index else []), f"torch=={compilers.TORCH}+cpu", "-r", str(listed)]
    packages.append(f"triton=={compilers.TRITON_OF_TORCH[compilers.TORCH]}")
    # Measured: 3.0 GB.
    return environments.environment("vllm-imports", "what vLLM imports", packages, 4_000_000_000, _STEPS)


@pytest.fixture(scope="session")
def package(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """vLLM's Python of a version with what its CMake installs for flash-attention on 7.5 beside it."""

    def made(version: str) -> Path:
        tree = vllm_sources.build_tree(version, _STEPS).path
        folder = tmp_path_factory.mktemp("stub")
        (folder / "CMakeLists.txt").write_text(_LISTS.replace("@TREE@", str(tree)))
        [argument] = [word for word in decide(tree, "7.5", []).cmake_arguments if "FLASH-ATTN" in word]
        _, path = python_with_cmake(_STEPS)
        build, site = folder / "build", folder / "site"
        for argv in (
            ["cmake", "-S", str(folder), "-B", str(build), "-G", "Ninja", argument, f"-DPython_EXECUTABLE={python}"],
            ["cmake", "--build", str(build), *[f"--target={name}" for name in _COMPONENTS]],
            *(["cmake", "--install", str(build), "--prefix", str(site), "--component", name] for name in _COMPONENTS),
        ):
            subprocess.run(argv, env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}, check=True)
        shutil.copytree(tree / "vllm", site / "vllm", dirs_exist_ok=True)
        return site

    return made


def run(python: Path, site: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs the program on the package."""
    (folder / "request").write_text(json.dumps({"tree": str(site)}))
    argv = [str(python), str(Path(__file__).parent / "stubbed.py"), str(folder / "request")]
    own = {"PYTHONDONTWRITEBYTECODE": "1", "HOME": str(folder), "XDG_CACHE_HOME": str(folder)}
    return subprocess.run(argv, env=os.environ | own, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("version", ["0.26.0", "newest"])
def test_vllm_imports_and_selects_triton_on_7_5(version: str, package: Package, python: Path, tmp_path: Path) -> None:
    site = package(version)
    stub = site / "vllm" / "vllm_flash_attn"
    assert {path.name for path in stub.glob("*.so")} == {"_vllm_fa2_C.abi3.so", "_vllm_fa3_C.abi3.so"}
    done = run(python, site, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["imported"] == ["Attention", "FLASH_ATTN"]
    assert report["backend"] == "TRITON_ATTN"
    # The GPU's capability is why, not a module that is missing.
    assert report["fa2"] == "FA2 is only supported on devices with compute capability >= 8"
    assert report["modules"] == [True, True]
    # ApplyRotaryEmb calls what is installed for it on 7.5 too; one step of float16 at values around 4.
    assert report["rotary_from"] == str(stub / "layers" / "rotary.py")
    assert report["rotary"] <= 2**-8
    assert report["rest_kept"]


def test_vllm_wants_what_the_stub_brings(package: Package, python: Path, tmp_path: Path) -> None:
    site = package("newest")
    stub = site / "vllm" / "vllm_flash_attn"
    shutil.rmtree(stub / "layers")
    assert "No module named 'vllm.vllm_flash_attn.layers'" in run(python, site, tmp_path).stderr
    for module in stub.glob("*.so"):
        module.unlink()
    assert "requires the CUDA flash attention extensions" in run(python, site, tmp_path).stderr
