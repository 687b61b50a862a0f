"""The wheels a host's environment is made of, for its architecture and Python, by hash."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir
from fleet.run_command.bundle import Packed, packed, tarred

REQUIREMENTS = Path(__file__).resolve().with_name("host-requirements.txt")
# The C libraries of the systems in systems.py are all newer than these tags ask for.
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_28", "manylinux_2_34")


def wheels(architecture: str, python: str, requirements: Path = REQUIREMENTS) -> Packed:
    """A tar of wheels for hosts of this architecture (uname's word) and Python version.

    Downloaded once and kept by the digest of what was asked for. Raises FleetError where the package index has none.
    """
    asked = _for(requirements.read_text(), architecture, python)
    name = hashlib.sha256(f"{architecture} {python}\n{asked}".encode()).hexdigest()[:16]
    kept = cache_dir() / "host-wheels" / f"{name}.tar"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        part = kept.with_suffix(".part")
        part.write_bytes(_downloaded(asked, architecture, python))
        part.replace(kept)
    return packed("wheels/{}.tar", kept.read_bytes())


def _for(requirements: str, architecture: str, python: str) -> str:
    """The requirements that hold there; pip would read their markers for the interpreter it runs in itself."""
    surroundings = {
        "implementation_name": "cpython",
        "os_name": "posix",
        "platform_machine": architecture,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    kept = []
    for block in re.split(r"\n(?=[A-Za-z])", requirements.strip()):
        first, _, hashes = block.partition(" \\\n")
        wanted = Requirement(first)
        if wanted.marker is None or wanted.marker.evaluate(surroundings):
            kept.append(f"{wanted.name}{wanted.specifier} \\\n{hashes}")
    return "\n".join(kept) + "\n"


def _downloaded(asked: str, architecture: str, python: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        lock = Path(folder) / "requirements.txt"
        lock.write_text(asked)
        platforms = [word for tag in _PLATFORMS for word in ("--platform", f"{tag}_{architecture}")]
        argv = [
            sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--only-binary", ":all:",
            "--no-deps", "--require-hashes", "--implementation", "cp", "--python-version", python, *platforms,
            "-r", str(lock), "-d", f"{folder}/wheels",
        ]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FleetError(
                f"pip finds no wheels for {architecture} and Python {python}: {done.stderr.strip()[-600:]}",
                where=str(REQUIREMENTS.name),
                mend="set PIP_INDEX_URL to a package index that can be reached, then run again",
                code=ExitCode.UNREACHABLE,
            )
        return tarred((path.name, path.read_bytes()) for path in sorted(Path(folder, "wheels").iterdir()))
