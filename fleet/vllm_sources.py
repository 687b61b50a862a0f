"""vLLM's sources by version, from the package index or the cache, or a tree at hand."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from fleet.environments import NotThere, check_room, environment, locked, on_index, out_of_reach, site_packages
from fleet.errors import FleetError
from fleet.paths import PROJECT, cache_dir
from fleet.steps import Steps

from ansible.module_utils.version_rules import FIRST_BELOW_8  # isort: skip
from ansible.module_utils.patch_files import vllm_version  # isort: skip

NEWEST = "newest"
_FILES = PROJECT / "roles" / "vllm_source_build" / "files"
# Of an sdist is kept what holds the kernels and what says which torch they are for.
_KEPT = re.compile(r"[^/]+/(vllm/.*|requirements/cuda\.txt|PKG-INFO)")
# What a build reads; the rest of an sdist is tests, texts and the Rust front end.
_BUILT = re.compile(r"[^/]+/((vllm|csrc|cmake|tools|requirements)/.*|CMakeLists\.txt|[\w-]+\.(py|toml)|PKG-INFO)")
# Measured: an sdist of 0.33.0 45 MB, what is kept of it 56 MB; the index client with uv 0.1 GB.
_SOURCE_BYTES, _CLIENT_BYTES = 300_000_000, 300_000_000


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder that holds `vllm/`, and its version where it tells one, else empty."""

    path: Path
    version: str

    def torch_pin(self) -> str:
        """The torch release that this vLLM is for, such as `2.13.0`; empty where the tree does not say."""
        pins = {str(s.version) for r in self._requirements() if r.name == "torch" for s in r.specifier}
        return pins.pop() if len(pins) == 1 else ""

    def _requirements(self) -> list[Requirement]:
        """What an sdist's requirements or an installed package's metadata ask for."""
        listed = self.path / "requirements" / "cuda.txt"
        lines = listed.read_text().splitlines() if listed.is_file() else []
        for told in self.path.glob("vllm-*.dist-info/METADATA"):
            lines += HeaderParser().parsestr(told.read_text()).get_all("Requires-Dist", [])
        return [found for line in lines if (found := _requirement(line.partition(" #")[0]))]


def tree_of(vllm: str, steps: Steps) -> Tree:
    """The tree that `--vllm` names: a version of the package index, `newest`, or a folder that holds `vllm/`.

    Raises FleetError: 2 for what is neither, refused where the index or the disk does not give it.
    """
    if vllm == NEWEST:
        return _of_version(max(versions(), key=Version), steps)
    if re.fullmatch(r"\d+(\.\d+)+\S*", vllm):
        return _of_version(_version(vllm), steps)
    path = Path(vllm)
    if not (path / "vllm").is_dir():
        raise FleetError(
            f"{vllm!r} is neither a version nor a folder that holds vllm/",
            where=f"--vllm {vllm}", mend="give a version such as 0.33.0, newest, or the path of an unpacked sdist",
            who="patch",
        )  # fmt: skip
    return Tree(path, vllm_version(path))


def build_tree(version: str, steps: Steps) -> Tree:
    """What the build of a version of the package index reads, `newest` among them; errors as of `tree_of`."""
    return _of_version(max(versions(), key=Version) if version == NEWEST else _version(version), steps, _BUILT)


def versions() -> list[str]:
    """The releases whose sdists the index has, from the oldest that was ever patched, oldest first; asks pip.

    Raises FleetError: refused where no index answers.
    """
    told = on_index("vllm", "--no-binary", "vllm", "--ignore-requires-python")
    found = [version for version in told if Version(version) >= Version(FIRST_BELOW_8)]
    return sorted(found, key=Version)


def _version(text: str) -> str:
    """The version as the index writes it; raises FleetError where it is none or too old."""
    try:
        version = Version(text)
    except InvalidVersion:
        raise _no_such(text, "is no version") from None
    if version < Version(FIRST_BELOW_8):
        raise _no_such(text, f"is older than {FIRST_BELOW_8}, the oldest that was patched")
    return str(version)


def _of_version(version: str, steps: Steps, kept: re.Pattern[str] = _KEPT) -> Tree:
    """The kept tree of a version, fetched and unpacked the first time."""
    home = cache_dir() / ("vllm" if kept is _KEPT else "vllm-build")
    home.mkdir(exist_ok=True)
    tree = home / version
    with locked(home):
        if not tree.is_dir():
            if version not in versions():
                raise _no_such(version, "is not on the package index")
            check_room(home, f"the sources of vLLM {version}", _SOURCE_BYTES)
            client = _index_client(steps)
            with steps.step(f"sources of vLLM {version}"):
                _fetch(client, version, tree, kept)
    return Tree(tree, version)


def _fetch(client: Path, version: str, tree: Path, kept: re.Pattern[str]) -> None:
    """The sdist as a file, checked against the index's digest, its kernels unpacked; in its place when whole."""
    part = tree.with_name(f".{version}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
    part.mkdir()
    try:
        archive = part / "sdist.tar.gz"
        # This project's Python, whose pip it asks for the indexes.
        argv = [sys.executable, str(_FILES / "fetch_sdist.py"), "vllm", version, "", str(archive)]
        own = {"PYTHONPATH": str(client), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(argv, env=os.environ | own, capture_output=True, text=True, check=False)
        if done.returncode or done.stdout:
            words = " ".join((done.stdout or done.stderr).split())[-300:]
            raise out_of_reach(f"the sdist of vLLM {version} could not be fetched: {words}")
        with tarfile.open(archive) as tar:
            tar.extractall(part, [member for member in tar if kept.fullmatch(member.name)], filter="data")
        archive.unlink()
        [unpacked] = part.iterdir()
        if vllm_version(unpacked) != version:
            raise out_of_reach(f"the sdist says version {vllm_version(unpacked) or 'nothing'}, and {version} is wanted")
        unpacked.rename(tree)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _index_client(steps: Steps) -> Path:
    """The packages of the source build's index client, by hash."""
    lock = _FILES / "tools-requirements.txt"
    name = f"index-client-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    try:
        words = ["--no-deps", "--require-hashes", "-r", str(lock)]
        return site_packages(environment(name, "index client", words, _CLIENT_BYTES, steps))
    except NotThere as missing:
        raise out_of_reach(f"the package index does not have the index client: {missing}") from missing


def _requirement(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def _no_such(version: str, why: str) -> FleetError:
    return FleetError(
        f"vLLM {version} {why}; there are {', '.join(versions())}",
        where=f"--vllm {version}", mend="give one of these, or newest", who="patch",
    )  # fmt: skip
