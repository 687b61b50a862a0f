"""A sandbox host as a container: hosts of the sandbox, and instances that are launched, are started alike."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.paths import state_dir
from sandbox import containers
from sandbox.containers import NETWORK, STAND_INS_ADDRESS, Podman

_PREFIX = "10.213.8."


@dataclass(frozen=True, slots=True)
class Kind:
    """What every host of a sandbox is started from: the image and the mounts they share, as podman takes them."""

    image: str
    mounts: tuple[str, ...]


def start(podman: Podman, kind: Kind, name: str, number: int) -> str:
    """Starts a container, or one that is there; returns its address, which its number decides (1 to 240)."""
    address = f"{_PREFIX}{10 + number}"
    if podman.succeeds("container", "exists", name):
        podman("start", name)
    else:
        swap = state_dir() / "sandbox" / "swap" / name
        swap.mkdir(parents=True, exist_ok=True)
        podman(
            "run", "-d", "--name", name, "--hostname", name, "--network", NETWORK, "--ip", address,
            "--mac-address", f"02:13:08:00:00:{10 + number:02x}", "--systemd", "always",
            "--cap-add", "SYS_ADMIN,NET_ADMIN", "--ulimit", "host", "--shm-size", "2g",
            "--security-opt", f"seccomp={_seccomp()}",
            "-e", f"STAND_INS_ADDRESS={STAND_INS_ADDRESS}",
            *[arg for mount in (*kind.mounts, f"{swap}:/srv/swap") for arg in ("-v", mount)],
            "--entrypoint", "/usr/local/sbin/init", kind.image,
        )  # fmt: skip
    wait_running(podman, name)
    return address


def swap_off(name: str) -> None:
    """Swap is the whole machine's: a host's swapfile is switched off before its container goes."""
    for file in (state_dir() / "sandbox" / "swap" / name).glob("*"):
        subprocess.run(["swapoff", str(file)], capture_output=True, check=False)
        file.unlink(missing_ok=True)


def _seccomp() -> Path:
    """The engine's default filter, with the two calls that a swapfile needs and that no capability opens in it."""
    profile = json.loads(Path("/usr/share/containers/seccomp.json").read_text())
    wanted = ["swapon", "swapoff"]
    for rule in profile["syscalls"]:
        rule["names"] = [name for name in rule["names"] if name not in wanted]
    profile["syscalls"].append({"names": wanted, "action": "SCMP_ACT_ALLOW"})
    path = state_dir() / "sandbox" / "seccomp.json"
    path.write_text(json.dumps(profile))
    return path


def wait_running(podman: Podman, name: str) -> None:
    """Returns when systemd is up in the container; raises FleetError where it is not within half a minute."""
    for _ in range(60):
        with contextlib.suppress(FleetError):
            if podman("exec", name, "systemctl", "is-system-running", check=False) in ("running", "degraded"):
                return
        time.sleep(0.5)
    raise FleetError(
        "systemd did not come up within 30 s",
        where=name,
        mend=f"{containers.podman_path()} logs {name}",
        code=ExitCode.HOST_FAILED,
        who="sandbox",
    )
