"""`patch check` and `patch export` on a real vLLM, its kernels compiled by the Triton that goes with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.compilers import python_with
from fleet.patch_export import TEST
from fleet.paths import PROJECT, cache_dir
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from fleet.vllm_sources import Tree, tree_of

VERSION = "0.32.0"
# Gemma 4 E2B, as far as its attention goes.
CONFIG = {
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


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Shown nowhere that matters, remembered nowhere."""
    return Steps(terminal(stderr=True), Durations(tmp_path_factory.mktemp("durations") / "durations.json"), "test")


@pytest.fixture(scope="module")
def tree(steps: Steps) -> Tree:
    """The sources of the version, from the index where the cache lacks them."""
    return tree_of(VERSION, steps)


@pytest.fixture
def verdicts(tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache that holds sources and compilers and no verdict."""
    real = cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("tools", "vllm"):
        (cache_dir() / name).symlink_to(real / name)
    yield cache_dir() / "patch_checks"
    assert tree.path.is_dir()


def fleet(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fleet", *words], cwd=PROJECT, capture_output=True, text=True, check=False
    )


def by_launch(launches: list[dict[str, Any]]) -> dict[tuple[int, str], int]:
    """Shared bytes of the attention kernel by head size and phase."""
    kernel = "unified_attention"
    return {(one["head_size"], one["phase"]): one["shared_bytes"] for one in launches if one["kernel"] == kernel}


def test_the_real_kernels_fit_only_when_patched(verdicts: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ("patch", "check", "--vllm", VERSION, "--capability", "7.5", "--model", str(tmp_path), "--json")
    done = fleet(*words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # This version pins torch 2.13.0, and that brings Triton 3.7.1.
    assert (told["vllm"], told["triton"], told["limit_bytes"]) == (VERSION, "3.7.1", 65536)
    assert told["outcome"] == "fits_patched"
    stock, patched = by_launch(told["stock"]), by_launch(told["patched"])
    # Measured with Triton 3.6.0, 3.7.1 and 3.8.0 (FACTS, the kernel patch).
    known = {(512, "prefill"): 98304, (512, "decode"): 65536, (256, "prefill"): 49152, (256, "decode"): 32768}
    assert {key: stock[key] for key in known} == known
    assert patched.keys() == stock.keys()
    assert max(patched.values()) <= 65536
    assert len(list(verdicts.iterdir())) == 2
    again = fleet(*words)
    # Compiled before, and told so.
    assert (again.stdout, "compile" in again.stderr) == (done.stdout, False)


@pytest.fixture
def repository(tree: Tree, tmp_path: Path) -> Path:
    """A git repository with the version's attention files."""
    folder = tmp_path / "repository"
    for source in sorted((tree.path / "vllm" / "v1" / "attention").rglob("*.py")):
        path = folder / source.relative_to(tree.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.read_bytes())
    interface = "vllm/v1/kv_cache_interface.py"
    (folder / interface).write_bytes((tree.path / interface).read_bytes())
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", VERSION)
    return folder


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    return subprocess.run(
        ["git", "-C", str(folder), *author, *words], capture_output=True, text=True, check=True
    ).stdout


def test_the_exported_mail_is_taken_by_git_am_and_its_test_tells_the_two_apart(
    repository: Path, steps: Steps, tmp_path: Path
) -> None:
    mail = tmp_path / "0001.patch"
    done = fleet("patch", "export", "--vllm", VERSION, "--out", str(mail))
    assert done.returncode == 0, done.stderr
    assert "fleet" not in mail.read_text().lower()
    git(repository, "am", "-q", str(mail))
    assert git(repository, "status", "--porcelain") == ""
    changed = git(repository, "diff", "--name-only", "HEAD~1", "HEAD").split()
    assert {"vllm/v1/attention/ops/triton_unified_attention.py", TEST} < set(changed)
    python = python_with("3.7.1", steps)
    patched = upstream_test(python, repository)
    assert patched.returncode == 0, patched.stdout
    git(repository, "checkout", "-q", "HEAD~1", "--", "vllm")
    stock = upstream_test(python, repository)
    assert stock.returncode == 1, stock.stdout + stock.stderr
    assert "98304 <= 65536" in stock.stdout
    assert "test_launches_fit_turing[512-40]" in stock.stdout.partition("short test summary")[2]


def upstream_test(python: Path, repository: Path) -> subprocess.CompletedProcess[str]:
    """pytest of this project's environment under a Python that has torch."""
    parts = [PROJECT, PROJECT / "roles" / "triton_patch" / "files", Path(sysconfig.get_path("purelib"))]
    words = ["-q", "-rf", "-p", "tests.kernels.vllm_parts", "-p", "no:cacheprovider", "-c", "/dev/null"]
    return subprocess.run(
        [str(python), "-B", "-m", "pytest", *words, "--rootdir", str(repository), str(repository / TEST)],
        env={**os.environ, "VLLM_TREE": str(repository), "PYTHONPATH": ":".join(map(str, parts))},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
