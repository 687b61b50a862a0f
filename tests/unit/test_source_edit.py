"""Anchored edits: applied where the anchors are, refused where they are not, reverted to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ansible.module_utils.source_edit import TILE_CLAMP, Conflict, apply, marked_revision, revert

# The shape of the host code as it stands in vLLM 0.26.0 to 0.33.0, in our own few lines.
SOURCE = """\
def _get_tile_size(head, window, size, is_prefill):
    return 32 if is_prefill else 16


def unified_attention(q, k, head_size):
    BLOCK_M = 16
    TILE_SIZE_PREFILL = _get_tile_size(head_size, 0, 2, is_prefill=True)
    TILE_SIZE_DECODE = _get_tile_size(head_size, 0, 2, is_prefill=False)
    use_td = False
    if use_td:
        TILE_SIZE_PREFILL = min(TILE_SIZE_PREFILL, 16)
        TILE_SIZE_DECODE = min(TILE_SIZE_DECODE, 16)
    kernel(TILE_SIZE=TILE_SIZE_PREFILL)
    reduce_segments(TILE_SIZE=TILE_SIZE_DECODE)
"""


def run(source: str, capability: tuple[int, int] | None, limit: int, head: int) -> dict[str, int]:
    """The tiles that the host code hands to its kernels."""
    seen: dict[str, int] = {}

    class Device:
        shared_memory_per_block_optin = limit

    class Cuda:
        @staticmethod
        def get_device_properties(_device: object) -> type[Device]:
            return Device

    class Torch:
        cuda = Cuda

    class Platform:
        @staticmethod
        def get_device_capability() -> tuple[int, int] | None:
            return capability

    class Triton:
        @staticmethod
        def next_power_of_2(number: int) -> int:
            return 1 << (number - 1).bit_length()

    class Query:
        device = "cuda:0"

    scope = {
        "torch": Torch,
        "triton": Triton,
        "current_platform": Platform,
        "kernel": lambda TILE_SIZE: seen.update(prefill=TILE_SIZE),  # noqa: N803
        "reduce_segments": lambda TILE_SIZE: seen.update(reduce=TILE_SIZE),  # noqa: N803
    }
    exec(source, scope)  # noqa: S102
    scope["unified_attention"](Query(), None, head)  # type: ignore[operator]
    return seen


def test_applied_marks_its_revision_and_reverts_to_the_byte() -> None:
    patched = apply(SOURCE, TILE_CLAMP)
    assert marked_revision(patched, TILE_CLAMP) == TILE_CLAMP.revision
    assert revert(patched, TILE_CLAMP) == SOURCE


def test_a_wide_head_is_clamped_on_turing_and_nowhere_else() -> None:
    # FACTS: head 512 at tile 32 asks for 98,304 bytes, at 16 for 65,536; head 256 at 32 for 49,152.
    patched = apply(SOURCE, TILE_CLAMP)
    assert run(patched, (7, 5), 65536, 512) == {"prefill": 16, "reduce": 16}
    assert run(patched, (7, 5), 65536, 256) == {"prefill": 32, "reduce": 16}
    assert run(patched, (8, 6), 101376, 512) == {"prefill": 32, "reduce": 16}
    # A byte threshold alone once sent 8.6 down the Turing path; the capability decides first.
    assert run(patched, (8, 6), 65536, 512) == {"prefill": 32, "reduce": 16}
    assert run(patched, None, 0, 512) == {"prefill": 32, "reduce": 16}


def test_carriage_returns_stay() -> None:
    patched = apply(SOURCE.replace("\n", "\r\n"), TILE_CLAMP)
    assert patched.count("\n") == patched.count("\r\n")
    assert revert(patched, TILE_CLAMP) == SOURCE.replace("\n", "\r\n")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (SOURCE.replace("def unified_attention", "def unified_attention_v2"), "function unified_attention stands 0"),
        (SOURCE + SOURCE, "function unified_attention stands 2"),
        (SOURCE.replace("TILE_SIZE_DECODE = _get", "TILE_D = _get"), "TILE_SIZE_DECODE = _get_tile_size"),
        (SOURCE.replace("    BLOCK_M = 16\n", ""), "BLOCK_M is not assigned"),
        (SOURCE.replace("TILE_SIZE=TILE_SIZE_DECODE", "TILE_SIZE=16"), "TILE_SIZE_DECODE is not read"),
        (SOURCE[: SOURCE.index("min(TILE_SIZE_DECODE")] + "min(", "no whole Python file"),
    ],
)
def test_drift_is_a_conflict(source: str, words: str) -> None:
    with pytest.raises(Conflict, match=words.replace("(", r"\(")):
        apply(source, TILE_CLAMP)


def test_an_older_revision_is_taken_out_whole() -> None:
    older = replace(TILE_CLAMP, revision=0, block="TILE_SIZE_PREFILL = 16\n")
    old = apply(SOURCE, older)
    assert marked_revision(old, TILE_CLAMP) == 0
    assert revert(old, TILE_CLAMP) == SOURCE


def test_a_damaged_block_is_a_conflict() -> None:
    patched = apply(SOURCE, TILE_CLAMP)
    with pytest.raises(Conflict, match="damaged"):
        revert(patched.replace(TILE_CLAMP.end, "# gone"), TILE_CLAMP)
