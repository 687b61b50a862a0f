"""Anchored edits of Python sources: the place is found on the syntax tree, all other text stays byte for byte."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass


class Conflict(Exception):
    """The source is not what the patch was written for; says which anchor is missing or not unique."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One patch of one file.

    `id` and `revision` mark the inserted block; `target` is relative to site-packages; `block` is inserted, indented
    as the function's body is, after the last top-level statement of `function` that assigns any of `names`, each of
    which must first be assigned from a call of `from_call` exactly once.
    """

    id: str
    revision: int
    reason: str
    links: tuple[str, ...]
    removal: str
    target: str
    function: str
    names: tuple[str, ...]
    from_call: str
    needs: tuple[str, ...]
    block: str

    @property
    def begin(self) -> str:
        """First line of the inserted block."""
        return f"# vllm-fleet patch {self.id} r{self.revision}: begin"

    @property
    def end(self) -> str:
        """Last line of the inserted block."""
        return f"# vllm-fleet patch {self.id}: end"


TILE_CLAMP = Patch(
    id="triton-tile-clamp",
    revision=1,
    reason="below capability 8.0 a block has 64 KiB of shared memory, and a 512-wide head asks for 96 KiB",
    links=("vllm#57712", "vllm#38918", "vllm#36802", "vllm#39018"),
    removal="upstream's own tiles fit: compile_check.py reports it on the pristine file",
    target="vllm/v1/attention/ops/triton_unified_attention.py",
    function="unified_attention",
    names=("TILE_SIZE_PREFILL", "TILE_SIZE_DECODE"),
    from_call="_get_tile_size",
    needs=("BLOCK_M", "head_size"),
    # Below 8.0 Triton stages operands as float32 whatever their type, hence 4 bytes; the compiler has the last word.
    block="""\
_fleet_capability = current_platform.get_device_capability()
if _fleet_capability is not None and _fleet_capability[0] < 8:
    _fleet_limit = torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin
    _fleet_row_bytes = 4 * triton.next_power_of_2(head_size)
    while TILE_SIZE_PREFILL > 16 and (BLOCK_M + TILE_SIZE_PREFILL) * _fleet_row_bytes > _fleet_limit:
        TILE_SIZE_PREFILL //= 2
    while TILE_SIZE_DECODE > 16 and (BLOCK_M + TILE_SIZE_DECODE) * _fleet_row_bytes > _fleet_limit:
        TILE_SIZE_DECODE //= 2
""",
)


def marked_revision(source: str, patch: Patch) -> int | None:
    """The revision of the patch that the source carries, or None."""
    found = re.findall(rf"# vllm-fleet patch {re.escape(patch.id)} r(\d+): begin", source)
    if len(found) > 1:
        raise Conflict(f"the marker of {patch.id} stands {len(found)} times, and once is wanted")
    return int(found[0]) if found else None


def apply(source: str, patch: Patch) -> str:
    """Returns the patched source; raises Conflict where an anchor is missing or not unique."""
    tree = _parsed(source)
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == patch.function]
    if len(functions) != 1:
        raise Conflict(f"function {patch.function} stands {len(functions)} times, and once is wanted")
    body = functions[0].body
    for name in patch.names:
        origins = [s for s in body if _is_call_assignment(s, name, patch.from_call)]
        if len(origins) != 1:
            raise Conflict(f"{name} = {patch.from_call}(...) stands {len(origins)} times, and once is wanted")
    after = max(index for index, statement in enumerate(body) if _assigns(statement, patch.names))
    for name in patch.needs:
        arguments = functions[0].args
        known = {a.arg for a in (*arguments.args, *arguments.kwonlyargs)}
        if name not in known and not any(_assigns(s, (name,)) for s in body[: after + 1]):
            raise Conflict(f"{name} is not assigned before the tiles, and the patch needs it")
    for name in patch.names:
        if not any(_reads(statement, name) for statement in body[after + 1 :]):
            raise Conflict(f"{name} is not read after the tiles are chosen, so a clamp would have no effect")
    lines = source.splitlines(keepends=True)
    line = body[after].end_lineno or 0
    newline = "\r\n" if lines[line - 1].endswith("\r\n") else "\n"
    indent = " " * body[after].col_offset
    block = [patch.begin, *patch.block.splitlines(), patch.end]
    inserted = "".join(f"{indent}{text}{newline}" for text in block)
    edited = "".join([*lines[:line], inserted, *lines[line:]])
    _parsed(edited)
    return edited


def revert(source: str, patch: Patch) -> str:
    """Returns the source without the patch's block; the rest is untouched."""
    lines = source.splitlines(keepends=True)
    begins = [i for i, text in enumerate(lines) if f"# vllm-fleet patch {patch.id} r" in text]
    ends = [i for i, text in enumerate(lines) if text.strip() == patch.end]
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        raise Conflict(f"the block of {patch.id} is damaged: {len(begins)} begins, {len(ends)} ends")
    return "".join(lines[: begins[0]] + lines[ends[0] + 1 :])


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except SyntaxError as error:
        raise Conflict(f"the source is no whole Python file: {error.msg} in line {error.lineno}") from error


def _is_call_assignment(statement: ast.stmt, name: str, call: str) -> bool:
    return (
        isinstance(statement, ast.Assign)
        and [t.id for t in statement.targets if isinstance(t, ast.Name)] == [name]
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id == call
    )


def _assigns(statement: ast.stmt, names: tuple[str, ...]) -> bool:
    return any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in names for n in ast.walk(statement))


def _reads(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id == name for n in ast.walk(statement))
