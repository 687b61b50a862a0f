"""A host of the Arm kind, emulated: for what depends on the architecture. Nothing of vLLM runs at its speed.

Opt-in (`./runner.py sandbox up --arm64`): its image takes some ten minutes to make on two cores, once.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.paths import state_dir
from fleet.steps import Steps
from sandbox import image
from sandbox.containers import NETWORK, Podman
from sandbox.pip_config import read_pip_config

NAME = "vllm-fleet-arm64"
ADDRESS = "10.213.8.21"
_HANDLER = "qemu-aarch64"
_RULE = Path(f"/usr/lib/binfmt.d/{_HANDLER}.conf")
# The kernel's table of foreign programs.
_TABLE = Path("/proc/sys/fs/binfmt_misc")
# What the roles that are tried here need; systemd does not run under emulation, and none of them asks it.
_PACKAGES = "python3,python3-venv,python3-apt,g++,ca-certificates,gnupg,procps"


def start(podman: Podman, steps: Steps) -> None:
    """Starts the host, its image and the kernel's handler of foreign programs where they are missing."""
    _register()
    base = image.bootstrapped(podman, steps, architecture="arm64", packages=_PACKAGES)
    if podman.succeeds("container", "exists", NAME):
        podman("start", NAME)
        return
    podman(
        "run", "-d", "--name", NAME, "--hostname", NAME, "--network", NETWORK, "--ip", ADDRESS, "--ulimit", "host",
        "--entrypoint", "sleep", base, "infinity",
    )  # fmt: skip
    podman.put(NAME, "/etc/pip.conf", read_pip_config().render().encode())


def stop() -> None:
    """Takes the handler away again, and the table's mount, where `start` put them there."""
    for mark, undo in ((_mark("handler"), _remove), (_mark("mount"), _unmount)):
        if mark.exists():
            undo()
            mark.unlink()


def _register() -> None:
    if not _RULE.is_file():
        raise FleetError(
            f"no emulator of aarch64 is installed: {_RULE} is not there",
            where="this machine",
            mend="apt-get install qemu-user-static",
            code=ExitCode.REFUSED,
            who="sandbox",
        )
    # The kernel forgets the table with its last mount.
    if not (_TABLE / "register").exists():
        subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(_TABLE)], check=True)
        _mark("mount").touch()
    if not (_TABLE / _HANDLER).exists():
        (_TABLE / "register").write_text(_RULE.read_text())
        _mark("handler").touch()


def _remove() -> None:
    if (_TABLE / _HANDLER).exists():
        (_TABLE / _HANDLER).write_text("-1")


def _unmount() -> None:
    if (_TABLE / "register").exists():
        subprocess.run(["umount", str(_TABLE)], check=True)


def _mark(what: str) -> Path:
    return state_dir() / "sandbox" / f"binfmt-{what}"
