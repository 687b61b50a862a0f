"""Anchored edits of Python sources: the place is found on the syntax tree, all other text stays byte for byte."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

_VERSION = re.compile(r"\d+(\.\d+)+")


class Conflict(Exception):
    """The source is not what the patch was written for; says which anchor is missing or not unique."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One insertion into one file.

    `target` is relative to site-packages, `scope` the dotted name of a function in it. With `names`, `block` goes,
    indented as the function's body is, after the last top-level statement of the function that assigns any of them.
    Each of `names` must be assigned exactly once on its own (from a call of `from_call`, where one is given) and read
    further down. With `until`, what comes from that name's own assignment on does not count: another platform may
    assign again there. Without `names`, `block` goes before the function itself. Each of `needs` must be known at that
    place.
    """

    target: str
    scope: str
    block: str
    names: tuple[str, ...] = ()
    from_call: str = ""
    needs: tuple[str, ...] = ()
    until: str = ""


@dataclass(frozen=True, slots=True)
class Patch:
    """A patch of one or more files, applied as a set.

    Attributes:
        id, revision: mark every inserted block.
        reason, links, removal: why it is there, where upstream knows of it, what would end it.
        since: the oldest vLLM whose sources it was written for.
        shown_on: versions on which it was applied and compiled.
        verify: program that compiles what was patched, one of the role's files.
        edits: in the order in which they are made; a later one may need what an earlier one assigns.
    """

    id: str
    revision: int
    reason: str
    links: tuple[str, ...]
    removal: str
    since: str
    shown_on: tuple[str, ...]
    verify: str
    edits: tuple[Edit, ...]

    @property
    def begin(self) -> str:
        """First line of an inserted block."""
        return f"# vllm-fleet patch {self.id} r{self.revision}: begin"

    @property
    def end(self) -> str:
        """Last line of an inserted block."""
        return f"# vllm-fleet patch {self.id}: end"

    @property
    def targets(self) -> tuple[str, ...]:
        """The files it edits."""
        return tuple(dict.fromkeys(edit.target for edit in self.edits))


def faults(patches: Iterable[Patch]) -> list[str]:
    """What is wrong with registry entries, in words; empty where nothing is."""
    found, seen = [], set()
    for patch in patches:
        if not re.fullmatch(r"[a-z0-9-]+", patch.id) or patch.id in seen:
            found.append(f"id {patch.id!r} is given twice or holds more than a-z, 0-9 and hyphens")
        seen.add(patch.id)
        for name in ("reason", "links", "removal", "shown_on", "verify", "edits"):
            if not getattr(patch, name):
                found.append(f"{patch.id}: {name} is empty")
        if patch.revision < 1 or not _VERSION.fullmatch(patch.since):
            found.append(f"{patch.id}: revision {patch.revision} or since {patch.since!r} is none")
        for edit in patch.edits:
            if edit.target.startswith("/") or ".." in edit.target.split("/") or not edit.target.endswith(".py"):
                found.append(f"{patch.id}: target {edit.target!r} is no Python file below site-packages")
            try:
                if not ast.parse(edit.block).body:
                    found.append(f"{patch.id}: a block for {edit.target} holds no statement")
            except SyntaxError as error:
                found.append(f"{patch.id}: a block for {edit.target} is no Python: {error.msg} in line {error.lineno}")
    return found


def too_old(version: str, patch: Patch) -> bool:
    """Whether a version (`0.27.2rc0+cu130`; empty for not known) comes before the first that the patch is for."""
    release = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return release is not None and _numbers(release[1]) < _numbers(patch.since)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def decoded(content: bytes) -> str:
    """The text of a source; raises Conflict where it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise Conflict(f"the source is no UTF-8 text: byte {error.start} is 0x{content[error.start]:02x}") from error


def carries(content: bytes, patch: Patch) -> bool:
    """Whether any line that marks the patch is in the content, whole or damaged, of whatever revision."""
    return f"# vllm-fleet patch {patch.id}".encode() in content


def apply(source: str, patch: Patch, target: str) -> str:
    """Returns a file with the patch's blocks; raises Conflict where an anchor is missing or not unique."""
    if carries(source.encode(), patch):
        raise Conflict(f"{patch.id} is in it already")
    for edit in patch.edits:
        if edit.target == target:
            source = _edited(source, patch, edit)
    return source


def revert(source: str, patch: Patch) -> str:
    """Returns the source without the patch's blocks, whatever their revision; the rest is untouched."""
    lines = _lines(source)
    begins = [i for i, text in enumerate(lines) if f"# vllm-fleet patch {patch.id} r" in text]
    ends = [i for i, text in enumerate(lines) if text.strip() == patch.end]
    marks = sorted([*begins, *ends])
    revisions = {lines[i].strip() for i in begins}
    if len(begins) != len(ends) or marks[::2] != begins or len(revisions) > 1:
        what = f"{len(begins)} begins of {len(revisions)} revisions, {len(ends)} ends"
        raise Conflict(f"the blocks of {patch.id} are damaged: {what}")
    for begin, end in reversed(list(zip(begins, ends, strict=True))):
        del lines[begin : end + 1]
    return "".join(lines)


