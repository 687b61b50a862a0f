"""Molecule's scenarios, each on the same host: a role finds what the roles before it left, as in a converge."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.paths import PROJECT
from tests.machine import bare_sandbox, runner

_BIN = Path(sys.executable).parent
ROLES = (
    "preflight", "swapfile", "cuda_toolkit_sbsa", "rust", "vllm_source_build", "triton_patch", "secrets_fetch",
    "vllm_service",
)  # fmt: skip
BEHAVIORS = ("interrupted", "drifted")
_converged: set[str] = set()


@pytest.fixture(scope="module", autouse=True)
def bare_host() -> Iterator[None]:
    """One bare host for all scenarios."""
    with bare_sandbox():
        yield


def molecule_test(scenario: str, host: str = "vllm-fleet-host1") -> list[tuple[int, int]]:
    """Runs the scenario's whole sequence; returns of each of its plays how many steps were ok and changed, in order."""
    done = subprocess.run(
        [str(_BIN / "molecule"), "test", "--no-command-borders", "-s", scenario],
        cwd=PROJECT,
        env={**os.environ, "PATH": f"{_BIN}:{os.environ['PATH']}", "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-3000:]
    recaps = re.findall(rf"^{host}\s*: ok=(\d+)\s+changed=(\d+)", done.stdout, re.MULTILINE)
    return [(int(ok), int(changed)) for ok, changed in recaps]


def changes(plays: list[tuple[int, int]]) -> list[int]:
    """How much each play changed."""
    return [changed for _, changed in plays]


@pytest.mark.arm64
def test_what_depends_on_the_architecture() -> None:
    assert runner("sandbox", "up", "--arm64").returncode == 0
    check, converge, again, check_again = changes(molecule_test("arm64", "vllm-fleet-arm64"))
    assert check >= 1
    assert converge >= 1
    assert (again, check_again) == (0, 0)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_on_its_bare_host(role: str) -> None:
    check, converge, again, check_again = changes(molecule_test(role))
    _converged.add(role)
    assert converge >= 1
    assert check >= 1
    assert (again, check_again) == (0, 0)


@pytest.mark.parametrize("behavior", BEHAVIORS)
def test_a_behavior(behavior: str) -> None:
    plays = molecule_test(behavior)
    before, (steps, altered), *noticed, check, converge, again = plays
    # What the roles have done one by one leaves the whole nothing to do. By itself a behavior begins on a bare host.
    assert before[1] == 0 or not set(ROLES) <= _converged
    assert altered == steps, "a step of the side effect found nothing to alter"
    assert len(noticed) == (behavior == "drifted")
    assert check[1] >= 5
    assert converge[1] >= 5
    assert again[1] == 0
