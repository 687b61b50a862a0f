"""Runs vLLM's attention kernels in Triton's interpreter, on CPU tensors: `TRITON_INTERPRET=1 interpreted.py REQUEST`.

REQUEST is JSON: {"tree": folder that holds vllm/, "capability" and "limit_bytes": what the host code is told, "runs":
[{"problem": a Problem, "altered": [kernel, argument, what is added to it] or null}]}. Prints a list, for each run
{"error", "of_bound", "launches": [{"kernel", "tile", "block_m"}]}. Runs where torch and Triton are, with nothing
of this project's environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_PROJECT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_PROJECT), str(_PROJECT / "roles" / "triton_patch" / "files")]

import compile_check  # noqa: E402

from tests.kernels.problems import KERNELS, Problem, prepared  # noqa: E402


class Launched:
    """A kernel whose launches are noted, and may have one argument altered."""

    def __init__(self, name: str, kernel: Any) -> None:
        self._name, self._kernel = name, kernel
        self.altered: tuple[str, str, int] | None = None
        self.launches: list[dict[str, Any]] = []

    def __getitem__(self, grid: Any) -> Any:
        def launch(**arguments: Any) -> None:
            if self.altered and self.altered[0] == self._name:
                arguments[self.altered[1]] += self.altered[2]
            noted = {"kernel": self._name, "tile": arguments["TILE_SIZE"], "block_m": arguments.get("BLOCK_M")}
            self.launches.append(noted)
            self._kernel[grid](**arguments)

        return launch


def main(request_path: str) -> int:
    """Runs them all and prints the report."""
    request = json.loads(Path(request_path).read_text())
    tree = Path(request["tree"])
    major, minor = (int(part) for part in request["capability"].split("."))
    module = compile_check.load(tree, tree / compile_check.ATTENTION, (major, minor), request["limit_bytes"])
    kernels = [Launched(name, getattr(module, name)) for name in KERNELS]
    for name, kernel in zip(KERNELS, kernels, strict=True):
        setattr(module, name, kernel)
    report = []
    for run in request["runs"]:
        for kernel in kernels:
            kernel.altered, kernel.launches = run["altered"], []
        problem = prepared(module, Problem(**run["problem"]), "cpu")
        problem.call()
        error, of_bound = problem.errors()
        launches = [launch for kernel in kernels for launch in kernel.launches]
        report.append({"error": error, "of_bound": of_bound, "launches": launches})
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
