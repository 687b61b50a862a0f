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
from sandbox import room  # noqa: E402
from sandbox.pip_config import read_pip_config  # noqa: E402

_APT = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600"]

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


# What the virtual environment takes (measured: 0.97 to 1.03 GB), with room for pip's own work.
ENVIRONMENT_BYTES = 2 * 1024**3


def main(argv: list[str]) -> int:
    """Bootstraps where needed and replaces itself with the real command."""
    try:
        if sys.version_info < (3, 11):
            raise FleetError(
                f"Python {sys.version.split()[0]} runs this, and 3.11 or newer is wanted",
                where=sys.executable,
                mend="python3.11 runner.py (or newer)",
            )
        if _wants_root(argv):
            _become_root(argv)
        python = PROJECT / ".venv" / "bin" / "python"
        _set_up(python, wants_sandbox=_wants_sandbox(argv), yes="--yes" in argv or "-y" in argv)
    except FleetError as error:
        print(error, file=sys.stderr)
        return int(error.code)
    os.chdir(PROJECT)
    sys.stdout.flush()
    os.execv(python, [str(python), "-m", "fleet", *argv])
    raise AssertionError("execv returns never")


def _set_up(python: Path, *, wants_sandbox: bool, yes: bool) -> None:
    """Installs what is missing. Each part is looked into before it is begun, the Python packages come first."""
    packages = _missing_packages(wants_sandbox)
    stale = not _is_current(python)
    if packages or stale:
        _ask(packages, stale, yes=yes)
        if wants_sandbox:
            room.check()
    if stale:
        _look_at_folder()
    if packages:
        _look_at_packages(packages)
    if stale:
        own = [name for name in packages if name.endswith("-venv")]
        if own:
            _install_packages(own)
        _make_environment(python)
    if packages := _missing_packages(wants_sandbox):
        _install_packages(packages)


def _wants_root(argv: list[str]) -> bool:
    """Whether the command starts or stops containers."""
    return _wants_sandbox(argv) or (_words(argv)[:1] == ["sandbox"] and "--help" not in argv)


def _wants_sandbox(argv: list[str]) -> bool:
    """Whether the command may start a sandbox, and so needs what one is made with."""
    if "--help" in argv:
        return False
    if _words(argv)[:1] == ["converge"]:
        return "local-aws" in argv or not any(word.startswith(("-i", "--inventory")) for word in argv)
    return _words(argv)[:1] == ["test"] or _words(argv)[:2] == ["sandbox", "up"]


def _words(argv: list[str]) -> list[str]:
    return [word for word in argv if not word.startswith("-")]


