"""What a host needs to install a release without an index: its wheel and all that it depends on, held to digests.

Runs in the tools environment, which carries packaging.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from job import JobError
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from wheel_store import SCHEMA, Wheel, digest_of, wheels_of

_MIB = 1024 * 1024
_REMOVE = "remove that build's folder from the bucket, and ask who may write there; then converge again"


def described(folder: Path) -> list[Wheel]:
    """The wheels that lie in a folder, by name."""
    found = []
    for path in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        found.append(Wheel(str(name), str(version), path.name, digest_of(path), path.stat().st_size))
    return found


def lock_text(wheels: Iterable[Wheel]) -> str:
    """Requirements that hold an installer to exactly these files."""
    return "".join(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)


def tags(python: str) -> frozenset[Tag]:
    """What a wheel may be tagged with for Python `major.minor` on this host."""
    major, minor = map(int, python.split("."))
    interpreter = f"cp{major}{minor}"
    return frozenset([*cpython_tags((major, minor)), *compatible_tags((major, minor), interpreter)])


def judge(manifest: dict[str, Any], spec: dict[str, Any]) -> list[Wheel]:
    """The wheels of a manifest that is this release's and for this host.

    Args:
        manifest: as the store gave it.
        spec: the job's; build_id, distribution, version and inputs are read.

    Raises JobError, refused, before anything is downloaded.
    """
    where = f"builds/{spec['build_id']}/manifest.json"

    def refuse(what: str, mend: str = _REMOVE) -> JobError:
        return JobError(f"the store's manifest {what}", where, mend, refused=True)

    if manifest.get("schema") != SCHEMA:
        raise refuse(
            f"has schema {manifest.get('schema')!r}, and {SCHEMA} is wanted", "converge with one version of the project"
        )
    if manifest.get("build_id") != spec["build_id"]:
        raise refuse(f"is of build {manifest.get('build_id')}, and {spec['build_id']} is wanted")
    if manifest.get("architecture") != platform.machine():
        raise refuse(f"is for {manifest.get('architecture')}, and this host is {platform.machine()}")
    theirs = manifest.get("inputs") or {}
    unlike = sorted(key for key in {*theirs, *spec["inputs"]} if theirs.get(key) != spec["inputs"].get(key))
    if unlike:
        key = unlike[0]
        raise refuse(f"says {key} {theirs.get(key)!r}, and {spec['inputs'].get(key)!r} is wanted")
    wheels = wheels_of(manifest)
    allowed = tags(spec["inputs"]["python"])
    for wheel in wheels:
        try:
            name, version, _, tagged = parse_wheel_filename(wheel.file)
        except InvalidWheelFilename as error:
            raise refuse(f"names a file that is no wheel: {error}") from error
        if (str(name), str(version)) != (wheel.name, wheel.version):
            raise refuse(f"calls {wheel.file} {wheel.name} {wheel.version}")
        if not tagged & allowed:
            raise refuse(
                f"has {wheel.file}, which Python {spec['inputs']['python']} on this {platform.machine()} does not take",
                "build on the operating system that the fleet runs",
            )
    own = [wheel for wheel in wheels if wheel.name == canonicalize_name(spec["distribution"])]
    if [wheel.version.split("+")[0] for wheel in own] != [spec["version"]]:
        raise refuse(f"has no wheel of {spec['distribution']} {spec['version']}")
    return wheels


def check_room(wheels: Iterable[Wheel], folder: Path) -> None:
    """Room for the wheels, with what lies there already taken off; raises JobError, refused."""
    need = sum(wheel.bytes for wheel in wheels if not (folder / wheel.file).is_file())
    place = folder.parent
    found = os.statvfs(place)
    free = found.f_bavail * found.f_frsize
    if free < need:
        raise JobError(
            f"{free // _MIB:,} MiB free, and the build's wheels take {-(-need // _MIB):,}",
            str(place), f"free room or grow the volume: df -h {place}", refused=True,
        )  # fmt: skip


def keep_only(wheels: Iterable[Wheel], folder: Path) -> None:
    """Takes away what an earlier attempt left in the folder and this release does not have."""
    wanted = {wheel.file for wheel in wheels}
    for path in folder.glob("*"):
        if path.name not in wanted and path.name.removesuffix(".part") not in wanted:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
