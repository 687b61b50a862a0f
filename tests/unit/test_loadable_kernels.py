"""What a build for a capability compiles, and in which order, through the real CMake and ninja."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.kernel_choices import LEAVE_OUT, STUB_REVISION, all_below, capabilities, wrong_choice
from job import JobError
from loadable_kernels import decide
from rich.console import Console

from bench.cmake_tools import python_with_cmake
from fleet.paths import PROJECT
from fleet.steps import Durations, Steps

STUB = PROJECT / "roles" / "vllm_source_build" / "files" / "flash_attn_stub"
# As vLLM 0.33.0's CMakeLists.txt names project, source and definition; C++ in place of CUDA. The flags of one language
# stand in a generator expression there, as here.
LISTS = """
cmake_minimum_required(VERSION 3.26)
project(vllm_extensions LANGUAGES CXX)
add_library(_C_stable_libtorch MODULE
  csrc/a.cpp csrc/entry.cpp csrc/quantization/scaled_mm_c2x.cu)
set_source_files_properties(csrc/quantization/scaled_mm_c2x.cu PROPERTIES LANGUAGE CXX COMPILE_OPTIONS -xc++)
target_compile_options(_C_stable_libtorch PRIVATE
  $<$<COMPILE_LANGUAGE:CXX>:-DONE=1;-DENABLE_SCALED_MM_C2X=1;-DTWO=2>)
add_library(_moe_C_stable_libtorch MODULE csrc/a.cpp)
target_compile_options(_moe_C_stable_libtorch PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-DENABLE_SCALED_MM_C2X=1>)
"""


@pytest.fixture(autouse=True)
def cmake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real CMake and ninja on the PATH."""
    _, path = python_with_cmake(Steps(Console(file=io.StringIO()), Durations(), "test"))
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    csrc = tmp_path / "tree" / "csrc"
    (csrc / "quantization").mkdir(parents=True)
    (csrc.parent / "CMakeLists.txt").write_text(LISTS)
    (csrc / "a.cpp").write_text("static_assert(ONE + TWO == 3);\n".replace("static", "#ifdef ONE\nstatic") + "#endif\n")
    (csrc / "entry.cpp").write_text("#ifdef ENABLE_SCALED_MM_C2X\n#error it is called\n#endif\n")
    (csrc / "quantization" / "scaled_mm_c2x.cu").write_text("int scaled_mm() { return 1; }\n")
    flash = csrc.parent / "cmake" / "external_projects"
    flash.mkdir(parents=True)
    (flash / "vllm_flash_attn.cmake").write_text("")
    return csrc.parent


