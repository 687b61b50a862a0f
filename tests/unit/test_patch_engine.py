"""Anchored edits: applied where the anchors are, refused where they are not, reverted to the byte."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from ansible.module_utils import patch_engine
from ansible.module_utils.patch_engine import Conflict, Edit, Patch, apply, decoded, marked_revision, revert
from ansible.module_utils.patch_registry import PATCHES, TILE_CLAMP

from tests.unit.test_patch_sources import SOURCE, tiles

CLAMP = TILE_CLAMP.edits[0]


def test_applied_marks_its_revision_and_reverts_to_the_byte() -> None:
    patched = apply(SOURCE, TILE_CLAMP, CLAMP)
    assert marked_revision(patched, TILE_CLAMP) == TILE_CLAMP.revision
    assert marked_revision(SOURCE, TILE_CLAMP) is None
    assert revert(patched, TILE_CLAMP) == SOURCE


def test_a_wide_head_is_clamped_on_turing_and_nowhere_else() -> None:
    # FACTS: head 512 at tile 32 asks for 98,304 bytes, at 16 for 65,536; head 256 at 32 for 49,152.
    patched = apply(SOURCE, TILE_CLAMP, CLAMP)
    assert tiles(patched, (7, 5), 65536, 512) == {"prefill": 16, "reduce": 16}
    assert tiles(patched, (7, 5), 65536, 256) == {"prefill": 32, "reduce": 16}
    assert tiles(patched, (8, 6), 101376, 512) == {"prefill": 32, "reduce": 16}
    # A byte threshold alone once sent 8.6 down the Turing path; the capability decides first.
    assert tiles(patched, (8, 6), 65536, 512) == {"prefill": 32, "reduce": 16}
    assert tiles(patched, None, 0, 512) == {"prefill": 32, "reduce": 16}


def test_a_device_that_does_not_tell_its_limit_gets_the_smallest_tile() -> None:
    patched = apply(SOURCE, TILE_CLAMP, CLAMP)
    assert tiles(patched, (7, 5), None, 256) == {"prefill": 16, "reduce": 16}
    # An 8-bit tile must be at least 32 wide, by upstream's own comment.
    assert tiles(patched, (7, 5), None, 512, element_size=1) == {"prefill": 32, "reduce": 16}


def test_a_tile_at_the_very_limit_stays() -> None:
    patched = apply(SOURCE, TILE_CLAMP, CLAMP)
    assert tiles(patched, (7, 0), 98304, 512) == {"prefill": 32, "reduce": 16}
    assert tiles(patched, (7, 0), 98303, 512) == {"prefill": 16, "reduce": 16}


@pytest.mark.parametrize("ending", ["\r\n", "\n"])
def test_line_endings_and_odd_separators_stay(ending: str) -> None:
    # A form feed and U+2028 end a line for str.splitlines, and not for Python's parser.
    odd = SOURCE.replace("    use_td = False", '    use_td = ""  # \x0c \u2028 page').replace("\n", ending)
    patched = apply(odd, TILE_CLAMP, CLAMP)
    assert patched.count("\n") == patched.count(ending)
    assert revert(patched, TILE_CLAMP) == odd
    assert tiles(patched, (7, 5), 65536, 512) == {"prefill": 16, "reduce": 16}


def test_a_block_that_would_land_elsewhere_is_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lines counted in another way than the parser's put the block into the wrong place.
    monkeypatch.setattr(patch_engine, "_lines", lambda source: source.splitlines(keepends=True))
    with pytest.raises(Conflict, match="does not stand alone"):
        apply(SOURCE.replace("BLOCK_M = 16", "BLOCK_M = 16  # \x0c\x0c\x0c\x0c\x0c"), TILE_CLAMP, CLAMP)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (SOURCE.replace("def unified_attention", "def unified_attention_v2"), "function unified_attention stands 0"),
        (SOURCE + SOURCE, "function unified_attention stands 2"),
        (SOURCE.replace("TILE_SIZE_DECODE = _get", "TILE_D = _get"), "TILE_SIZE_DECODE = _get_tile_size(...) stands 0"),
        (
            SOURCE.replace("    use_td = False\n", "    TILE_SIZE_DECODE = _get_tile_size(1, 2, 3, False)\n"),
            "TILE_SIZE_DECODE = _get_tile_size(...) stands 2",
        ),
        (SOURCE.replace("    BLOCK_M = 16\n", ""), "BLOCK_M is not assigned"),
        (SOURCE.replace("(q, k, head_size)", "(query, k, head_size)"), "q is not assigned"),
        (SOURCE.replace("TILE_SIZE=TILE_SIZE_DECODE", "TILE_SIZE=16"), "TILE_SIZE_DECODE is not read"),
        (SOURCE[: SOURCE.index("min(TILE_SIZE_DECODE")] + "min(", "no whole Python file"),
        (SOURCE + "\0", "no whole Python file"),
        (SOURCE.replace("    kernel(", "    TILE_SIZE_DECODE += 0; kernel("), "starts on the same line"),
    ],
)
def test_drift_is_a_conflict(source: str, words: str) -> None:
    with pytest.raises(Conflict, match=re.escape(words)):
        apply(source, TILE_CLAMP, CLAMP)


def test_an_older_revision_is_taken_out_whole() -> None:
    older = replace(TILE_CLAMP, revision=0)
    old = apply(SOURCE, older, replace(CLAMP, block="TILE_SIZE_PREFILL = 16\n"))
    assert marked_revision(old, TILE_CLAMP) == 0
    assert revert(old, TILE_CLAMP) == SOURCE


def test_a_damaged_block_is_a_conflict() -> None:
    patched = apply(SOURCE, TILE_CLAMP, CLAMP)
    with pytest.raises(Conflict, match="damaged"):
        revert(patched.replace(TILE_CLAMP.end, "# gone"), TILE_CLAMP)
    with pytest.raises(Conflict, match="damaged"):
        marked_revision(patched.replace(TILE_CLAMP.begin, "# gone"), TILE_CLAMP)
    with pytest.raises(Conflict, match="stands 2 times"):
        marked_revision(patched + patched, TILE_CLAMP)


def test_a_method_is_found_by_its_dotted_name() -> None:
    source = "class A:\n    def f(self):\n        x = g()\n        return x\n\n\ndef f():\n    x = g()\n    return x\n"
    edit = Edit("a.py", "A.f", ("x",), "g", ("self",), "x += 1\n")
    patch = Patch("add", 1, "", (), "", (), (edit,))
    edited = apply(source, patch, edit)
    assert edited.index("x += 1") < edited.index("def f():")
    assert edited.count("x += 1") == 1
    with pytest.raises(Conflict, match=re.escape("function B.f stands 0 times")):
        apply(source, patch, replace(edit, scope="B.f"))


def test_a_source_that_is_no_text_is_a_conflict() -> None:
    with pytest.raises(Conflict, match="byte 3 is 0xff"):
        decoded(b"abc\xff")


def test_every_patch_says_why_and_until_when() -> None:
    assert len({patch.id for patch in PATCHES}) == len(PATCHES)
    for patch in PATCHES:
        assert patch.reason and patch.links and patch.removal and patch.shown_on and patch.edits
