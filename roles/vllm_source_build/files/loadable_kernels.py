"""Which of vLLM's kernels a build compiles, and in which order: the words for its CMake, and why, for the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from job import LIB, JobError
from kernel_choices import FLASH_ATTENTION_FROM, LEAVE_OUT, LONGEST_S, all_below, wrong_choice

_FLASH_ATTENTION = "cmake/external_projects/vllm_flash_attn.cmake"
_PROJECT = "project(vllm_extensions "


@dataclass(frozen=True, slots=True)
class Decided:
    """What a build is told.

    Attributes:
        cmake_arguments: words for CMAKE_ARGS, none with white space in it.
        words: what was decided and why, by name, for the record.
        taken: variables that have no effect any more or must not be set, and why.
    """

    cmake_arguments: list[str] = field(default_factory=list)
    words: dict[str, str] = field(default_factory=dict)
    taken: dict[str, str] = field(default_factory=dict)

    def told(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment with these words before those that its CMAKE_ARGS has."""
        if not self.cmake_arguments:
            return dict(environment)
        return {**environment, "CMAKE_ARGS": " ".join([*self.cmake_arguments, environment.get("CMAKE_ARGS", "")])}


def decide(tree: Path, arch_list: str, left_out: Sequence[str]) -> Decided:
    """What of the source to compile for the capabilities.

    Args:
        tree: vLLM's source.
        arch_list: as in TORCH_CUDA_ARCH_LIST, such as `7.5` or `8.0;9.0a+PTX`.
        left_out: names of `kernel_choices.LEAVE_OUT`.

    Raises:
        JobError: refused, for a name that is none, or that leaves nothing out of this source.
    """
    lists = (tree / "CMakeLists.txt").read_text()
    _judge(left_out, arch_list, lists, tree)
    arguments: list[str] = []
    words: dict[str, str] = {}
    taken: dict[str, str] = {}
    if (tree / _FLASH_ATTENTION).is_file() and all_below(arch_list, FLASH_ATTENTION_FROM):
        # In capitals, as FetchContent spells the name. VLLM_FLASH_ATTN_SRC_DIR would make a link into the wheel's tree.
        arguments.append(f"-DFETCHCONTENT_SOURCE_DIR_VLLM-FLASH-ATTN={LIB / 'flash_attn_stub'}")
        taken["VLLM_FLASH_ATTN_SRC_DIR"] = f"flash-attention is left out below {FLASH_ATTENTION_FROM}"
        words["flash_attention"] = f"left out: needs {FLASH_ATTENTION_FROM}, and {arch_list} is asked for"
    choices = [LEAVE_OUT[name] for name in left_out]
    sources = [source for choice in choices for source in choice.sources]
    first = [name for name in LONGEST_S if f"/{name}" in lists and name not in sources]
    if _PROJECT in lists and (first or sources):
        arguments += [
            f"-DCMAKE_PROJECT_vllm_extensions_INCLUDE={LIB / 'vllm_extensions.cmake'}",
            f"-DFLEET_FIRST={';'.join(first)}",
            f"-DFLEET_LEFT_OUT={';'.join(sources)}",
            f"-DFLEET_UNDEFINED={';'.join(word for choice in choices for word in choice.undefined)}",
        ]
    words |= {name: f"left out: as asked for; lost are {LEAVE_OUT[name].lost}" for name in left_out}
    taken |= {word[2:].partition("=")[0]: "the role sets it itself" for word in arguments}
    return Decided(arguments, words, taken)


def _judge(left_out: Sequence[str], arch_list: str, lists: str, tree: Path) -> None:
    wrong = wrong_choice(list(left_out), arch_list)
    for name in () if wrong else left_out:
        choice = LEAVE_OUT[name]
        told = [f"/{source}" for source in choice.sources] + list(choice.undefined)
        missing = [word for word in (*told, _PROJECT) if word not in lists]
        if missing:
            wrong = f"{name} is to be left out, and the source's build names no {missing[0].strip('/')}"
    if wrong:
        raise JobError(wrong, str(tree / "CMakeLists.txt"), "set leave_out in vllm_source_build_releases", refused=True)
