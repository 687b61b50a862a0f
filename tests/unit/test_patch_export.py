"""The patch as a mail: git takes it, nothing of this project stands in it, and it is somebody's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from ansible.module_utils.patch_registry import ATTENTION, FLEX

from fleet.errors import ExitCode, FleetError
from fleet.patch_export import TEST, export
from fleet.patch_trees import apply_all
from fleet.vllm_sources import Tree
from tests.unit.test_patch_sources import SOURCES, launches


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An unpacked sdist, and a git that knows its user."""
    for name, text in {**SOURCES, "PKG-INFO": "Name: vllm\nVersion: 0.33.0\n"}.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    config = tmp_path / "gitconfig"
    config.write_text("[user]\n\tname = A. Person\n\temail = a@example.com\n[commit]\n\tgpgsign = true\n")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", "/dev/null")
    return tmp_path / "tree"


def git(folder: Path, *words: str) -> str:
    argv = ["git", "-C", str(folder), "-c", "commit.gpgsign=false", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_git_takes_the_mail_and_the_kernels_fit(tree: Path, tmp_path: Path) -> None:
    mail = tmp_path / "0001.patch"
    mail.write_text(export(Tree(tree, "0.33.0")))
    assert "fleet" not in mail.read_text().lower()
    # One who exports from a tree that is patched already gets the same change.
    apply_all(tree, "7.5")
    again = export(Tree(tree, "0.33.0"))
    assert again[again.index("\ndiff ") :] == mail.read_text()[mail.read_text().index("\ndiff ") :]
    upstream = tmp_path / "upstream"
    for name, text in SOURCES.items():
        (upstream / name).parent.mkdir(parents=True, exist_ok=True)
        (upstream / name).write_text(text)
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "upstream"], ["am", "-q", str(mail)]):
        git(upstream, *words)
    assert git(upstream, "log", "-1", "--format=%an %ae").strip() == "A. Person a@example.com"
    changed = git(upstream, "diff", "--name-only", "HEAD~1").split()
    assert sorted(changed) == sorted([ATTENTION, FLEX, TEST])
    assert not [line for line in git(upstream, "diff", "HEAD~1").splitlines() if line.startswith("-    ")]
    # The renamed change does what the patch does: a T4G, 512-wide heads, 8 to a KV head.
    patched = (upstream / ATTENTION).read_text()
    assert launches(patched, (7, 5), 65536, 512) == launches((tree / ATTENTION).read_text(), (7, 5), 65536, 512)
    assert launches(patched, (8, 0), 166912, 512) == launches(SOURCES[ATTENTION], (8, 0), 166912, 512)


def test_a_git_that_does_not_know_its_user_is_told(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for name in ("GIT_AUTHOR_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_NAME", "GIT_COMMITTER_EMAIL", "EMAIL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(FleetError, match="git does not know whose the patch is") as error:
        export(Tree(tree, "0.33.0"))
    assert error.value.code is ExitCode.REFUSED
    assert error.value.mend.startswith("git config --global user.name")


def test_a_drifted_source_is_a_conflict_and_no_mail(tree: Path) -> None:
    (tree / ATTENTION).write_text(SOURCES[ATTENTION].replace("_get_tile_size", "_pick_tile"))
    with pytest.raises(FleetError, match="conflict") as error:
        export(Tree(tree, "0.33.0"))
    assert error.value.code is ExitCode.REFUSED
    assert error.value.where.startswith(str(tree / ATTENTION))