def _edited(source: str, patch: Patch, edit: Edit) -> str:
    tree = _parsed(source)
    parent, function = _function(tree, edit.scope)
    if edit.names:
        parent, index = function.body, _last_assignment(function, edit)
        line, column = parent[index].end_lineno or 0, parent[index].col_offset
        if index + 1 < len(parent) and _first_line(parent[index + 1]) <= line:
            raise Conflict(f"the statement after line {line} starts on the same line, and nothing can be put between")
    else:
        index, column = parent.index(function) - 1, function.col_offset
        line = _first_line(function) - 1
        _know(edit, {name for statement in parent[: index + 1] for name in _bound(statement)}, edit.scope)
        if index >= 0 and (parent[index].end_lineno or 0) > line:
            raise Conflict(f"{edit.scope} starts on the line of another statement")
    lines = _lines(source)
    newline = "\r\n" if lines[line - 1].endswith("\r\n") else "\n"
    indent = " " * column
    block = [patch.begin, *edit.block.splitlines(), patch.end]
    inserted = "".join(f"{indent}{text}{newline}" if text else newline for text in block)
    edited = "".join([*lines[:line], inserted, *lines[line:]])
    _prove_only_the_block_is_new(tree, edited, edit, index + 1)
    return edited


def _last_assignment(function: ast.FunctionDef, edit: Edit) -> int:
    """Index of the statement after which the block goes."""
    body, call = function.body, f"{edit.from_call}(...)" if edit.from_call else "..."
    for name in edit.names:
        origins = [s for s in body if _is_assignment(s, name, edit.from_call)]
        if len(origins) != 1:
            raise Conflict(f"{name} = {call} stands {len(origins)} times, and once is wanted")
    ends = [index for index, statement in enumerate(body) if edit.until and _is_assignment(statement, edit.until, "")]
    if edit.until and len(ends) != 1:
        raise Conflict(f"{edit.until} = ... stands {len(ends)} times, and once is wanted")
    before = body[: ends[0]] if ends else body
    after: int = max((i for i, statement in enumerate(before) if _assigns(statement, edit.names)), default=-1)
    if after < 0:
        raise Conflict(f"{edit.names[0]} is not assigned before {edit.until}, and the patch needs it")
    arguments = function.args
    known = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    _know(edit, known | {name for statement in body[: after + 1] for name in _bound(statement)}, edit.names[0])
    for name in edit.names:
        if not any(_reads(statement, name) for statement in body[after + 1 :]):
            raise Conflict(f"{name} is not read after its last assignment, so the patch would have no effect")
    return after


def _know(edit: Edit, known: set[str], place: str) -> None:
    for name in edit.needs:
        if name not in known:
            raise Conflict(f"{name} is not assigned before {place}, and the patch needs it")


def _prove_only_the_block_is_new(tree: ast.Module, edited: str, edit: Edit, at: int) -> None:
    """The edited tree, less the statements of the block, is the tree that was there."""
    new = _parsed(edited)
    count = len(ast.parse(edit.block).body)
    parent, function = _function(new, edit.scope)
    body = function.body if edit.names else parent
    del body[at : at + count]
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


def _function(tree: ast.Module, scope: str) -> tuple[list[ast.stmt], ast.FunctionDef]:
    """The one function of that dotted name, and the body that it stands in."""
    *classes, name = scope.split(".")
    bodies = [tree.body]
    for parent in classes:
        bodies = [n.body for body in bodies for n in body if isinstance(n, ast.ClassDef) and n.name == parent]
    found = [(body, n) for body in bodies for n in body if isinstance(n, ast.FunctionDef) and n.name == name]
    if len(found) != 1:
        raise Conflict(f"function {scope} stands {len(found)} times, and once is wanted")
    return found[0]


def _first_line(statement: ast.stmt) -> int:
    """A function starts at its first decorator."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])


def _is_assignment(statement: ast.stmt, name: str, call: str) -> bool:
    """`name = ...`, from a call of that name where one is given."""
    return (
        isinstance(statement, ast.Assign)
        and [t.id for t in statement.targets if isinstance(t, ast.Name)] == [name]
        and (
            not call
            or (
                isinstance(statement.value, ast.Call)
                and isinstance(statement.value.func, ast.Name)
                and statement.value.func.id == call
            )
        )
    )


def _bound(statement: ast.stmt) -> set[str]:
    """Names that a statement binds: assigned, imported, defined."""
    found = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        found |= {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        found.add(statement.name)
    return found


def _assigns(statement: ast.stmt, names: tuple[str, ...]) -> bool:
    return any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store) and n.id in names for n in ast.walk(statement))


def _reads(statement: ast.stmt, name: str) -> bool:
    return any(isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id == name for n in ast.walk(statement))
