"""An environment with Triton, vLLM's sources stock and patched, and a way to run a program of this folder there."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fleet import compilers, vllm_sources
from fleet.patch_trees import apply_all
from fleet.steps import Durations, Steps

_VLLM = "0.32.0"
_TRITON = compilers.TRITON_OF_TORCH[compilers.TORCH]
_STEPS = Steps(Console(file=io.StringIO()), Durations(), "test")

Run = Callable[[str | Path, dict[str, Any], dict[str, str]], Any]


@pytest.fixture(scope="session")
def stock() -> Path:
    """The tree of a real vLLM."""
    return vllm_sources.tree_of(_VLLM, _STEPS).path


@pytest.fixture(scope="session")
def patched(stock: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What of the tree the kernels need, patched as below 8.0."""
    tree = copied(stock, tmp_path_factory.mktemp("patched"))
    apply_all(tree, "7.5")
    return tree


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a program, of this folder or by its path, with (name, request, more environment) and returns its report."""
    python = compilers.python_with(_TRITON, _STEPS)

    def run(program: str | Path, request: dict[str, Any], more: dict[str, str]) -> Any:
        folder = tmp_path_factory.mktemp("run")
        (folder / "request").write_text(json.dumps(request))
        # The trees stay as they are, nothing that another run compiled is taken, and one core is enough.
        own = {"PYTHONDONTWRITEBYTECODE": "1", "TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
        argv = [str(python), str(Path(__file__).parent / program), str(folder / "request")]
        done = subprocess.run(argv, env=os.environ | own | more, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def copied(tree: Path, to: Path) -> Path:
    """A copy of what of the tree the patches touch and the kernels need."""
    shutil.copytree(tree / "vllm" / "v1", to / "vllm" / "v1")
    return to
