"""Patches on a tree at hand: the outcomes, their codes, and nothing half done."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible.module_utils.patch_engine import apply
from ansible.module_utils.patch_registry import ATTENTION, FLEX

from fleet.errors import ExitCode, FleetError
from fleet.patch_trees import PATCHES, Outcome, Result, apply_all, revert_all, status_of
from fleet.paths import PROJECT
from tests.unit.test_patch_sources import SOURCE, SOURCES, tiles

OTHER = "vllm/v1/other.py"
[CLAMP] = PATCHES


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree that holds the file to patch and another one."""
    for name, text in ((OTHER, "untouched = True\n"), *SOURCES.items()):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def contents(tree: Path) -> dict[str, bytes]:
    """Every file by its name."""
    return {str(path.relative_to(tree)): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


def outcome(results: list[Result]) -> list[Outcome]:
    """Their outcomes."""
    return [result.outcome for result in results]


def test_applied_then_in_place_then_reverted_to_the_byte(tree: Path) -> None:
    before = contents(tree)
    assert outcome(status_of(tree, "7.5")) == [Outcome.ABSENT]
    applied = apply_all(tree, "7.5")
    assert outcome(applied) == [Outcome.APPLIED]
    after = contents(tree)
    assert {name for name in after if after[name] != before.get(name)} == {ATTENTION, FLEX}
    assert applied[0].files[ATTENTION] == {
        "sha256": hashlib.sha256(after[ATTENTION]).hexdigest(),
        "pristine_sha256": hashlib.sha256(before[ATTENTION]).hexdigest(),
    }
    # FACTS: a 512-wide head fits with its tile at 16.
    assert tiles(after[ATTENTION].decode(), (7, 5), 65536, 512)["prefill"] == 16
    assert outcome(apply_all(tree, "7.5")) == outcome(status_of(tree, "7.5")) == [Outcome.IN_PLACE]
    assert contents(tree) == after
    assert outcome(revert_all(tree)) == [Outcome.REVERTED]
    assert contents(tree) == before
    assert outcome(revert_all(tree)) == [Outcome.ABSENT]


@pytest.mark.parametrize("capability", ["8.0", "8.6", "9.0", "12.0"])
def test_from_8_0_on_nothing_is_needed(tree: Path, capability: str) -> None:
    before = contents(tree)
    assert outcome(apply_all(tree, capability)) == outcome(status_of(tree, capability)) == [Outcome.NOT_NEEDED]
    assert contents(tree) == before


def test_from_8_0_on_a_changed_file_is_nobodys_conflict(tree: Path) -> None:
    (tree / ATTENTION).write_text("nothing to anchor in\n")
    assert outcome(apply_all(tree, "8.6")) == outcome(status_of(tree, "8.6")) == [Outcome.NOT_NEEDED]


def test_an_earlier_revision_is_replaced_and_not_stacked(tree: Path) -> None:
    edit = replace(CLAMP.edits[2], block="_fleet_earlier = True\n", needs=())
    (tree / ATTENTION).write_text(apply(SOURCE, replace(CLAMP, revision=2, edits=(edit,)), ATTENTION))
    [found] = status_of(tree, "7.5")
    assert found.outcome is Outcome.ABSENT
    assert "another revision" in found.reason
    assert outcome(apply_all(tree, "7.5")) == [Outcome.APPLIED]
    text = (tree / ATTENTION).read_text()
    assert "_fleet_earlier" not in text
    assert text == apply(SOURCE, CLAMP, ATTENTION)


@pytest.mark.parametrize(
    ("drifted", "words"),
    [
        (SOURCE.replace("_get_tile_size", "_pick_tile"), "_get_tile_size"),
        (SOURCE.replace("    use_td = False\n", "    TILE_SIZE_DECODE = _get_tile_size(1, 0, 2)\n", 1), "2 times"),
        (SOURCE[: SOURCE.index("    TILE_SIZE_DECODE")] + "    TILE_SIZE_DECODE = _get_tile_size(", "no whole Python"),
        (SOURCE.replace("def unified_attention", "def attention"), "function unified_attention stands 0 times"),
    ],
)
def test_what_does_not_fit_is_a_conflict_and_changes_nothing(tree: Path, drifted: str, words: str) -> None:
    (tree / ATTENTION).write_text(drifted)
    before = contents(tree)
    for command in (apply_all, status_of):
        with pytest.raises(FleetError, match=words) as error:
            command(tree, "7.5")
        assert error.value.code is ExitCode.REFUSED
        assert hashlib.sha256(before[ATTENTION]).hexdigest() in error.value.where
    assert contents(tree) == before


def test_windows_line_ends_stay(tree: Path) -> None:
    (tree / ATTENTION).write_bytes(SOURCE.replace("\n", "\r\n").encode())
    before = contents(tree)
    apply_all(tree, "7.5")
    assert b"\n" not in (tree / ATTENTION).read_bytes().replace(b"\r\n", b"")
    revert_all(tree)
    assert contents(tree) == before


def test_a_file_that_the_wheel_did_not_install_is_a_conflict(tree: Path) -> None:
    digest = base64.urlsafe_b64encode(hashlib.sha256(SOURCE.encode()).digest()).decode().rstrip("=")
    record = tree / "vllm-0.33.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text(f"{ATTENTION},sha256={digest},{len(SOURCE)}\n")
    assert outcome(apply_all(tree, "7.5")) == [Outcome.APPLIED]
    (tree / ATTENTION).write_text((tree / ATTENTION).read_text() + "# mine\n")
    with pytest.raises(FleetError, match="neither what the wheel installed"):
        apply_all(tree, "7.5")


def test_a_patch_comes_out_where_it_would_not_fit_anymore(tree: Path) -> None:
    apply_all(tree, "7.5")
    path = tree / ATTENTION
    path.write_text(path.read_text().replace("_get_tile_size", "_pick_tile"))
    assert outcome(revert_all(tree)) == [Outcome.REVERTED]
    assert path.read_text() == SOURCE.replace("_get_tile_size", "_pick_tile")


def test_a_version_before_the_first_is_refused(tree: Path) -> None:
    (tree / "PKG-INFO").write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.25.1\n")
    before = contents(tree)
    with pytest.raises(FleetError, match=r"vLLM 0\.25\.1 is older than 0\.26\.0") as error:
        apply_all(tree, "7.5")
    assert error.value.code is ExitCode.REFUSED
    assert contents(tree) == before
    (tree / "PKG-INFO").write_text("Version: 0.26.0\n")
    assert outcome(apply_all(tree, "7.5")) == [Outcome.APPLIED]


def test_a_malformed_entry_changes_nothing(tree: Path) -> None:
    before = contents(tree)
    with pytest.raises(FleetError, match="removal is empty") as error:
        apply_all(tree, "7.5", [replace(CLAMP, removal="")])
    assert error.value.code is ExitCode.BAD_INPUT
    assert contents(tree) == before


def test_patches_are_applied_as_a_set(tree: Path) -> None:
    impossible = replace(CLAMP, id="other", edits=(replace(CLAMP.edits[0], target=OTHER),))
    before = contents(tree)
    with pytest.raises(FleetError, match="function unified_attention stands 0 times"):
        apply_all(tree, "7.5", [CLAMP, impossible])
    assert contents(tree) == before


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["apply", "--capability", "7.5"], 0, "applied"),
        (["status", "--capability", "7.5"], 4, "absent"),
        (["status", "--capability", "8.6"], 0, "not_needed"),
        (["revert"], 0, "absent"),
        (["apply", "--capability", "turing"], 2, "major.minor is wanted"),
        (["apply", "--capability", "7.9"], 2, "7.9 is of no GPU"),
        (["apply", "--capability", "7.5", "--tree", "/nowhere"], 2, "no vllm/ is in the tree"),
    ],
)
def test_the_command_tells_it_as_json_and_by_its_code(tree: Path, words: list[str], code: int, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet", "patch", words[0], "--tree", str(tree), *words[1:], "--json"],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    told = json.loads(done.stdout)
    if code == 2:
        assert what in told["error"]["what"]
        assert "\n  mend:  " in done.stderr
    else:
        assert [patch["outcome"] for patch in told["patches"]] == [what]
