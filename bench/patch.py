"""The patches on every vLLM, compiled by several Tritons, and on drifted sources; figures against goals."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet.compilers import TRITON_OF_TORCH, python_with
from fleet.environments import on_index
from fleet.errors import FleetError
from fleet.patch_check import Asked, Fit, asked, check
from fleet.patch_trees import PATCHES, Outcome, apply_all, revert_all
from fleet.paths import PROJECT, cache_dir
from fleet.steps import Steps
from fleet.vllm_sources import Tree, tree_of, versions

from ansible.module_utils.patch_files import sha256  # isort: skip
from ansible.module_utils.patch_registry import ATTENTION  # isort: skip

_CAPABILITY, _LIMIT = "7.5", 65536
# torch 2.12 is what the AMI brings, and no vLLM pins it.
_AMI_TORCH = "2.12.0"
# Gemma 4 E2B. Its stock launches ask for 98,304 bytes with every Triton from 3.6.0 to 3.8.0.
_STOCK_BYTES = 98304
_CONFIG = {
    "model_type": "gemma4",
    "text_config": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 512,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
_SHAPE = {
    "dtype": "float16",
    "block_size": 16,
    "layers": [
        {"head_size": 512, "heads": 8, "kv_heads": 1, "sliding_window": 0},
        {"head_size": 256, "heads": 8, "kv_heads": 1, "sliding_window": 512},
    ],
}
_COLD_S, _CACHED_S = 60.0, 1.0


@dataclass(frozen=True, slots=True)
class Row:
    """One vLLM, as it is or drifted, with one Triton: what its launches ask for at most, bytes, and what went wrong."""

    vllm: str
    triton: str
    outcome: str
    stock_bytes: int
    patched_bytes: int
    seconds: float
    wrong: str


@dataclass(frozen=True, slots=True)
class Drift:
    """A change of the attention file, and what must come of it: `conflict` says that applying it is one."""

    name: str
    change: Callable[[str], str]
    conflict: bool
    fit: Fit


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value against its goal; `goal` is empty where there is none."""

    name: str
    value: float
    unit: str
    goal: str
    met: bool

    def line(self) -> str:
        """The figure as it is printed."""
        return f"FIGURE {self.name} {self.value:g} {self.unit}" + (f" goal {self.goal}" if self.goal else "")


def run(vllm: Sequence[str], triton: Sequence[str], console: Console, steps: Steps) -> int:
    """Runs the whole, prints tables and figures, and returns the exit code: 1 where a goal is missed."""
    trees = [tree_of(name, steps) for name in vllm or versions()]
    usual = [] if triton else [on_index("triton")[0], TRITON_OF_TORCH[_AMI_TORCH]]
    wanted = [
        (tree, compiler)
        for tree in trees
        for compiler in dict.fromkeys(triton or [*usual, TRITON_OF_TORCH[tree.torch_pin()]])
    ]
    for compiler in dict.fromkeys(compiler for _, compiler in wanted):
        python_with(compiler, steps)
    newest, compiler = wanted[-1]
    with _no_verdicts():
        rows = [_row(_asked(tree, compiler), steps) for tree, compiler in wanted]
        drifts = [_drifted(newest, compiler, drift, steps) for drift in DRIFTS]
    with _no_verdicts():
        cold_s, cached_s = _timed(newest, compiler, steps)
    _show(console, rows)
    _show(console, drifts)
    good = {_name(tree) for tree in trees} - {row.vllm for row in rows if row.wrong}
    most = max(row.patched_bytes for row in rows)
    held = sum(not row.wrong for row in drifts) / len(drifts)
    figures = [
        Figure("patch_versions_ok", len(good) / len(trees), "share", "=1", len(good) == len(trees)),
        Figure("patch_drifts_ok", held, "share", "=1", held == 1),
        Figure("patch_shared_max_bytes", most, "bytes", f"<={_LIMIT}", 0 < most <= _LIMIT),
        Figure("patch_check_cold_s", round(cold_s, 1), "s", f"<{_COLD_S:g}", cold_s < _COLD_S),
        Figure("patch_check_cached_s", round(cached_s, 2), "s", f"<{_CACHED_S:g}", cached_s < _CACHED_S),
    ]
    for figure in figures:
        print(figure.line())
    return int(not all(figure.met for figure in figures))


@contextlib.contextmanager
def _no_verdicts() -> Iterator[None]:
    """A cache with environments and sources and nothing else, so that every verdict is made anew."""
    real, before = cache_dir(), os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for name in ("tools", "vllm"):
            (cache_dir() / name).symlink_to(real / name)
        try:
            yield
        finally:
            if before is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = before


def _asked(tree: Tree, triton: str) -> Asked:
    return Asked(tree, triton, _CAPABILITY, _LIMIT, _SHAPE)


