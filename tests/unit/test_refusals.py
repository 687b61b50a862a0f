"""`runner.py` itself, on a machine that cannot do what is asked: refused in the house form, nothing touched.

Run from a copy without an environment, so that the bootstrap has its work before it. Needs root, as the sandbox does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from fleet.paths import PROJECT

NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
# Where this suite's environment could be made, another can; nobody may run the system's own.
PYTHON = str(Path(sys.executable).resolve())
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture
def project() -> Iterator[Path]:
    """A copy that everybody can read, without an environment."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        for name in ("fleet", "sandbox"):
            shutil.copytree(PROJECT / name, home / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("runner.py", "requirements.txt"):
            shutil.copy(PROJECT / name, home / name)
        home.chmod(0o755)
        yield home


def run(
    project: Path, *words: str, before: Sequence[str] = (), environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the copy with nobody there to answer; `before` are words in front of the command."""
    python = SYSTEM_PYTHON if before is NOBODY else PYTHON
    base = {"PATH": os.environ["PATH"], "HOME": str(project), "LANG": "C.UTF-8"}
    return subprocess.run(
        [*before, python, "-B", "runner.py", *words], cwd=project, env={**base, **(environment or {})},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def refused(done: subprocess.CompletedProcess[str], what: str, where: str, mend: str) -> None:
    """Exit code 6, and the three lines say this."""
    assert done.returncode == 6, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    head, _, tail = done.stderr.partition("\n  where: ")
    assert what in head
    assert where in tail.partition("\n  mend:  ")[0]
    assert mend in tail.partition("\n  mend:  ")[2]


def programs(folder: Path, *without: str) -> str:
    """A PATH with all of this machine's programs but some."""
    folder.mkdir()
    for place in ("/usr/sbin", "/usr/bin"):
        for program in Path(place).iterdir():
            link = folder / program.name
            if program.name not in without and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def packages() -> str:
    """Every Debian package and its state."""
    return subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${Status}\n"], capture_output=True, text=True, check=True
    ).stdout


def test_no_root_and_no_sudo(project: Path, tmp_path: Path) -> None:
    path = programs(tmp_path / "bin", "sudo")
    shutil.copytree(path, project / "bin", symlinks=True)
    done = run(project, "converge", "--yes", before=NOBODY, environment={"PATH": str(project / "bin")})
    refused(done, "this is uid 65534 without sudo", "this machine", "./runner.py converge -i FILE")
    assert not (project / ".venv").exists()


def test_a_sudo_that_wants_a_password_with_nobody_there(project: Path) -> None:
    path = programs(project / "bin", "sudo")
    sudo = project / "bin" / "sudo"
    sudo.write_text("#!/bin/sh\necho 'sudo: a password is required' >&2\nexit 1\n")
    sudo.chmod(0o755)
    done = run(project, "sandbox", "up", "--yes", before=NOBODY, environment={"PATH": path})
    refused(done, "sudo does not give it unasked: sudo: a password is required", "this machine", "as root")


def test_no_podman_to_be_had(project: Path, tmp_path: Path) -> None:
    before = packages()
    # No source, and nothing known as installed: as on a machine whose archive has no such package.
    (tmp_path / "status").touch()
    (tmp_path / "apt.conf").write_text(
        'Dir::Etc::sourcelist "/dev/null";\nDir::Etc::sourceparts "/dev/null";\n'
        f'Dir::State::lists "{tmp_path}/lists";\nDir::State::status "{tmp_path}/status";\n'
        f'Dir::Cache "{tmp_path}/cache";\n'
    )
    path = programs(tmp_path / "bin", "podman")
    done = run(project, "converge", "--yes", environment={"PATH": path, "APT_CONFIG": str(tmp_path / "apt.conf")})
    refused(done, "podman cannot be had from apt: E: ", "apt's sources", "apt-get update && apt-get install podman")
    assert packages() == before
    assert not (project / ".venv").exists()


def test_a_package_index_that_cannot_be_reached(project: Path) -> None:
    # An environment that was there, for another lock, is there again afterwards.
    (project / ".venv").mkdir()
    (project / ".venv" / "requirements.stamp").write_text("earlier")
    closed = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull, "PIP_RETRIES": "0"}
    done = run(project, "status", "-i", "hosts.yml", "--yes", environment=closed)
    refused(done, "from the package index http://127.0.0.1:9/simple: ", "http://127.0.0.1:9/simple", "PIP_INDEX_URL")
    assert [p.name for p in project.glob(".venv*")] == [".venv"]
    assert [p.name for p in (project / ".venv").iterdir()] == ["requirements.stamp"]


def small_disk(folder: Path, options: str) -> list[str]:
    """Words in front of a command that see a small disk there, which ends with the command."""
    script = f'mount -t tmpfs -o {options} none "$0" && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, str(folder)]


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "XDG_STATE_HOME"])
def test_a_full_disk_under_the_cache_or_the_state(project: Path, tmp_path: Path, variable: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = run(project, "sandbox", "up", "--yes", before=small_disk(disk, "size=1m"), environment={variable: str(disk)})
    refused(done, "1,048,576 bytes free for the sandbox, and ", str(disk), variable)
    assert not (project / ".venv").exists()


def test_a_full_disk_under_the_project(project: Path) -> None:
    small = project / "small"
    small.mkdir()
    script = 'cp -r runner.py requirements.txt fleet sandbox "$0" && cd "$0" && exec "$@"'
    before = [*small_disk(small, "size=8m"), "sh", "-c", script, str(small)]
    done = run(project, "status", "--yes", before=before)
    refused(done, "bytes free for the Python packages, and 2,147,483,648 are wanted", str(small), "df -h")


def test_a_project_of_somebody_else(project: Path) -> None:
    done = run(project, "status", "--yes", before=NOBODY)
    refused(done, "uid 65534 cannot write here", str(project), "sudo chown")


def test_a_disk_that_fills_up_while_it_runs(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(
        [*small_disk(disk, "size=1m,nr_inodes=2"), sys.executable, "-m", "fleet", "status", "-i", "/dev/null"],
        cwd=PROJECT, env={**os.environ, "XDG_STATE_HOME": str(disk)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    refused(done, "this machine says: No space left on device", str(disk), "df -h")
