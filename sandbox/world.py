"""The sandbox: a local AWS and other stand-ins in one network, and hosts that the roles converge for real."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT, cache_dir, state_dir
from fleet.steps import Steps
from sandbox import containers, emulated, image, machines, room, trained_model
from sandbox.containers import NETWORK, STAND_INS_ADDRESS, SUBNET, Podman
from sandbox.host_variables import record_path
from sandbox.machines import Kind
from sandbox.pip_config import read_pip_config
from sandbox.standins import gpu, nvidia_repository, rust_distribution

_FILES_URL = f"http://{STAND_INS_ADDRESS}:8080"
_AWS_URL = f"http://{STAND_INS_ADDRESS}:5000"
_PAUSE = "vllm-fleet-standins"
# The sandbox's processes: the word of the record of each, and the module that it runs.
_STAND_INS = ("standins", "sandbox.standins.server")
_LAUNCHED = ("launched", "sandbox.launched")
_ADDRESS_KEPT = ("POSTROUTING", "-s", SUBNET, "-d", "169.254.169.254/32", "-j", "ACCEPT")


@dataclass(frozen=True, slots=True)
class Host:
    """One sandbox host: container name and address on the sandbox's network."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class World:
    """What is up, as kept in the state directory for the inventory.

    The last two came later: a sandbox that an earlier version of the project started can still be taken down.
    """

    podman: str
    hosts: tuple[Host, ...]
    aws_url: str
    files_url: str
    cuda_key_fingerprint: str
    rust: dict[str, str] | None
    ip_forward_before: str
    base_image: str | None = None
    emulated: tuple[str, ...] = ()


def read() -> World | None:
    """The recorded world, or None where none is up."""
    try:
        data = json.loads(record_path().read_text())
    except FileNotFoundError:
        return None
    data["hosts"] = tuple(Host(**host) for host in data["hosts"])
    data["emulated"] = tuple(data.get("emulated", ()))
    return World(**data)


def up(steps: Steps, *, hosts: int = 1, base_image: str | None = None, arm64: bool = False) -> World:
    """Starts what is not running yet and returns the world; what is up stays untouched.

    Args:
        hosts: how many hosts that roles converge; those that are up stay.
        base_image: what to start them from instead of a bootstrapped image; a world that is up keeps its own.
        arm64: whether there is an emulated Arm host beside them.
    """
    before = read()
    if before is None:
        room.check()
    base_image = base_image or (before.base_image if before else None)
    hosts = max(hosts, len(before.hosts) if before else 0)
    podman = containers.prepare()
    _home()
    host_image = image.build_image(podman, read_pip_config(), steps, base_image)
    files = cache_dir() / "files"
    files.mkdir(exist_ok=True)
    with steps.step("stand-in: GPU (T4G)"):
        card = gpu.build(cache_dir() / "gpu")
    with steps.step("stand-in: NVIDIA repository with the real nvcc"):
        system = image.system_of(podman, host_image)
        repository = nvidia_repository.build(files, cache_dir(), _FILES_URL, system)
    with steps.step("stand-in: Rust distribution"):
        rust = rust_distribution.build(files, _FILES_URL)
    if rust is None:
        steps.note("no Rust toolchain at hand to stand in: the role asks the public server")
    with steps.step("model: a tiny Gemma 4, trained"):
        models = trained_model.ensure(podman, host_image)
    forward = before.ip_forward_before if before else _ip_forward().read_text().strip()
    if not podman.succeeds("network", "exists", NETWORK):
        podman("network", "create", NETWORK, "--subnet", SUBNET)
    _start_stand_ins(podman, host_image.name, files)
    _keep_addresses()
    kind = _kind(host_image, card, models)
    started = tuple(_start_host(podman, kind, number) for number in range(1, hosts + 1))
    if arm64:
        with steps.step("stand-in: NVIDIA repository for Arm servers"):
            nvidia_repository.build(files, cache_dir(), _FILES_URL, system, "aarch64")
        emulated.start(podman, steps)
    world = World(
        podman=str(containers.podman_path()),
        hosts=started,
        base_image=base_image,
        emulated=(emulated.NAME,) if arm64 else before.emulated if before else (),
        aws_url=_AWS_URL,
        files_url=_FILES_URL,
        cuda_key_fingerprint=repository.key_fingerprint,
        rust=None if rust is None else asdict(rust),
        ip_forward_before=forward,
    )
    _join_local_aws(world)
    _start_launched(kind)
    part = record_path().with_suffix(".part")
    part.write_text(json.dumps(asdict(world), indent=1))
    part.replace(record_path())
    return world


def refuse_one_that_is_up(who: str) -> None:
    """For whoever wants bare hosts. Raises FleetError, refused, where a sandbox is up."""
    if read() is not None:
        raise FleetError(
            "a sandbox is up, and bare hosts are wanted", where="this machine", mend="./runner.py sandbox down",
            code=ExitCode.REFUSED, who=who,
        )  # fmt: skip


def down(steps: Steps) -> None:
    """Stops everything and puts the machine back: swap, containers, network, forwarding, mounts."""
    world = read()
    if containers.podman_path().exists():
        podman = containers.prepare()
        _stop(_LAUNCHED)
        for name in podman("ps", "-a", "--format", "{{.Names}}", "--filter", "name=^vllm-fleet-").split():
            machines.swap_off(name)
            podman("rm", "-f", "-t", "5", name)
            steps.note(f"removed {name}")
        emulated.stop()
        _stop(_STAND_INS)
        if podman.succeeds("network", "exists", NETWORK):
            podman("network", "rm", "-f", NETWORK)
        _clear_netavark()
        _iptables("nat", "-D", *_ADDRESS_KEPT)
        containers.release()
    if world is not None:
        _ip_forward().write_text(world.ip_forward_before)
        record_path().unlink()


