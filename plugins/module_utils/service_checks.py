"""What must hold before a service is switched: each check gives a problem or None. Changes nothing."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

# A compile cache on one of these gives "Stale file handle", and two hosts' engines write into each other's.
_NETWORK_FILESYSTEMS = re.compile(r"nfs|cifs|smb|ceph|lustre|gluster|afs|9p|fuse\.")
_WILDCARDS = ("0.0.0.0", "*", "[::]", "::")  # noqa: S104 - what others listen on


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason not to switch."""

    what: str
    where: str
    mend: str


def check_model(model: Path, user: str) -> Problem | None:
    """A local model is whole enough to chat, and the service's user can read it."""
    if not (model / "config.json").is_file():
        return Problem(
            "the model has no config.json", str(model), "copy the whole model there, or set vllm_service_model"
        )
    configured = model / "tokenizer_config.json"
    template = (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file()
    if not template and not (configured.is_file() and "chat_template" in configured.read_text()):
        return Problem(
            "CHAT_TEMPLATE: the model has no chat template, so no chat would be answered",
            str(model),
            "serve the instruction-tuned model",
        )
    found = _as_user(user, "find", "-L", str(model), "-type", "f", "!", "-readable")
    return Problem(f"user {user} cannot read {found}", str(model), f"chmod -R a+rX {model}") if found else None


def check_port(host: str, port: int, unit: str) -> Problem | None:
    """Nobody but the unit's own processes listens on the address.

    Args:
        host: address to listen on.
        port: its port.
        unit: the unit whose processes may hold it.
    """
    # Without ss (iproute2) nothing is known; the server then says "Address already in use" itself.
    try:
        done = subprocess.run(
            ["ss", "-H", "-l", "-t", "-n", "-p", f"sport = :{port}"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    for line in done.stdout.splitlines():
        address = line.split()[3].rpartition(":")[0]
        if address.strip("[]") != host and address not in _WILDCARDS:
            continue
        for name, pid in re.findall(r'"([^"]*)",pid=(\d+)', line):
            if not is_in_unit(int(pid), unit):
                return Problem(
                    f"port {port} is held by process {pid} ({name}), and {unit} wants it",
                    f"{address}:{port}",
                    f"kill {pid}, or set vllm_service_port to another",
                )
    return None


def check_gpu(told: list[str], user: str) -> Problem | None:
    """No process that an earlier service of this user left behind holds the GPU.

    Args:
        told: lines of the start program, `ORPHAN_GPU pid 1 of user vllm holds 13501 MiB: VLLM::EngineCore`.
        user: the service's user, in whose name nothing but the service runs.
    """
    left = [found for line in told if (found := re.match(rf"ORPHAN_GPU pid (\d+) of user {re.escape(user)} ", line))]
    if not left:
        return None
    return Problem(
        "; ".join(found.string for found in left) + ": left behind by an earlier service, and the GPU is wanted free",
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
        f"kill -9 {' '.join(found[1] for found in left)}",
    )


def check_cache(home: Path, user: str) -> Problem | None:
    """The service's folder is on a disk of this host, and its user can write wherever it is already there."""
    place = home
    while not place.exists():
        place = place.parent
    done = subprocess.run(["findmnt", "-no", "FSTYPE", "-T", str(place)], capture_output=True, text=True, check=False)
    kind = done.stdout.strip()
    if _NETWORK_FILESYSTEMS.match(kind):
        return Problem(
            f"the compile caches would lie on {kind}, shared over a network, and a disk of this host is wanted",
            str(home),
            f"umount {home}, or mount a local disk there",
        )
    if place != home:
        return None
    found = _as_user(user, "find", str(home), "-type", "d", "(", "!", "-writable", "-o", "!", "-executable", ")")
    return Problem(f"user {user} cannot write in {found}", str(home), f"chown -R {user}: {home}") if found else None


def is_in_unit(pid: int, unit: str) -> bool:
    """Whether a process belongs to a unit, by its control group."""
    try:
        return unit in re.split(r"[/\n]", Path(f"/proc/{pid}/cgroup").read_text())
    except OSError:
        return False


def _as_user(user: str, *find: str) -> str | None:
    """The first path that a `find` in the user's name prints or fails on; None for none."""
    argv = ["runuser", "-u", user, "--", *find]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd="/")
    told = (done.stdout or (done.stderr if done.returncode else "")).strip().splitlines()
    return told[0] if told else None
