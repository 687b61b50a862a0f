"""A variable that nothing reads is unknown (CASES B23, invariant 3); libraries are small packages on the path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleet.paths import PROJECT

PROGRAM = PROJECT / "roles/vllm_service/files/check_arguments.py"
ENTRY = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--served-model-name")
parser.add_argument("--port", type=int)
parser.parse_args()
raise AssertionError("the check went past the parser")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An installation whose libraries read one variable each."""
    for name, text in {
        "vllm/__init__.py": "",
        "vllm/envs.py": 'environment_variables = {"VLLM_KNOWN": 1}\n',
        "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/openai/__init__.py": "",
        "vllm/entrypoints/openai/api_server.py": ENTRY,
        "triton/__init__.py": "",
        "triton/knobs.py": 'dir = env_str("TRITON_CACHE_DIR")\n',
        "torch/__init__.py": "",
        "torch/lib/libtorch.so": "\0\0PYTORCH_ALLOC_CONF\0\0",
        "huggingface_hub/__init__.py": 'os.environ.get("HF_HUB_ENABLE_HF_TRANSFER")\n',
    }.items():
        file = tmp_path / "site" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path / "site"


def check(site: Path, variables: list[str], arguments: list[str], own: list[str] | None = None) -> dict[str, Any]:
    request = site.parent / "request.json"
    request.write_text(json.dumps({"variables": variables, "arguments": arguments, "own": own or []}))
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(request)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("VLLM_KNOWN", True),
        # Does nothing since 0.26 (FACTS).
        ("VLLM_ATTENTION_BACKEND", False),
        ("TRITON_CACHE_DIR", True),
        ("TRITON_CACHE", False),
        ("TRITON_CACHE_DIRS", False),
        ("PYTORCH_ALLOC_CONF", True),
        ("PYTORCH_ALLOC", False),
        ("HF_HUB_ENABLE_HF_TRANSFER", True),
        ("HF_HUB_ENABLE_TRANSFER", False),
        ("HF_TRANSFER", False),
        # No such library in this release.
        ("FLASHINFER_WORKSPACE_BASE", False),
        # Nobody's in particular.
        ("OMP_NUM_THREADS", True),
        ("NCCL_DEBUG", True),
    ],
)
def test_a_variable_is_known_where_its_library_mentions_it(site: Path, name: str, known: bool) -> None:
    assert check(site, [name], [])["unknown_variables"] == ([] if known else [name])


def test_what_the_role_sets_for_every_release_may_go_unread(site: Path) -> None:
    own = ["FLASHINFER_WORKSPACE_BASE"]
    assert check(site, own, [], own)["unknown_variables"] == []


def test_the_parser_of_the_release_judges_the_arguments(site: Path) -> None:
    assert check(site, [], ["--port", "8000"])["arguments"] == ""
    assert "unrecognized arguments: --enable-reasoning" in check(site, [], ["--enable-reasoning"])["arguments"]
    assert "invalid int value: 'x'" in check(site, [], ["--port", "x"])["arguments"]