def _kind(host_image: image.HostImage, card: dict[str, Path], models: Path) -> Kind:
    library = f"/usr/lib/{os.uname().machine}-linux-gnu/libcuda.so.1"
    mounts = (
        *host_image.mounts,
        f"{models}:/srv/models:ro",
        f"{card[gpu.LIBRARY]}:{library}:ro",
        f"{card[gpu.TOOL]}:/usr/bin/nvidia-smi:ro",
    )
    return Kind(host_image.name, mounts)


def _start_host(podman: Podman, kind: Kind, number: int) -> Host:
    name = f"vllm-fleet-host{number}"
    return Host(name, machines.start(podman, kind, name, number))


def _join_local_aws(world: World) -> None:
    """Makes each host an instance of the local AWS, with the fleet's tags; those that are stay."""
    for host in world.hosts:
        tags = {"vllm-fleet": "sandbox", "vllm-fleet-role": "vllm", "Name": host.name}
        wanted = {"podman": world.podman, "name": host.name, "address": host.address, "tags": tags}
        url = f"{world.aws_url}/stand-in/machines"
        try:
            httpx.post(url, json=wanted, trust_env=False).raise_for_status()
        except httpx.HTTPError as error:
            raise FleetError(
                f"the sandbox's local AWS, an earlier version's or in trouble, takes no machine: {error}",
                where=url, mend="./runner.py sandbox down; then up again", code=ExitCode.REFUSED, who="sandbox",
            ) from error  # fmt: skip


def _start_stand_ins(podman: Podman, image_name: str, files: Path) -> None:
    """Starts the stand-ins' server in the network namespace of a container that does nothing else."""
    if _pid(_STAND_INS) is not None and podman.succeeds("container", "exists", _PAUSE):
        return
    _stop(_LAUNCHED)
    _stop(_STAND_INS)
    podman("rm", "-f", "--ignore", "-t", "1", _PAUSE)
    podman(
        "run", "-d", "--name", _PAUSE, "--network", NETWORK, "--ip", STAND_INS_ADDRESS, "--ulimit", "host",
        "--cap-add", "NET_ADMIN", "--entrypoint", "sleep", image_name, "infinity",
    )  # fmt: skip
    podman("exec", _PAUSE, "ip", "address", "add", "169.254.169.254/32", "dev", "lo")
    container_pid = podman("inspect", "--format", "{{.State.Pid}}", _PAUSE)
    ready = _home() / "standins.ready"
    ready.unlink(missing_ok=True)
    with (_home() / "standins.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "nsenter", "-t", container_pid, "-n", sys.executable, "-m", "sandbox.standins.server",
                "--bind", STAND_INS_ADDRESS, "--aws-port", "5000", "--files-port", "8080",
                "--files-root", str(files), "--metadata-address", "169.254.169.254", "--metadata-port", "80",
                "--ready-file", str(ready),
            ],
            cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    (_home() / "standins.pid").write_text(str(process.pid))
    for _ in range(120):
        if ready.exists():
            return
        if process.poll() is not None:
            break
        time.sleep(0.25)
    raise FleetError(
        "the stand-ins' server did not become ready",
        where=str(_home() / "standins.log"),
        mend="./runner.py sandbox down && ./runner.py sandbox up",
        code=ExitCode.HOST_FAILED,
        who="sandbox",
    )


def _start_launched(kind: Kind) -> None:
    """Starts what makes containers of instances launched in the local AWS."""
    if _pid(_LAUNCHED) is not None:
        return
    with (_home() / "launched.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sandbox.launched", _AWS_URL, json.dumps(asdict(kind))],
            cwd=PROJECT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    (_home() / "launched.pid").write_text(str(process.pid))


def _pid(which: tuple[str, str]) -> int | None:
    """The recorded process, if it still is what it was."""
    word, module = which
    try:
        pid = int((_home() / f"{word}.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if module.encode() in command else None


def _stop(which: tuple[str, str]) -> None:
    pid = _pid(which)
    if pid is None:
        return
    os.kill(pid, signal.SIGTERM)
    for _ in range(40):
        if _pid(which) is None:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)


def _clear_netavark() -> None:
    """Removes the chains that netavark leaves behind, unless another podman network still uses them."""
    if any(Path("/sys/class/net").glob("podman*")) or shutil.which("iptables") is None:
        return
    for table in ("filter", "nat"):
        save = ["iptables-save", "-t", table]
        rules = subprocess.run(save, capture_output=True, text=True, check=False).stdout.splitlines()
        for rule in (r for r in rules if "NETAVARK" in r and r.startswith("-A ") and not r.startswith("-A NETAVARK")):
            _iptables(table, "-D", *shlex.split(rule)[1:])
        chains = [rule.split()[0][1:] for rule in rules if rule.startswith(":NETAVARK")]
        for verb in ("-F", "-X"):
            for chain in chains:
                _iptables(table, verb, chain)


def _keep_addresses() -> None:
    """The metadata service tells hosts apart by their address, which the engine's masquerading would hide from it."""
    if not _iptables("nat", "-C", *_ADDRESS_KEPT):
        _iptables("nat", "-I", *_ADDRESS_KEPT)


def _iptables(table: str, *words: str) -> bool:
    """Whether `iptables WORDS` on this table was done."""
    done = subprocess.run(["iptables", "-t", table, *words], capture_output=True, check=False)
    return done.returncode == 0


def _ip_forward() -> Path:
    return Path("/proc/sys/net/ipv4/ip_forward")


def _home() -> Path:
    path = state_dir() / "sandbox"
    path.mkdir(parents=True, exist_ok=True)
    return path