def configured(tree: Path, arguments: list[str]) -> tuple[int, str]:
    """Exit status and output of the real CMake."""
    build = tree.parent / "build"
    argv = ["cmake", "-S", str(tree), "-B", str(build), "-G", "Ninja"]
    done = subprocess.run([*argv, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def started(tree: Path) -> list[str]:
    """What the real ninja compiles with one job, in its order; empty where it fails."""
    argv = ["ninja", "-v", "-j1", "-C", str(tree.parent / "build"), "_C_stable_libtorch"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    found = [line.rpartition("/")[2] for line in done.stdout.splitlines() if " -c " in line]
    return found if done.returncode == 0 else []


def test_the_longest_unit_starts_first(tree: Path) -> None:
    (tree / "csrc" / "entry.cpp").write_text("")
    assert configured(tree, [])[0] == 0
    assert started(tree) == ["a.cpp", "entry.cpp", "scaled_mm_c2x.cu"]
    subprocess.run(["rm", "-r", str(tree.parent / "build")], check=True)
    decided = decide(tree, "7.5", [])
    assert decided.words == {"flash_attention": "left out: needs 8.0, and 7.5 is asked for"}
    assert configured(tree, decided.cmake_arguments)[0] == 0
    assert started(tree) == ["scaled_mm_c2x.cu", "a.cpp", "entry.cpp"]


def test_what_is_left_out_is_neither_compiled_nor_called(tree: Path) -> None:
    assert configured(tree, [])[0] == 0
    assert started(tree) == [], "entry.cpp does not compile while the definition is there"
    decided = decide(tree, "7.5", ["int8_scaled_mm"])
    assert configured(tree, decided.cmake_arguments)[0] == 0
    assert started(tree) == ["a.cpp", "entry.cpp"]
    words = "left out: as asked for; lost are models with int8 weights and int8 activations (w8a8)"
    assert decided.words["int8_scaled_mm"] == words


def test_cmake_refuses_a_choice_that_leaves_nothing_out(tree: Path) -> None:
    lists = tree / "CMakeLists.txt"
    lists.write_text(LISTS.replace("csrc/entry.cpp csrc/quantization/scaled_mm_c2x.cu)", "csrc/entry.cpp)"))
    # The source's build still names it, for capabilities that are not asked for.
    status, said = configured(tree, decide(tree, "7.5", ["int8_scaled_mm"]).cmake_arguments)
    assert status != 0
    assert "nothing compiles scaled_mm_c2x.cu, which is to be left out" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arch_list", "left_out", "words"),
    [
        ("7.5", ["int8"], "int8 is no kernel that can be left out, and there are int8_scaled_mm"),
        ("7.5;8.9", ["int8_scaled_mm"], "int8_scaled_mm is to be left out, and 7.5;8.9 needs it from 8.9 on"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(tree: Path, arch_list: str, left_out: list[str], words: str) -> None:
    assert wrong_choice(left_out, arch_list) == words
    with pytest.raises(JobError) as caught:
        decide(tree, arch_list, left_out)
    assert (caught.value.what, caught.value.refused) == (words, True)


def test_a_choice_of_another_version_is_refused(tree: Path) -> None:
    (tree / "CMakeLists.txt").write_text(LISTS.replace("scaled_mm_c2x.cu", "scaled_mm_v2.cu"))
    with pytest.raises(JobError) as caught:
        decide(tree, "7.5", ["int8_scaled_mm"])
    assert caught.value.what == "int8_scaled_mm is to be left out, and the source's build names no scaled_mm_c2x.cu"
    assert caught.value.refused


@pytest.mark.parametrize(
    ("arch_list", "stubbed"),
    [("7.5", True), ("7.0 7.5+PTX", True), ("7.5;8.0", False), ("8.9", False), ("10.0f", False)],
)
def test_flash_attention_is_left_out_below_8_0_alone(tree: Path, arch_list: str, stubbed: bool) -> None:
    decided = decide(tree, arch_list, [])
    word = f"-DFETCHCONTENT_SOURCE_DIR_VLLM-FLASH-ATTN={STUB}"
    assert (word in decided.cmake_arguments) is stubbed
    assert ("flash_attention" in decided.words) is stubbed
    assert ("VLLM_FLASH_ATTN_SRC_DIR" in decided.taken) is stubbed


def test_words_stand_before_the_releases_own(tree: Path) -> None:
    decided = decide(tree, "7.5", [])
    told = decided.told({"CMAKE_ARGS": "-DX=1", "MAX_JOBS": "2"})
    assert told["CMAKE_ARGS"].split() == [*decided.cmake_arguments, "-DX=1"]
    assert told["MAX_JOBS"] == "2"


def test_arch_lists_are_read() -> None:
    assert capabilities("8.0;9.0a+PTX 10.0f, 7.5") == ["8.0", "9.0", "10.0", "7.5"]
    # As numbers, not as text.
    assert not all_below("10.0", "8.0")


def test_a_changed_stub_counts_its_revision_up() -> None:
    files = sorted(path for path in STUB.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    assert {STUB_REVISION: digest} == {1: "575f92774e5e"}, "count STUB_REVISION up, and put the new digest here"


def test_what_is_left_out_is_told_in_the_roles_words() -> None:
    for choice in LEAVE_OUT.values():
        assert choice.sources and choice.undefined and choice.lost
