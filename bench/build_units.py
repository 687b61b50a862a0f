"""nvcc's compile commands of a vLLM build for 7.5, as the role decides it and stock, through the real CMake.

cutlass and flash-attention are taken from `VLLM_CUTLASS_SRC_DIR` and `VLLM_FLASH_ATTN_SRC_DIR`, or by git. Without
cutlass an empty project stands in for it: nothing of it is compiled, and nothing can be sampled. Without
flash-attention stock's units of it are the recorded ones, and the output says so.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import cuda_parts, whole_extensions
from bench.cmake_tools import python_with_cmake
from bench.patch import Figure
from bench.whole_extensions import Site
from fleet.paths import cache_dir, state_dir
from fleet.steps import Steps
from fleet.vllm_sources import Tree, build_tree, versions

import build_variables  # isort: skip  (made importable by whole_extensions)
import loadable_kernels  # isort: skip
from job import JobError  # isort: skip

_ARCH_LIST = "7.5"
# The goal is set by what these two count: 60 of 328 units and 67 of 335. From 0.34.0 on upstream makes ten units of one
# that both builds compile (topk_softplus_sqrt_kernels.cu), which moves the ratio of units and not the work.
_GOAL_VERSIONS = ("0.27.1", "0.33.0")
_RATIO = 0.21
# Counted for vLLM 0.26.0, 0.27.1 and 0.33.0, whose flash-attention differs in its commit alone.
_RECORDED = {"_vllm_fa2_C": 76, "_vllm_fa3_C": 192}
_NO_EFFECT = "VLLM_FA_CMAKE_GPU_ARCHES"
_REPOSITORIES = {
    "cutlass": "https://github.com/NVIDIA/cutlass",
    "flash": "https://github.com/vllm-project/flash-attention",
}
# One unit of each kind, of about the middle of its kind's seconds on 16 cores; by the end of its path.
_SAMPLE = {
    "_C_stable_libtorch": "/layernorm_kernels.cu",
    "_moe_C_stable_libtorch": "/topk_softmax_kernels.cu",
    "_vllm_fa2_C": "/flash_fwd_hdim128_fp16_sm80.cu",
    "_vllm_fa3_C": "/flash_fwd_hdim128_fp16_split_sm90.cu",
}


@dataclass(frozen=True, slots=True)
class Counted:
    """One version: units by target, ours and stock, whether stock's were counted, and core-seconds of one of a kind."""

    version: str
    ours: dict[str, int]
    stock: dict[str, int]
    recorded: bool
    sampled_s: dict[str, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Ours to stock."""
        return sum(self.ours.values()) / sum(self.stock.values())

    def core_minutes(self, counts: dict[str, int]) -> float | None:
        """What the units take if each takes as long as the one that was compiled; None where a kind was not sampled."""
        if not counts.keys() <= self.sampled_s.keys():
            return None
        return sum(number * self.sampled_s[target] for target, number in counts.items()) / 60


def run(console: Console, steps: Steps) -> int:
    """Runs the whole, prints a table and figures, and returns the exit code: 1 where a goal is missed."""
    trees = [build_tree(version, steps) for version in (*_GOAL_VERSIONS, "newest")]
    trees = list({tree.version: tree for tree in trees}.values())
    torch = cuda_parts.torch_parts(trees[-1].torch_pin(), steps)
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        counted = [_counted(tree, torch, Path(folder) / tree.version, steps) for tree in trees]
    refused = [_refuses(build_tree(version, steps)) for version in versions()]
    raw = state_dir() / "bench" / "build_units.json"
    raw.parent.mkdir(parents=True, exist_ok=True)
    rows = [{name: getattr(row, name) for name in row.__slots__} for row in counted]
    raw.write_text(json.dumps({"arch_list": _ARCH_LIST, "machine": platform.processor(), "rows": rows}, indent=1))
    _show(console, counted)
    ratio = max(row.ratio for row in counted if row.version in _GOAL_VERSIONS)
    share = sum(refused) / len(refused)
    figures = [
        Figure("build_units_ratio", round(ratio, 3), "share", f"<={_RATIO}", ratio <= _RATIO),
        Figure("build_variable_refused", share, "share", "=1", share == 1),
    ]
    for figure in figures:
        print(figure.line())
    newest = counted[-1]
    console.print(f"newest, {newest.version}: {newest.ratio:.3f} of stock's units")
    console.print(f"measurements: {raw}")
    return int(not all(figure.met for figure in figures))


def _counted(tree: Tree, torch: Path, work: Path, steps: Steps) -> Counted:
    """The version configured twice, and one unit of each kind compiled where its sources are there."""
    shutil.copytree(tree.path, work / "tree")  # CMake writes generated kernels into it
    notes = _lift_compiler_floor(work / "tree" / "CMakeLists.txt")
    cutlass = _source("cutlass", "VLLM_CUTLASS_SRC_DIR", _pinned(tree, "CMakeLists.txt", "cutlass.git"), work, steps)
    flash = _source(
        "flash", "VLLM_FLASH_ATTN_SRC_DIR",
        _pinned(tree, "cmake/external_projects/vllm_flash_attn.cmake", "flash-attention.git"), work, steps,
    )  # fmt: skip
    headers = cuda_parts.headers(steps) if cutlass else None
    decided = loadable_kernels.decide(work / "tree", _ARCH_LIST, []).cmake_arguments
    with steps.step(f"vLLM {tree.version} configured for {_ARCH_LIST}{notes}"):
        ours = _site(work, "ours", torch, cutlass, headers, steps)
        whole_extensions.configure(ours, _ARCH_LIST, decided)
        found = Counter(unit["target"] for unit in whole_extensions.units(ours.build))
    stock = Counter(found) + Counter(_RECORDED)
    sites = dict.fromkeys(found, ours)
    if flash:
        with steps.step(f"vLLM {tree.version} configured stock"):
            site = _site(work, "stock", torch, cutlass, headers, steps)
            own = _with_cutlass(flash, cutlass, work)
            whole_extensions.configure(site, _ARCH_LIST, [f"-DFETCHCONTENT_SOURCE_DIR_VLLM-FLASH-ATTN={own}"])
            stock = Counter(unit["target"] for unit in whole_extensions.units(site.build))
            sites |= {target: site for target in stock if target not in sites}
    sampled = {target: _seconds(site, target, steps) for target, site in sites.items()} if cutlass else {}
    known = {target: seconds for target, seconds in sampled.items() if seconds}
    return Counted(tree.version, dict(found), dict(stock), not flash, known)


def _site(work: Path, name: str, torch: Path, cutlass: Path | None, headers: Path | None, steps: Steps) -> Site:
    if cutlass is None:
        cutlass = work / "cutlass"
        cutlass.mkdir(exist_ok=True)
        (cutlass / "CMakeLists.txt").write_text(
            "cmake_minimum_required(VERSION 3.26)\nproject(cutlass LANGUAGES CXX)\n"
        )
    _, programs = python_with_cmake(steps)
    home = cuda_parts.toolkit(steps)
    return Site(work / "tree", torch, cutlass, work / name, home, shutil.which("g++") or "g++", headers, programs)


def _seconds(site: Site, target: str, steps: Steps) -> float:
    """Core-seconds of one unit of the target; 0 where there is none of that name, or it does not compile here."""
    names = [unit for unit in whole_extensions.units(site.build) if unit["target"] == target]
    objects = [unit["output"] for unit in names if unit["file"].endswith(_SAMPLE.get(target, "/"))]
    if not objects:
        return 0.0
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with steps.step(f"one unit of {target}"):
        name = os.path.relpath(objects[0], site.build)
        argv = ["nice", "ninja", name]
        done = subprocess.run(argv, cwd=site.build, env=site.environment(), capture_output=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        return 0.0
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)


def _source(name: str, variable: str, commit: str, work: Path, steps: Steps) -> Path | None:
    """The source that the variable names, or the commit by git; None where git does not reach it."""
    if os.environ.get(variable):
        return Path(os.environ[variable]).resolve()
    place = work / "fetched" / name
    git = ["git", "-C", str(place)]
    place.mkdir(parents=True)
    with steps.step(f"{name} {commit[:12]} by git"):
        for argv in (
            ["git", "init", "-q", str(place)],
            [*git, "fetch", "-q", "--depth", "1", _REPOSITORIES[name], commit],
            [*git, "checkout", "-q", "FETCH_HEAD"],
            [*git, "submodule", "update", "-q", "--init", "--depth", "1", "csrc/cutlass"]
            if name == "flash"
            else ["true"],
        ):
            if subprocess.run(argv, capture_output=True, check=False, timeout=900).returncode:
                return None
    return place


def _pinned(tree: Tree, file: str, repository: str) -> str:
    """The tag or commit that the source fetches of a repository."""
    text = (tree.path / file).read_text()
    tag = re.search(rf"{re.escape(repository)}.*?GIT_TAG (\S+)", text, re.S)
    if not tag:
        raise LookupError(f"{file} of vLLM {tree.version} names no {repository}")
    if tag[1].startswith("${"):
        return str(re.findall(rf'set\({tag[1][2:-1]} "(\S+)"\)', text)[0])
    return tag[1]


def _with_cutlass(flash: Path, cutlass: Path | None, work: Path) -> Path:
    """flash-attention with a cutlass in it: its own, or vLLM's where a copy came without submodules."""
    if cutlass is None or (flash / "csrc" / "cutlass" / "include").is_dir():
        return flash
    own = work / "flash"
    shutil.copytree(flash, own)
    shutil.rmtree(own / "csrc" / "cutlass", ignore_errors=True)
    (own / "csrc" / "cutlass").symlink_to(cutlass)
    return own


def _lift_compiler_floor(lists: Path) -> str:
    """Lifts vLLM's floor of g++ 13, which is for units not compiled below 9.0, where this machine's is older."""
    have = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
    text = lists.read_text()
    lifted = text.replace('CMAKE_CXX_COMPILER_VERSION VERSION_LESS "13"', "FALSE")
    if int(have.partition(".")[0]) >= 13 or lifted == text:
        return ""
    lists.write_text(lifted)
    return f" (g++ {have}: the source's floor of 13 lifted)"


def _refuses(tree: Tree) -> bool:
    """Whether the variable that the field report hoped for is refused for this source."""
    try:
        build_variables.judge(tree.path, tree.version, {_NO_EFFECT: _ARCH_LIST}, "", {})
    except JobError as error:
        return error.refused and error.what.startswith(_NO_EFFECT)
    return False


def _show(console: Console, counted: list[Counted]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("vLLM", "target"):
        table.add_column(name)
    for name in ("stock units", "ours", "s of one", "stock core-min", "ours"):
        table.add_column(name, justify="right")
    for row in counted:
        for target in row.stock:
            mark = " (recorded)" if row.recorded and target in _RECORDED else ""
            seconds = row.sampled_s.get(target)
            table.add_row(
                row.version, target + mark, str(row.stock[target]), str(row.ours.get(target, 0)),
                f"{seconds:.0f}" if seconds else "-", *_minutes(row, target),
            )  # fmt: skip
        totals = [row.core_minutes(row.stock), row.core_minutes(row.ours)]
        table.add_row(
            row.version, "all", str(sum(row.stock.values())), str(sum(row.ours.values())), "",
            *(f"{total:.0f}" if total is not None else "-" for total in totals),
        )  # fmt: skip
    console.print(table)


def _minutes(row: Counted, target: str) -> list[str]:
    if target not in row.sampled_s:
        return ["-", "-"]
    return [f"{counts.get(target, 0) * row.sampled_s[target] / 60:.0f}" for counts in (row.stock, row.ours)]
