"""Variables of a build that nobody reads are refused, by name, with the nearest that is read."""

from __future__ import annotations

from pathlib import Path

import build_variables
import pytest
from job import JobError

# As vLLM 0.33.0's setup.py and CMake files read them.
SETUP = """
num_jobs = envs.MAX_JOBS
other_cmake_args = os.environ.get("CMAKE_ARGS")
if os.getenv("VLLM_DISABLE_SCCACHE", "0") == "1": pass
"""
CMAKE = """
if (DEFINED ENV{VLLM_CUTLASS_SRC_DIR})
  set(VLLM_CUTLASS_SRC_DIR $ENV{VLLM_CUTLASS_SRC_DIR})
endif()
find_python_from_executable(${VLLM_PYTHON_EXECUTABLE} "${PYTHON_SUPPORTED_VERSIONS}")
"""
WHERE = "vllm_source_build_releases: a"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "cmake" / "external_projects").mkdir(parents=True)
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "CMakeLists.txt").write_text("project(vllm_extensions LANGUAGES CXX)\n")
    (tmp_path / "cmake" / "external_projects" / "cutlass.cmake").write_text(CMAKE)
    # Read at run time alone.
    (tmp_path / "vllm" / "envs.py").write_text('"VLLM_LOGGING_LEVEL": lambda: os.getenv("VLLM_LOGGING_LEVEL")\n')
    return tmp_path


def refusal(tree: Path, **environment: str) -> JobError | None:
    decided = {"VLLM_FLASH_ATTN_SRC_DIR": "flash-attention is left out below 8.0", "FLEET_FIRST": "the role sets it"}
    try:
        build_variables.judge(tree, "0.33.0", environment, WHERE, decided)
    except JobError as error:
        assert error.refused
        assert error.where == WHERE
        return error
    return None


@pytest.mark.parametrize(
    "environment",
    [
        {"MAX_JOBS": "2", "VLLM_DISABLE_SCCACHE": "1", "VLLM_CUTLASS_SRC_DIR": "/x"},
        {
            "NVCC_PREPEND_FLAGS": "-lineinfo",
            "CFLAGS": "-O1",
            "SCCACHE_BUCKET": "b",
            "CCACHE_DIR": "/c",
            "AWS_REGION": "r",
        },
        {"CMAKE_ARGS": "-DVLLM_PYTHON_EXECUTABLE=/p -DCMAKE_BUILD_TYPE=Release -DCUTLASS_NVCC_ARCHS:STRING=75"},
    ],
)
def test_what_somebody_reads_is_taken(tree: Path, environment: dict[str, str]) -> None:
    assert refusal(tree, **environment) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        # The field report's hope, in no vLLM.
        (
            {"VLLM_FA_CMAKE_GPU_ARCHES": "75"},
            "VLLM_FA_CMAKE_GPU_ARCHES is set, and nothing in the build of 0.33.0 reads it",
        ),
        ({"VLLM_LOGGING_LEVEL": "DEBUG"}, "VLLM_LOGGING_LEVEL is set, and nothing in the build of 0.33.0 reads it"),
        (
            {"MAX_JOB": "2"},
            "MAX_JOB is set, and nothing in the build of 0.33.0 reads it; the nearest that is read is MAX_JOBS",
        ),
        # A variable of CMake's, read from the environment by nothing.
        (
            {"VLLM_PYTHON_EXECUTABLE": "/p"},
            "VLLM_PYTHON_EXECUTABLE is set, and nothing in the build of 0.33.0 reads it",
        ),
        (
            {"CMAKE_ARGS": "-DVLLM_PYTHON_EXECUTABEL=/p"},
            "CMAKE_ARGS defines VLLM_PYTHON_EXECUTABEL, and no CMake file of 0.33.0 reads it; the nearest that is read "
            "is VLLM_PYTHON_EXECUTABLE",
        ),
        (
            {"VLLM_FLASH_ATTN_SRC_DIR": "/fa"},
            "VLLM_FLASH_ATTN_SRC_DIR is set, and flash-attention is left out below 8.0",
        ),
        ({"CMAKE_ARGS": "-DFLEET_FIRST=a.cu"}, "CMAKE_ARGS defines FLEET_FIRST, and the role sets it"),
    ],
)
def test_what_nobody_reads_is_refused(tree: Path, environment: dict[str, str], words: str) -> None:
    error = refusal(tree, **environment)
    assert error
    assert error.what == words
    assert next(iter(environment)) in error.mend