def _row(one: Asked, steps: Steps) -> Row:
    """Applied, compiled, applied again, reverted, on a copy of the whole package."""
    began, wrong = time.monotonic(), []
    targets = {target for patch in PATCHES for target in patch.targets}
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(one.tree.path / "vllm", tree / "vllm")
        before = _digests(tree)
        try:
            outcomes = [result.outcome for result in apply_all(tree, _CAPABILITY)]
            if set(outcomes) != {Outcome.APPLIED}:
                wrong.append(f"applied tells {outcomes}")
            after = _digests(tree)
            changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
            if changed != targets:
                wrong.append(f"changed are {sorted(changed)}, and {sorted(targets)} are wanted")
            verdict = check(replace(one, tree=Tree(tree, one.tree.version)), steps)
            if verdict.outcome is not Fit.FITS_PATCHED:
                wrong.append(f"{verdict.outcome}: {verdict.reason}")
            again = [result.outcome for result in apply_all(tree, _CAPABILITY)]
            if set(again) != {Outcome.IN_PLACE} or _digests(tree) != after:
                wrong.append(f"applied again tells {again}")
            revert_all(tree)
            if _digests(tree) != before:
                wrong.append("reverted is not what was there")
        except FleetError as error:
            return Row(_name(one.tree), one.triton, "refused", 0, 0, time.monotonic() - began, error.what)
    stock, patched = (_most(launches) for launches in (verdict.stock, verdict.patched))
    if stock != _STOCK_BYTES:
        wrong.append(f"stock asks for {stock:,} bytes, and {_STOCK_BYTES:,} are known")
    words = "applied, compiled, in place, reverted"
    seconds = time.monotonic() - began
    return Row(_name(one.tree), one.triton, words, stock, patched, seconds, "; ".join(wrong))


def _drifted(newest: Tree, triton: str, drift: Drift, steps: Steps) -> Row:
    """What comes of a changed source: applying it changes all or nothing, and the check says what is expected."""
    began, wrong = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        shutil.copytree(newest.path / "vllm", tree / "vllm")
        path = tree / ATTENTION
        source = path.read_bytes().decode()
        drifted = drift.change(source)
        if drifted == source:
            wrong.append("the source holds no place for this drift")
        path.write_bytes(drifted.encode())
        before = _digests(tree)
        try:
            verdict = check(_asked(Tree(tree, newest.version), triton), steps)
        except FleetError as error:
            return Row(_name(newest), triton, f"{drift.name}: refused", 0, 0, time.monotonic() - began, error.what)
        if verdict.outcome is not drift.fit:
            wrong.append(f"the check says {verdict.outcome}: {verdict.reason}")
        try:
            apply_all(tree, _CAPABILITY)
            if drift.conflict:
                wrong.append("applied, and a conflict is wanted")
            revert_all(tree)
        except FleetError as error:
            if not drift.conflict:
                wrong.append(error.what)
        if _digests(tree) != before:
            wrong.append("files are left changed")
    words = f"{drift.name}: {verdict.outcome}"
    stock, patched = (_most(launches) for launches in (verdict.stock, verdict.patched))
    return Row(_name(newest), triton, words, stock, patched, time.monotonic() - began, "; ".join(wrong))


def _renamed(source: str) -> str:
    return source.replace("_get_tile_size", "_pick_tile_size")


def _doubled(source: str) -> str:
    """The anchor's statement a second time, right behind the first."""
    lines = source.splitlines(keepends=True)
    anchor = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node).startswith("TILE_SIZE_DECODE = _get_tile_size(")
    )
    begin, end = anchor.lineno - 1, anchor.end_lineno or anchor.lineno
    return "".join([*lines[:end], *lines[begin:end], *lines[end:]])


def _fixed(source: str) -> str:
    """As if upstream chose the narrow tile itself."""
    function = next(
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "_get_tile_size"
    )
    lines = source.splitlines(keepends=True)
    lines.insert(function.body[-1].lineno - 1, "    return 16\n")
    return "".join(lines).replace("        return 32\n", "        return 16\n")


def _truncated(source: str) -> str:
    return source[: source.index("TILE_SIZE_DECODE = _get_tile_size(") + 40]


DRIFTS = (
    Drift("anchor renamed", _renamed, True, Fit.CONFLICT),
    Drift("anchor doubled", _doubled, True, Fit.CONFLICT),
    Drift("upstream's own fix", _fixed, False, Fit.NOT_NEEDED),
    Drift("file truncated", _truncated, True, Fit.CONFLICT),
    Drift("CRLF line ends", lambda source: source.replace("\n", "\r\n"), False, Fit.FITS_PATCHED),
)


def _timed(tree: Tree, triton: str, steps: Steps) -> tuple[float, float]:
    """Seconds of a whole command that compiles, and of the same request in a running program, compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_CONFIG))
        words = ["--vllm", str(tree.path), "--capability", _CAPABILITY, "--model", folder, "--triton", triton]
        began = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "fleet", "patch", "check", *words], cwd=PROJECT, check=True, capture_output=True
        )
        cold_s = time.monotonic() - began
        began = time.monotonic()
        check(asked(tree_of(str(tree.path), steps), Path(folder), _CAPABILITY, triton, None), steps)
        return cold_s, time.monotonic() - began


def _name(tree: Tree) -> str:
    return tree.version or tree.path.name


def _digests(tree: Path) -> dict[str, str]:
    return {str(path.relative_to(tree)): sha256(path.read_bytes()) for path in tree.rglob("*") if path.is_file()}


def _most(launches: list[dict[str, Any]]) -> int:
    return max((int(launch["shared_bytes"]) for launch in launches), default=0)


def _show(console: Console, rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("vLLM", "Triton", "outcome"):
        table.add_column(name)
    for name in ("stock bytes", "patched bytes", "s"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in rows:
        sizes = (f"{row.stock_bytes:,}", f"{row.patched_bytes:,}", f"{row.seconds:.0f}")
        table.add_row(row.vllm, row.triton, row.outcome, *sizes, Text(f"wrong: {row.wrong}" if row.wrong else "ok"))
    console.print(table)
