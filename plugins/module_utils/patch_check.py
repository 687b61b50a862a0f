"""The compile check of source files, as a host and the controller run it: what decides its answer, and its running."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.module_utils.patch_files import sha256

# What the attention kernels are made from besides the judged files; a change in it asks the compiler anew.
_NEIGHBORS = ("vllm/v1/attention/ops/*.py", "vllm/v1/kv_cache_interface.py")


class NoVerdict(Exception):
    """The check ended without a report; says why. `slow` where only its time was up."""

    def __init__(self, what: str, *, slow: bool = False) -> None:
        super().__init__(what)
        self.slow = slow


def question(tree: Path, contents: Mapping[str, bytes], compilers: Sequence[str], asked: Mapping[str, Any]) -> str:
    """Digest of all that decides the answer.

    Args:
        tree: folder that holds `vllm/`.
        contents: target (path below the tree) to the content to judge in its place.
        compilers: what `compilers_of` found.
        asked: the rest, as JSON: capability, limit, shape, texts of the checkers.
    """
    digests = {target: sha256(content) for target, content in contents.items()}
    paths = {str(path.relative_to(tree)): path for pattern in _NEIGHBORS for path in tree.glob(pattern)}
    beside = {name: sha256(path.read_bytes()) for name, path in sorted(paths.items()) if name not in contents}
    decisive = [digests, beside, list(compilers), asked]
    return str(sha256(json.dumps(decisive, sort_keys=True).encode()))


def compilers_of(site_packages: Path) -> list[str]:
    """The torch and Triton that a Python with these packages sees: its own, and those its path files bring."""
    lines = (line for pth in site_packages.glob("*.pth") for line in pth.read_text().splitlines())
    places = [site_packages, *(Path(line) for line in lines if line.startswith("/"))]
    kinds = ("torch-*.dist-info", "triton-*.dist-info")
    return sorted({path.name for place in places for kind in kinds for path in place.glob(kind)})


def run_check(
    python: str,
    checkers: Mapping[str, str],
    tree: Path,
    contents: Mapping[str, bytes],
    asked: Mapping[str, Any],
    *,
    timeout_s: float,
    scratch: str | None = None,
) -> dict[str, Any]:
    """Runs the checks in an empty folder, one after the other, and returns one report of all their launches.

    Args:
        python: interpreter that sees torch and Triton.
        checkers: file name to text of each program; a later one may import an earlier one.
        tree: folder that holds `vllm/`.
        contents: target (path below the tree) to the content to judge in its place.
        asked: `capability`, `limit_bytes` and `shape`.
        timeout_s: longest time, seconds.
        scratch: folder to make the empty one in.

    Raises NoVerdict.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-patch-", dir=scratch) as name:
        folder = Path(name)
        sources = {target: folder / "sources" / target for target in contents}
        for target, path in sources.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[target])
        request = folder / "request.json"
        for program, text in checkers.items():
            (folder / program).write_text(text)
        places = {"site_packages": str(tree), "sources": {target: str(path) for target, path in sources.items()}}
        request.write_text(json.dumps({**asked, **places}))
        reports = [_run([python, "-B", str(folder / program), str(request)], folder, timeout_s) for program in checkers]
    launches = [launch for report in reports for launch in report["launches"]]
    return {**reports[0], "launches": launches, "fits": all(report["fits"] for report in reports)}


def _run(argv: list[str], folder: Path, timeout_s: float) -> dict[str, Any]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "TRITON_CACHE_DIR": f"{folder}/cache"}
    # By this mark an interrupted run's processes are found and ended.
    environment |= {name: os.environ[name] for name in ("VLLM_FLEET_RUN",) if name in os.environ}
    try:
        done = subprocess.run(
            argv,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise NoVerdict(f"the compile check took longer than {timeout_s:g} s", slow=True) from error
    if done.returncode < 0:
        raise NoVerdict(f"ended by signal {-done.returncode} (journalctl -k tells whether memory ran out)")
    if done.returncode:
        raise NoVerdict((done.stderr.strip().splitlines() or [f"exit {done.returncode}, no word"])[-1])
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report
