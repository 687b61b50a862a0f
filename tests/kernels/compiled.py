"""Compiles vLLM's attention kernels for a capability, with no GPU, and gives each launch's code by digest.

`compiled.py REQUEST`: JSON {"tree": folder that holds vllm/, "targets": [["8.0", opt-in bytes], ...], "problems":
[Problem, ...]}. Prints a list, for each target, problem and launch {"capability", "phase", "head_size", "kernel",
"shared_bytes", "ptx", "cubin"}, the last two as SHA-256. Runs where torch and Triton are, with nothing
of this project's environment.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_PROJECT), str(_PROJECT / "roles" / "triton_patch" / "files")]

import compile_check  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from tests.kernels.problems import KERNELS, Problem, prepared  # noqa: E402


class Compiled:
    """Stands where a kernel stands: a launch compiles it."""

    def __init__(self, name: str, kernel: Any, launches: list[dict[str, Any]]) -> None:
        self._name, self._kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(**arguments: Any) -> None:
            made = self._kernel.warmup(grid=grid, **arguments)
            code = {"ptx": made.asm["ptx"].encode(), "cubin": made.asm["cubin"]}
            digests = {name: hashlib.sha256(content).hexdigest() for name, content in code.items()}
            self._launches.append({"kernel": self._name, "shared_bytes": made.metadata.shared, **digests})

        return launch


def main(request_path: str) -> int:
    """Compiles them all and prints the report."""
    request = json.loads(Path(request_path).read_text())
    tree, report = Path(request["tree"]), []
    for capability, limit in request["targets"]:
        major, minor = (int(part) for part in capability.split("."))
        driver.set_active(compile_check.CompileOnlyDriver(major * 10 + minor, limit))
        module = compile_check.load(tree, tree / compile_check.ATTENTION, (major, minor), limit)
        launches: list[dict[str, Any]] = []
        for name in KERNELS:
            setattr(module, name, Compiled(name, getattr(module, name), launches))
        for described in request["problems"]:
            launches.clear()
            problem = Problem(**described)
            prepared(module, problem, "cpu").call()
            about = {"capability": capability, "phase": problem.phase, "head_size": problem.head_size}
            report += [about | launch for launch in launches]
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