def _become_root(argv: list[str]) -> None:
    """The sandbox mounts and starts containers with systemd: root, or sudo to get there."""
    if os.geteuid() == 0:
        return
    mend = "run it as root, or give an inventory of your own: ./runner.py converge -i FILE"
    if shutil.which("sudo") is None:
        raise FleetError(
            f"the sandbox needs root, and this is uid {os.geteuid()} without sudo",
            where="this machine",
            mend=mend,
            code=ExitCode.REFUSED,
        )
    asks = subprocess.run(["sudo", "-n", "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if asks.returncode and not sys.stdin.isatty():
        raise FleetError(
            f"the sandbox needs root, and sudo does not give it unasked: {asks.stderr.strip()}",
            where="this machine",
            mend=mend,
            code=ExitCode.REFUSED,
        )
    os.execvp("sudo", ["sudo", sys.executable, str(Path(__file__).resolve()), *argv])


def _missing_packages(wants_sandbox: bool) -> list[str]:
    missing = []
    if not _is_current(PROJECT / ".venv" / "bin" / "python") and importlib.util.find_spec("ensurepip") is None:
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


def _look_at_folder() -> None:
    """The environment's place can be written and holds it."""
    if not os.access(PROJECT, os.W_OK):
        raise FleetError(
            f"uid {os.geteuid()} cannot write here, and the Python packages are installed here",
            where=str(PROJECT),
            mend=f"sudo chown -R {os.geteuid()} {PROJECT}",
            code=ExitCode.REFUSED,
        )
    free = shutil.disk_usage(PROJECT).free
    if free < ENVIRONMENT_BYTES:
        raise FleetError(
            f"{free:,} bytes free for the Python packages, and {ENVIRONMENT_BYTES:,} are wanted",
            where=str(PROJECT),
            mend=f"df -h {PROJECT}; then make room",
            code=ExitCode.REFUSED,
        )


def _look_at_packages(packages: list[str]) -> None:
    """apt says that it can have them all; nothing but its lists is touched."""
    by_hand = f"apt-get update && apt-get install {' '.join(packages)}"
    if os.geteuid() != 0:
        raise FleetError(
            f"{' '.join(packages)} must be installed, and this is uid {os.geteuid()}",
            where="this machine",
            mend=f"sudo sh -c '{by_hand}'",
            code=ExitCode.REFUSED,
        )
    if shutil.which("apt-get") is None:
        raise FleetError(
            f"{' '.join(packages)} missing, and there is no apt-get to install them with",
            where="PATH",
            mend="use Debian 12, Debian 13 or Ubuntu 24.04, or install the packages' like by hand",
            code=ExitCode.REFUSED,
        )
    # One source that is down spoils no other: whether the packages can be had is the question.
    updated = _done([*_APT, "update"], "apt-get update")
    simulated = _done([*_APT, "install", "--simulate", "--no-install-recommends", *packages], "apt-get, asked")
    if simulated.returncode:
        said = [line for line in (updated.stdout + simulated.stdout).splitlines() if line.startswith(("E:", "W:"))]
        raise FleetError(
            f"{' '.join(packages)} cannot be had from apt: {' '.join(said)[-900:]}",
            where="apt's sources",
            mend=by_hand,
            code=ExitCode.REFUSED,
        )


def _install_packages(packages: list[str]) -> None:
    done = _done([*_APT, "install", "-y", "--no-install-recommends", *packages], "apt-get install")
    if done.returncode:
        raise FleetError(
            f"apt-get install ended with {done.returncode}:\n{done.stdout.strip()[-1500:]}",
            where="this machine",
            mend=f"apt-get install {' '.join(packages)}",
            code=ExitCode.REFUSED,
        )


def _make_environment(python: Path) -> None:
    """Makes the environment; where that fails, the earlier one is put back."""
    home, earlier = PROJECT / ".venv", PROJECT / ".venv.earlier"
    if os.path.lexists(home):
        _remove(earlier)
        home.rename(earlier)
    try:
        _fill_environment(python)
        (home / "requirements.stamp").write_text(_stamp())
    except BaseException:
        _remove(home)
        if os.path.lexists(earlier):
            earlier.rename(home)
        raise
    _remove(earlier)


def _remove(path: Path) -> None:
    """A folder, or the link that somebody put in its place."""
    if path.is_symlink():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _fill_environment(python: Path) -> None:
    made = _done([sys.executable, "-m", "venv", str(PROJECT / ".venv")], "virtual environment")
    if made.returncode:
        raise FleetError(
            f"no virtual environment could be made: {made.stdout.strip()[-900:]}",
            where=str(PROJECT / ".venv"),
            mend=f"{sys.executable} -m venv {PROJECT / '.venv'}",
            code=ExitCode.REFUSED,
        )
    lock = str(PROJECT / "requirements.txt")
    install = [str(python), "-m", "pip", "install", "-q", "--require-hashes", "-r", lock]
    done = _done(install, "Python packages (usually 1 min)")
    if done.returncode:
        index = read_pip_config(str(python)).values.get("index-url", ("pip's own default",))[-1]
        raise FleetError(
            f"the Python packages could not be installed from the package index {index}: {done.stdout.strip()[-900:]}",
            where=f"index-url of pip ({index})",
            mend="set PIP_INDEX_URL to a package index that can be reached, then run again",
            code=ExitCode.REFUSED,
        )


def _done(command: list[str], label: str) -> subprocess.CompletedProcess[str]:
    """Runs a setup step quietly; its output is for who shows its failure."""
    print(f"setup     {label}", flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(f"setup     … {'ended' if done.returncode else 'done'} in {time.monotonic() - began:.0f}s", flush=True)
    return done


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
