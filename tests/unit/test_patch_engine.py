"""Anchored edits: applied where the anchors are, refused where they are not, reverted to the byte."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from ansible.module_utils import patch_engine
from ansible.module_utils.patch_engine import Conflict, Edit, Patch, apply, carries, decoded, faults, revert, too_old
from ansible.module_utils.patch_registry import ATTENTION

from fleet.patch_trees import PATCHES
from tests.unit.test_patch_sources import SOURCE, tiles

[CLAMP] = PATCHES
EXAMPLE = Patch(
    id="add", revision=1, reason="r", links=("l",), removal="never", since="0.26.0", shown_on=("0.26.0",),
    verify="v.py", edits=(Edit("a.py", "A.f", "x += 1\n", ("x",), "g", ("self",)),),
)  # fmt: skip


def patched(source: str) -> str:
    return str(apply(source, CLAMP, ATTENTION))


def test_applied_is_marked_and_reverts_to_the_byte() -> None:
    text = patched(SOURCE)
    assert text.count(CLAMP.begin) == text.count(CLAMP.end) == 3
    assert carries(text.encode(), CLAMP) and not carries(SOURCE.encode(), CLAMP)
    assert revert(text, CLAMP) == SOURCE
    with pytest.raises(Conflict, match="in it already"):
        patched(text)


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_line_endings_and_odd_separators_stay(ending: str) -> None:
    # A form feed and U+2028 end a line for str.splitlines, and not for Python's parser.
    odd = SOURCE.replace("    use_td = False", '    use_td = ""  # \x0c \u2028 page').replace("\n", ending)
    text = patched(odd)
    assert text.count("\n") == text.count(ending)
    assert revert(text, CLAMP) == odd
    assert tiles(text, (7, 5), 65536, 512) == {"prefill": 16, "reduce": 16}


def test_a_block_that_would_land_elsewhere_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lines counted in another way than the parser's put the block into the wrong place.
    monkeypatch.setattr(patch_engine, "_lines", lambda source: source.splitlines(keepends=True))
    with pytest.raises(Conflict, match="does not stand alone"):
        patched(SOURCE.replace("launch_num_warps = None", "launch_num_warps = None  # \x0c\x0c\x0c\x0c\x0c"))


def test_what_another_platform_sets_later_moves_no_block() -> None:
    # As vLLM 0.34.0 does for AMD's cards, behind the choice of the kernel.
    later = "    if k == 1:\n        BLOCK_M, TILE_SIZE_PREFILL = 64, 32\n        BLOCK_Q = BLOCK_M\n    kernel("
    source = SOURCE.replace("    kernel(", later)
    assert later in source
    assert patched(source) == patched(SOURCE).replace("    kernel(", later)
    assert tiles(patched(source), (7, 5), 65536, 512) == {"prefill": 16, "reduce": 16}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (SOURCE.replace("    use_3d = not use_td\n", ""), "use_3d = ... stands 0 times"),
        (SOURCE.replace("    use_3d = not", "    use_3d = True\n    use_3d = not"), "use_3d = ... stands 2 times"),
        (
            SOURCE.replace("    BLOCK_M = 16 if", "    total_num_q_blocks = 1\n    BLOCK_M = 16 if").replace(
                "    total_num_q_blocks = 100 // BLOCK_Q\n", ""
            ),
            "BLOCK_M is not assigned before total_num_q_blocks",
        ),
        (SOURCE.replace("def unified_attention", "def unified_attention_v2"), "function unified_attention stands 0"),
        (SOURCE + SOURCE, "function unified_attention stands 2"),
        (SOURCE.replace("TILE_SIZE_DECODE = _get", "TILE_D = _get"), "TILE_SIZE_DECODE = _get_tile_size(...) stands 0"),
        (
            SOURCE.replace("    use_td = False\n", "    TILE_SIZE_DECODE = _get_tile_size(1, 2, 3, False)\n"),
            "TILE_SIZE_DECODE = _get_tile_size(...) stands 2",
        ),
        (SOURCE.replace("    BLOCK_M = 16 if", "    BLOCK = 16 if"), "BLOCK_M = ... stands 0"),
        (SOURCE.replace("    launch_num_warps = None\n", ""), "launch_num_warps is not assigned before BLOCK_M"),
        (SOURCE.replace("torch, triton, current", "torch, tri, current"), "triton is not assigned before unified_att"),
        (SOURCE.replace("(q, k, head_size", "(query, k, head_size"), "q is not assigned"),
        (SOURCE.replace("TILE_SIZE=TILE_SIZE_DECODE", "TILE_SIZE=16"), "TILE_SIZE_DECODE is not read"),
        (SOURCE[: SOURCE.index("min(TILE_SIZE_DECODE")] + "min(", "no whole Python file"),
        (SOURCE + "\0", "no whole Python file"),
        (SOURCE.replace("    use_3d = not", "    TILE_SIZE_DECODE += 0; use_3d = not"), "starts on the same line"),
        (SOURCE.replace("return 32 if is_prefill else 16\n\n\ndef", "return 16\nx = 1\nx; \\\ndef"), "no whole Python"),
    ],
)
def test_drift_is_a_conflict(source: str, words: str) -> None:
    with pytest.raises(Conflict, match=re.escape(words)):
        patched(source)


def test_a_function_with_decorators_gets_its_block_before_them() -> None:
    decorated = SOURCE.replace("def unified_attention", "@(lambda f: f)\ndef unified_attention")
    text = patched(decorated)
    assert text.index(CLAMP.end) < text.index("@(lambda f: f)\ndef unified_attention")
    assert revert(text, CLAMP) == decorated


def test_another_revision_is_taken_out_whole() -> None:
    older = replace(CLAMP, revision=2, edits=(replace(CLAMP.edits[2], block="TILE_SIZE_PREFILL = 16\n", needs=()),))
    old = apply(SOURCE, older, ATTENTION)
    assert "r2: begin" in old
    assert revert(old, CLAMP) == SOURCE


@pytest.mark.parametrize(
    "damaged",
    [
        lambda text: text.replace(CLAMP.end, "# gone", 1),
        lambda text: text.replace(CLAMP.begin, "# gone", 1),
        lambda text: text.replace(CLAMP.begin, "# vllm-fleet patch triton-tile-clamp r2: begin", 1),
        lambda text: text.replace(CLAMP.end, CLAMP.end + "\n" + CLAMP.end, 1),
    ],
    ids=["no end", "no begin", "two revisions", "two ends"],
)
def test_damaged_blocks_are_a_conflict(damaged: Any) -> None:
    with pytest.raises(Conflict, match="damaged"):
        revert(damaged(patched(SOURCE)), CLAMP)


def test_a_method_is_found_by_its_dotted_name() -> None:
    source = "class A:\n    def f(self):\n        x = g()\n        return x\n\n\ndef f():\n    x = g()\n    return x\n"
    edited = apply(source, EXAMPLE, "a.py")
    assert edited.index("x += 1") < edited.index("def f():")
    assert edited.count("x += 1") == 1
    elsewhere = replace(EXAMPLE, edits=(replace(EXAMPLE.edits[0], scope="B.f"),))
    with pytest.raises(Conflict, match=re.escape("function B.f stands 0 times")):
        apply(source, elsewhere, "a.py")


def test_a_source_that_is_no_text_is_a_conflict() -> None:
    with pytest.raises(Conflict, match="byte 3 is 0xff"):
        decoded(b"abc\xff")


@pytest.mark.parametrize(
    ("version", "old"),
    [("0.25.9", True), ("0.9.1", True), ("v0.25.0rc1", True), ("0.26.0", False), ("0.26.0rc1+cu130", False),
     ("0.100.0", False), ("1.0", False), ("", False), ("dev", False)],
)  # fmt: skip
def test_a_version_before_the_first_is_too_old(version: str, old: bool) -> None:
    assert too_old(version, CLAMP) is old


def test_the_registry_is_without_fault() -> None:
    assert faults(PATCHES) == []
    assert faults([EXAMPLE]) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id": "Add one"}, "'Add one'"),
        ({"removal": ""}, "removal is empty"),
        ({"links": ()}, "links is empty"),
        ({"edits": ()}, "edits is empty"),
        ({"revision": 0}, "revision 0"),
        ({"since": "newest"}, "'newest'"),
        ({"edits": (replace(EXAMPLE.edits[0], target="../a.py"),)}, "no Python file below"),
        ({"edits": (replace(EXAMPLE.edits[0], target="/etc/a.py"),)}, "no Python file below"),
        ({"edits": (replace(EXAMPLE.edits[0], target="a.so"),)}, "no Python file below"),
        ({"edits": (replace(EXAMPLE.edits[0], block="x +="),)}, "no Python: invalid syntax in line 1"),
        ({"edits": (replace(EXAMPLE.edits[0], block="# x"),)}, "holds no statement"),
    ],
)
def test_a_malformed_entry_is_named(changes: dict[str, Any], words: str) -> None:
    [fault] = faults([replace(EXAMPLE, **changes)])
    assert words in fault
    assert "twice" in faults([EXAMPLE, EXAMPLE])[0]
