"""Anchored edits of Python sources: the place is found on the syntax tree, all other text stays byte for byte."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass


class Conflict(Exception):
    """The source is not what the patch was written for; says which anchor is missing or not unique."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One insertion into one file.

    `target` is relative to site-packages, `scope` the dotted name of a function in it. `block` goes, indented as the
    function's body is, after the last top-level statement of the function that assigns any of `names`. Each of
    `names` must be assigned exactly once from a call of `from_call` and read further down, and each of `needs` must be
    known at that place.
    """

    target: str
    scope: str
    names: tuple[str, ...]
    from_call: str
    needs: tuple[str, ...]
    block: str


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch of one or more files, applied as a set. `id` and `revision` mark every inserted block."""

    id: str
    revision: int
    reason: str
    links: tuple[str, ...]
    removal: str
    shown_on: tuple[str, ...]
    edits: tuple[Edit, ...]

    @property
    def begin(self) -> str:
        """First line of an inserted block."""
        return f"# vllm-fleet patch {self.id} r{self.revision}: begin"

    @property
    def end(self) -> str:
        """Last line of an inserted block."""
        return f"# vllm-fleet patch {self.id}: end"


def decoded(content: bytes) -> str:
    """The text of a source; raises Conflict where it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Conflict(f"the source is no UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}") from error


def marked_revision(source: str, patch: Patch) -> int | None:
    """The revision of the patch that the source carries, or None."""
    found = re.findall(rf"# vllm-fleet patch {re.escape(patch.id)} r(\d+): begin", source)
    if len(found) > 1:
        raise Conflict(f"the marker of {patch.id} stands {len(found)} times, and once is wanted")
    if not found and patch.end in source:
        raise Conflict(f"the block of {patch.id} is damaged: 0 begins, {source.count(patch.end)} ends")
    return int(found[0]) if found else None


def apply(source: str, patch: Patch, edit: Edit) -> str:
    """Returns the source with the edit's block; raises Conflict where an anchor is missing or not unique."""
    tree = _parsed(source)
    function = _function(tree, edit.scope)
    body = function.body
    for name in edit.names:
        origins = [s for s in body if _is_call_assignment(s, name, edit.from_call)]
        if len(origins) != 1:
            raise Conflict(f"{name} = {edit.from_call}(...) stands {len(origins)} times, and once is wanted")
    after = max(index for index, statement in enumerate(body) if _assigns(statement, edit.names))
    arguments = function.args
    known = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for name in edit.needs:
        if name not in known and not any(_assigns(s, (name,)) for s in body[: after + 1]):
            raise Conflict(f"{name} is not assigned before {edit.names[0]}, and the patch needs it")
    for name in edit.names:
        if not any(_reads(statement, name) for statement in body[after + 1 :]):
            raise Conflict(f"{name} is not read after its last assignment, so the patch would have no effect")
    line = body[after].end_lineno or 0
    if body[after + 1].lineno <= line:
        raise Conflict(f"the statement after line {line} starts on the same line, and nothing can be put between")
    lines = _lines(source)
    newline = "\r\n" if lines[line - 1].endswith("\r\n") else "\n"
    indent = " " * body[after].col_offset
    block = [patch.begin, *edit.block.splitlines(), patch.end]
    inserted = "".join(f"{indent}{text}{newline}" if text else newline for text in block)
    edited = "".join([*lines[:line], inserted, *lines[line:]])
    _prove_only_the_block_is_new(tree, edited, edit, after)
    return edited


def revert(source: str, patch: Patch) -> str:
    """Returns the source without the patch's block, whatever its revision; the rest is untouched."""
    lines = _lines(source)
    begins = [i for i, text in enumerate(lines) if f"# vllm-fleet patch {patch.id} r" in text]
    ends = [i for i, text in enumerate(lines) if text.strip() == patch.end]
    if len(begins) != 1 or len(ends) != 1 or ends[0] < begins[0]:
        raise Conflict(f"the block of {patch.id} is damaged: {len(begins)} begins, {len(ends)} ends")
    return "".join(lines[: begins[0]] + lines[ends[0] + 1 :])


def _prove_only_the_block_is_new(tree: ast.Module, edited: str, edit: Edit, after: int) -> None:
    """The edited tree, less the statements of the block, is the tree that was there."""
    new = _parsed(edited)
    count = len(ast.parse(edit.block).body)
    del _function(new, edit.scope).body[after + 1 : after + 1 + count]
    if ast.dump(new) != ast.dump(tree):
        raise Conflict(f"the block does not stand alone in {edit.scope}: other statements would change")


def _lines(source: str) -> list[str]:
    """Lines as Python's parser counts them; `splitlines` also breaks at form feeds and Unicode separators."""
    return re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+$", source)


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        where = f" in line {line}" if line else ""
        raise Conflict(f"the source is no whole Python file: {getattr(error, 'msg', error)}{where}") from error


def _function(tree: ast.Module, scope: str) -> ast.FunctionDef:
    """The one function of that dotted name."""
    *classes, name = scope.split(".")
    bodies = [tree.body]
    for parent in classes:
        bodies = [n.body for body in bodies for n in body if isinstance(n, ast.ClassDef) and n.name == parent]
    found = [n for body in bodies for n in body if isinstance(n, ast.FunctionDef) and n.name == name]
    if len(found) != 1:
        raise Conflict(f"function {scope} stands {len(found)} times, and once is wanted")
    return found[0]


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
