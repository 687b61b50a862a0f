#!/usr/bin/env python3
"""The command of vllm-fleet. Sets itself up with the standard library alone, then hands over to `fleet`."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

PROJECT = Path(__file__).resolve().parent
sys.path.insert(0, str(PROJECT))

from fleet.errors import ExitCode, FleetError  # noqa: E402

# Packages that the sandbox needs, and the command that shows each is there.
SANDBOX_PACKAGES = {
    "podman": "podman",
    "runc": "runc",
    "netavark": "/usr/lib/podman/netavark",
    "aardvark-dns": "/usr/lib/podman/aardvark-dns",
    "mmdebstrap": "mmdebstrap",
    "iptables": "iptables",
    "iproute2": "ip",
    "gcc": "gcc",
    "libc6-dev": "/usr/include/stdio.h",
    "gnupg": "gpg",
    "apt-utils": "apt-ftparchive",
}


def main(argv: list[str]) -> int:
    """Bootstraps where needed and replaces itself with the real command."""
    try:
        if sys.version_info < (3, 11):
            raise FleetError(
                f"Python {sys.version.split()[0]} runs this, and 3.11 or newer is wanted",
                where=sys.executable,
                mend="python3.11 runner.py (or newer)",
            )
        wants_sandbox = _wants_sandbox(argv)
        _become_root(argv) if wants_sandbox else None
        packages = _missing_packages(wants_sandbox)
        python = PROJECT / ".venv" / "bin" / "python"
        stale = not _is_current(python)
        if packages or stale:
            _ask(packages, stale, yes="--yes" in argv or "-y" in argv)
        if packages:
            _install_packages(packages)
        if stale:
            _make_environment(python)
    except FleetError as error:
        print(error, file=sys.stderr)
        return int(error.code)
    os.chdir(PROJECT)
    sys.stdout.flush()
    os.execv(python, [str(python), "-m", "fleet", *argv])
    raise AssertionError("execv returns never")


def _wants_sandbox(argv: list[str]) -> bool:
    words = [word for word in argv if not word.startswith("-")]
    command = words[0] if words else ""
    if "--help" in argv or command not in ("converge", "sandbox", "test"):
        return False
    return command != "converge" or not ({"-i", "--inventory"} & set(argv))


def _become_root(argv: list[str]) -> None:
    """The sandbox mounts and starts containers with systemd: root, or sudo to get there."""
    if os.geteuid() == 0:
        return
    if shutil.which("sudo") is None:
        raise FleetError(
            f"the sandbox needs root, and this is uid {os.geteuid()} without sudo",
            where="this machine",
            mend="run it as root, or give an inventory of your own: ./runner.py converge -i FILE",
            code=ExitCode.REFUSED,
        )
    os.execvp("sudo", ["sudo", sys.executable, str(Path(__file__).resolve()), *argv])


def _missing_packages(wants_sandbox: bool) -> list[str]:
    missing = []
    if importlib.util.find_spec("ensurepip") is None:
        missing.append(f"python{sys.version_info.major}.{sys.version_info.minor}-venv")
    if wants_sandbox:
        missing += [name for name, probe in SANDBOX_PACKAGES.items() if not _there(probe)]
    return missing


def _there(probe: str) -> bool:
    return Path(probe).exists() if probe.startswith("/") else shutil.which(probe) is not None


def _stamp() -> str:
    lock = (PROJECT / "requirements.txt").read_bytes()
    return f"{hashlib.sha256(lock).hexdigest()} {sys.version_info.major}.{sys.version_info.minor}"


def _is_current(python: Path) -> bool:
    stamp = PROJECT / ".venv" / "requirements.stamp"
    return python.exists() and stamp.exists() and stamp.read_text() == _stamp()


def _ask(packages: list[str], environment: bool, *, yes: bool) -> None:
    """Says what will be installed; asks where somebody is there to answer."""
    if packages:
        print(f"setup     Debian packages to install: {' '.join(packages)}")
    if environment:
        print(f"setup     Python packages to install in {PROJECT / '.venv'}, from requirements.txt, by hash")
    if yes or not sys.stdin.isatty():
        return
    if input("setup     Go on? [Y/n] ").strip().lower() not in ("", "y", "yes"):
        raise FleetError(
            "not set up, as you asked", where=str(PROJECT), mend="./runner.py --yes", code=ExitCode.REFUSED
        )


def _install_packages(packages: list[str]) -> None:
    if os.geteuid() != 0:
        raise FleetError(
            f"{' '.join(packages)} must be installed, and this is uid {os.geteuid()}",
            where="this machine",
            mend=f"sudo apt-get install {' '.join(packages)}",
            code=ExitCode.REFUSED,
        )
    if shutil.which("apt-get") is None:
        raise FleetError(
            f"{' '.join(packages)} missing, and there is no apt-get to install them with",
            where="PATH",
            mend="use Debian 12, Debian 13 or Ubuntu 24.04, or install the packages' like by hand",
            code=ExitCode.REFUSED,
        )
    apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    _run([*apt, "update"], "setup: apt-get update", environment)
    _run([*apt, "install", "-y", "--no-install-recommends", *packages], "setup: apt-get install", environment)


def _make_environment(python: Path) -> None:
    home = PROJECT / ".venv"
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)], "setup: virtual environment")
    lock = str(PROJECT / "requirements.txt")
    _run(
        [str(python), "-m", "pip", "install", "-q", "--require-hashes", "-r", lock],
        "setup: Python packages (usually 1 min)",
    )
    (home / "requirements.stamp").write_text(_stamp())


def _run(command: list[str], label: str, environment: dict[str, str] | None = None) -> None:
    """Runs a setup step quietly; its output is shown where it fails."""
    print(f"setup     {label.removeprefix('setup: ')}", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise FleetError(
            f"{label} ended with {done.returncode}:\n{done.stdout.strip()[-1500:]}",
            where=" ".join(command[:4]),
            mend="check that the package index (pip config list) and apt's sources can be reached, then run again",
            code=ExitCode.REFUSED,
        )
    print(f"setup     … done in {time.monotonic() - began:.0f}s", flush=True)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
