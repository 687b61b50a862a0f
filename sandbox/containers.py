"""Podman on this machine: one wrapper command, prepared only as far as the machine needs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir, state_dir

NETWORK = "vllm-fleet"
SUBNET = "10.213.8.0/24"
STAND_INS_ADDRESS = "10.213.8.2"
_RUN = Path("/run/vllm-fleet-sandbox")


def podman_path() -> Path:
    """The wrapper that every caller uses (ours, Ansible's connection, testinfra)."""
    return state_dir() / "sandbox" / "bin" / "podman"


class Podman:
    """Runs podman through the wrapper; storage of its own, so that nobody else's containers are touched."""

    def __call__(self, *args: str, check: bool = True, stdin: bytes | None = None, timeout_s: float = 1800) -> str:
        """Runs `podman ARGS`, returns standard output stripped; a failure is a FleetError with its stderr."""
        done = subprocess.run(
            [str(podman_path()), *args], input=stdin, capture_output=True, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise FleetError(
                f"podman {args[0]} ended with {done.returncode}: {done.stderr.decode().strip()[-600:]}",
                where=f"podman {' '.join(args[:6])}",
                mend="./runner.py sandbox down && ./runner.py sandbox up",
                code=ExitCode.HOST_FAILED,
                who="sandbox",
            )
        return done.stdout.decode().strip()

    def succeeds(self, *args: str) -> bool:
        """Whether `podman ARGS` exits 0."""
        done = subprocess.run([str(podman_path()), *args], capture_output=True, timeout=120, check=False)
        return done.returncode == 0

    def shell(self, container: str, script: str, *, timeout_s: float = 1800) -> str:
        """Runs a shell script in a container, its text on standard input."""
        return self("exec", "-i", container, "sh", "-eu", stdin=script.encode(), timeout_s=timeout_s)

    def put(self, container: str, path: str, content: bytes, mode: str = "0644") -> None:
        """Writes one small file into a container."""
        folder = str(Path(path).parent)
        script = 'mkdir -p "$1" && cat >"$2" && chmod "$3" "$2"'
        self("exec", "-i", container, "sh", "-euc", script, "sh", folder, path, mode, stdin=content)


def prepare() -> Podman:
    """Writes the wrapper and, where the machine mixes cgroup versions, a mount namespace with cgroup v2."""
    if os.geteuid() != 0:
        raise FleetError(
            f"the sandbox starts systemd containers and needs root, and this is uid {os.geteuid()}",
            where="this machine",
            mend="sudo ./runner.py sandbox up",
            code=ExitCode.REFUSED,
            who="sandbox",
        )
    engine = shutil.which("podman", path="/usr/bin:/usr/local/bin:/bin")
    if engine is None:
        raise FleetError(
            "podman is not installed and the sandbox hosts are podman containers",
            where="PATH",
            mend="apt-get install podman",
            code=ExitCode.REFUSED,
            who="sandbox",
        )
    enter = ""
    runtime = ""
    if _mixed_cgroups():
        _make_namespace()
        enter = f'nsenter --mount={_RUN / "mnt"} --wdns="$PWD" '
        runtime = '[engine]\nruntime = "runc"\n'
    home = state_dir() / "sandbox"
    conf = home / "containers.conf"
    storage = home / "storage.conf"
    wrapper = podman_path()
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    conf.write_text(
        f'[containers]\npids_limit = 0\ndefault_ulimits = []\n[network]\nnetwork_backend = "netavark"\n{runtime}'
    )
    storage.write_text(
        f'[storage]\ndriver = "overlay"\nrunroot = "{_RUN}/containers"\ngraphroot = "{cache_dir()}/containers"\n'
    )
    wrapper.write_text(
        f"#!/bin/sh\nexport CONTAINERS_CONF='{conf}' CONTAINERS_STORAGE_CONF='{storage}'\nexec {enter}{engine} \"$@\"\n"
    )
    wrapper.chmod(0o755)
    return Podman()


def release() -> None:
    """Takes the private mount namespace away again."""
    if _is_mount(_RUN / "mnt"):
        _run(["umount", str(_RUN / "mnt")])
    if _is_mount(_RUN):
        _run(["umount", "-R", str(_RUN)])
    shutil.rmtree(_RUN, ignore_errors=True)


def _mixed_cgroups() -> bool:
    return not Path("/sys/fs/cgroup/cgroup.controllers").exists()


def _make_namespace() -> None:
    handle = _RUN / "mnt"
    if _is_mount(handle):
        return
    _RUN.mkdir(mode=0o700, exist_ok=True)
    if not _is_mount(_RUN):
        _run(["mount", "--bind", str(_RUN), str(_RUN)])
        # A mount namespace cannot be pinned on a shared mount.
        _run(["mount", "--make-private", str(_RUN)])
    handle.touch()
    _run(["unshare", f"--mount={handle}", "--propagation", "private", "true"])
    script = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup"
    _run(["nsenter", f"--mount={handle}", "sh", "-euc", script])


def _is_mount(path: Path) -> bool:
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == str(path) for line in mounts)


def _run(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FleetError(
            f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()}",
            where="this machine",
            mend="run as root where mounts are allowed (a virtual machine, not an unprivileged container)",
            code=ExitCode.REFUSED,
            who="sandbox",
        )
