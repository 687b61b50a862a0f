"""The patch of a vLLM version as a mail that `git am` takes: the change in upstream's style, and a test beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.patch_check import copy_of
from fleet.patch_trees import apply_all, revert_all
from fleet.paths import PROJECT
from fleet.vllm_sources import Tree

_UPSTREAM = PROJECT / "fleet" / "upstream"
_TEST = "test_triton_attention_shared_memory.py"
TEST = f"tests/v1/attention/{_TEST}"
# The oldest of the capabilities that the patch is for; which of them makes no difference to the edits.
_CAPABILITY = "7.5"
# vLLM's own line length (its pyproject.toml, 0.26.0 to 0.33.0 format without a change).
_LINE_LENGTH = "88"
_MARK = re.compile(r"^[ \t]*# vllm-fleet patch \S+( r\d+: begin|: end)\r?\n", re.M)


def export(tree: Tree) -> str:
    """The mail's text, against the files of that version as upstream has them.

    Raises FleetError: refused for a conflict, or where git does not know who the author is.
    """
    if shutil.which("git") is None:
        raise FleetError(
            "git is not installed", where="PATH", mend="apt-get install git", code=ExitCode.REFUSED, who="patch"
        )
    with copy_of(tree.path) as repository:
        revert_all(repository)
        _git(repository, "init", "-q")
        _git(repository, "add", ".")
        _git(repository, "commit", "-q", "-m", f"vLLM {tree.version}")
        for result in apply_all(repository, _CAPABILITY):
            for target in result.files:
                _restyle(repository / target)
        test = repository / TEST
        test.parent.mkdir(parents=True)
        shutil.copy(_UPSTREAM / _TEST, test)
        _git(repository, "add", ".")
        _git(repository, "commit", "-q", "-F", str(_UPSTREAM / "message.txt"))
        return _git(repository, "format-patch", "-1", "--stdout", "--no-signature")


def _restyle(path: Path) -> None:
    """Takes this project's marks and names out, and lays the lines as upstream does."""
    text = _MARK.sub("", path.read_bytes().decode())
    path.write_bytes(text.replace("_fleet_", "_pre_ampere_").replace("_FLEET_", "_PRE_AMPERE_").encode())
    argv = [sys.executable, "-m", "ruff", "format", "-q", "--isolated", "--no-cache", "--line-length", _LINE_LENGTH]
    subprocess.run([*argv, str(path)], check=True)


def _git(repository: Path, *words: str) -> str:
    """Runs git with the user's identity and nothing else of the user's configuration that would change the mail."""
    settings = ("commit.gpgsign=false", "core.autocrlf=false", "core.hooksPath=/dev/null", "user.useConfigOnly=true")
    options = [word for setting in settings for word in ("-c", setting)]
    # A repository that somebody stands in is not this one.
    env = {
        name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    }
    done = subprocess.run(
        ["git", "-C", str(repository), *options, *words], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        unknown = "tell me who you are" in done.stderr.lower()
        what = "git does not know whose the patch is" if unknown else f"git {words[0]}: {done.stderr.strip()[-400:]}"
        raise FleetError(
            what, where="git's configuration", code=ExitCode.REFUSED, who="patch",
            mend='git config --global user.name "Your Name"; git config --global user.email you@example.com',
        )  # fmt: skip
    return done.stdout
