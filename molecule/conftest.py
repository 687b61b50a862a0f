"""What the scenarios' tests share; `host` is testinfra's, over podman itself, which spares Ansible's round trips."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sandbox import containers

# testinfra starts `podman` by its name; the sandbox's has storage of its own.
os.environ["PATH"] = f"{containers.podman_path().parent}:{os.environ['PATH']}"


class Read(Protocol):
    """Reads a JSON file of the host."""

    def __call__(self, path: str) -> Any: ...


@pytest.fixture
def record(host: Any) -> Read:
    """The content of one JSON file on the host, named by a path or a pattern that fits one file."""

    def read(path: str) -> Any:
        return json.loads(host.check_output(f"cat {path}"))

    return read


# The second byte of a cubin's ELF flags is its architecture (FACTS).
_COMPILE = """
set -eu; d=$(mktemp -d); cd "$d"; trap 'rm -rf "$d"' EXIT
echo '__global__ void one(float *x) { x[0] = 1; }' >one.cu
/usr/local/cuda/bin/nvcc -arch=sm_75 -cubin -o one.cubin one.cu
python3 -c 'print(open("one.cubin", "rb").read()[49])'
"""


@pytest.fixture
def cubin_architecture(host: Any) -> Callable[[], int]:
    """Compiles a kernel for 7.5 with the host's nvcc; the architecture that the cubin says."""
    return lambda: int(host.check_output(_COMPILE))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A failed test of a unit shows what the unit said."""
    report = yield
    marker = item.get_closest_marker("journal")
    if report.when == "call" and report.failed and marker:
        host = item.funcargs["host"]  # type: ignore[attr-defined]
        for unit in marker.args:
            said = host.run(f"journalctl --no-pager --lines 60 --unit {unit}").stdout
            report.sections.append((f"journal of {unit}", said))
    return report
