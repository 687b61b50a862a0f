"""What of the project a host needs, as one archive that its content alone decides."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fleet.paths import PROJECT

_FOLDERS = ("group_vars", "playbooks", "plugins", "roles")
_ON_HOST = Path(__file__).resolve().parent / "on_host"
# The job ends a run's processes as the stop playbook does.
_SHARED = PROJECT / "plugins" / "module_utils" / "marked_processes.py"


@dataclass(frozen=True, slots=True)
class Packed:
    """An object to lie in the bucket: its key below the prefix holds its SHA-256."""

    key: str
    sha256: str
    content: bytes


def packed(key: str, content: bytes) -> Packed:
    """The content under a key with `{}` for its digest."""
    digest = hashlib.sha256(content).hexdigest()
    return Packed(key.format(digest), digest, content)


def bundle(project: Path = PROJECT) -> Packed:
    """Playbooks, roles, plugins, their variables and the job's program: a tar.gz, the same for the same files."""
    files = [(Path("ansible.cfg"), project / "ansible.cfg")]
    for folder in _FOLDERS:
        files += [(path.relative_to(project), path) for path in _files(project / folder)]
    files += [(Path("on_host") / path.name, path) for path in (*_ON_HOST.glob("*.py"), _SHARED)]
    return packed("bundles/{}.tar.gz", gzip.compress(_tar(files), 9, mtime=0))


def tarred(files: Iterable[tuple[str, bytes]]) -> bytes:
    """A tar of named contents, with nobody's time and owner in it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return out.getvalue()


def _tar(files: Iterable[tuple[Path, Path]]) -> bytes:
    return tarred((name.as_posix(), path.read_bytes()) for name, path in sorted(files))


def _files(folder: Path) -> list[Path]:
    """Regular files below, through links (playbooks/group_vars is one), without what Python leaves.

    Connections are the controller's: on the host there is one, and it is local.
    """
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            found += _files(path) if path.name not in ("__pycache__", "connection") else []
        elif path.suffix != ".pyc":
            found.append(path)
    return found
