#!/usr/bin/python
"""Ansible module: NVIDIA's toolkit from its own archive, the driver untouched, nvcc proven by a cubin for the GPU."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ansible.module_utils import apt_locks, signed_index
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.cubin import capability_of

DOCUMENTATION = r"""
module: cuda_toolkit
short_description: Install CUDA's toolkit from NVIDIA's apt archive
description:
  - One source entry is owned, by the keyring package whose key is checked; others for the same archive are cleared.
    The transaction is simulated first and refused where it would touch a driver. nvcc is proven by compiling a kernel.
options:
  repository_url: {type: str, required: true, description: Base address of the archive.}
  key_fingerprint: {type: str, required: true, description: Fingerprint of the archive's key.}
  keyring_package: {type: str, required: true, description: File name of the keyring package.}
  toolkit: {type: str, required: true, description: "Package of the toolkit, cuda-toolkit-X-Y."}
  capability: {type: str, required: true, description: Capability to prove nvcc for.}
  lock_timeout_seconds: {type: int, default: 600, description: Longest wait for apt's lock and for cloud-init.}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- cuda_toolkit: {toolkit: cuda-toolkit-13-2, capability: '7.5'}
"""
RETURN = "nvcc: {type: str, returned: success, description: Version that nvcc says.}"
_KEYRING = Path("/usr/share/keyrings/cuda-archive-keyring.gpg")
_DRIVER = re.compile(r"^(nvidia-driver|nvidia-kernel|nvidia-dkms|nvidia-open|libnvidia-|cuda-drivers|linux-)")
_APT = Path("/etc/apt")
_NVCC = Path("/usr/local/cuda/bin/nvcc")


class Toolkit:
    """The toolkit of one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.environment = {
            **os.environ,
            "DEBIAN_FRONTEND": "noninteractive",
            "LC_ALL": "C",
            "NEEDRESTART_MODE": "l",
        }
        self.url = f"{self.p['repository_url']}/{_distribution()}/{self.architecture()}"
        self.record = Path(self.p["state"]) / "cuda.json"

    def run(self) -> None:
        """Probe, decide, act, verify."""
        strangers = self.other_entries()
        if self.is_installed() and self.is_proven() and not strangers:
            self.module.exit_json(changed=False, nvcc=self.version(), cleared=[])
        if self.module.check_mode:
            self.module.exit_json(changed=True, nvcc="", cleared=[str(path) for path in strangers])
        self.wait_for_first_boot()
        self.apt("dpkg", "--configure", "-a")
        self.clear(strangers)
        if not self.owns_entry():
            self.install_keyring()
        if not self.is_installed():
            self.apt(*self.get("update"))
            # A package that an interrupted run left without what it depends on stops apt before anything else.
            if subprocess.run(self.get("check"), env=self.environment, capture_output=True, check=False).returncode:
                self.install("-f", "install")
            self.install("install", "--no-install-recommends", self.p["toolkit"], "g++")
            if not _NVCC.exists():
                self.install("install", "--reinstall", *self.damaged())
        self.prove()
        self.module.exit_json(changed=True, nvcc=self.version(), cleared=[str(path) for path in strangers])

    def architecture(self) -> str:
        """The archive's word for this machine: an Arm server is sbsa, never arm64."""
        found = {"x86_64": "x86_64", "aarch64": "sbsa"}.get(platform.machine())
        if found is None:
            self.fail(
                f"NVIDIA has no toolkit for {platform.machine()}",
                platform.machine(),
                "use an x86_64 or aarch64 instance",
            )
        return str(found)

    def other_entries(self) -> list[Path]:
        """Source files that name the archive and are not the keyring package's own (they conflict over Signed-By)."""
        owned = set(self.owned_entries())
        found = []
        for path in [*sorted(_APT.glob("sources.list.d/*")), _APT / "sources.list"]:
            if path.suffix in (".list", ".sources") and path not in owned and path.is_file():
                active = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
                if any("/compute/cuda/repos/" in line for line in active):
                    found.append(path)
        return found

    def clear(self, entries: list[Path]) -> None:
        """Sets source files aside under a name that apt does not read."""
        for path in entries:
            path.rename(path.with_name(f"{path.name}.disabled-by-vllm-fleet"))

    def owned_entries(self) -> list[Path]:
        """Source files of the keyring package."""
        listing = subprocess.run(
            ["dpkg-query", "-L", "cuda-keyring"], capture_output=True, text=True, check=False
        ).stdout
        return [Path(line) for line in listing.split() if line.startswith("/etc/apt/sources.list.d/")]

    def owns_entry(self) -> bool:
        """Whether the keyring package's entry is whole and names the archive asked for."""
        entries = self.owned_entries()
        return bool(entries) and _KEYRING.is_file() and all(e.is_file() and self.url in e.read_text() for e in entries)

    def is_installed(self) -> bool:
        """Whether dpkg has the toolkit whole, and its entry."""
        query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}", self.p["toolkit"]]
        done = subprocess.run(query, capture_output=True, text=True, check=False)
        return done.stdout.startswith("ii") and self.owns_entry() and _NVCC.exists()

    def damaged(self) -> list[str]:
        """Packages of the toolkit's folder that dpkg takes for installed though files of theirs are gone or altered."""
        folder = "/usr/local/" + self.p["toolkit"].replace("-toolkit-", "-").replace("-", ".").replace(".", "-", 1)
        listing = subprocess.run(["dpkg-query", "-S", folder], capture_output=True, text=True, check=False).stdout
        owners = [name.split(":")[0] for line in listing.splitlines() for name in line.rpartition(": ")[0].split(", ")]
        verified = {
            name: subprocess.run(["dpkg", "-V", name], capture_output=True, text=True, check=False).stdout
            for name in owners
        }
        return [name for name, complaints in verified.items() if complaints] or [self.p["toolkit"]]

    def is_proven(self) -> bool:
        """Whether this very nvcc was proven for the capability."""
        try:
            return bool(json.loads(self.record.read_text()) == self.proof())
        except (OSError, ValueError):
            return False

    def proof(self) -> dict[str, Any]:
        """What a proof is good for."""
        found = _NVCC.resolve().stat()
        return {
            "nvcc": str(_NVCC.resolve()),
            "size": found.st_size,
            "mtime": int(found.st_mtime),
            "capability": self.p["capability"],
        }

    def wait_for_first_boot(self) -> None:
        """cloud-init installs packages of its own at first boot."""
        program = shutil.which("cloud-init")
        if program is None:
            return
        limit = self.p["lock_timeout_seconds"]
        try:
            # Its own failure is no reason to stop: only that it is over counts.
            subprocess.run([program, "status", "--wait"], capture_output=True, check=False, timeout=limit)
        except subprocess.TimeoutExpired:
            self.fail(
                f"cloud-init still runs after {limit} s, and first boot has to be over",
                program,
                "run cloud-init status --long on the host, or set cuda_toolkit_sbsa_lock_timeout_seconds higher",
            )

    def wait_for_locks(self) -> None:
        """Unattended upgrades and whoever else installs packages are waited for, never ended."""
        limit = self.p["lock_timeout_seconds"]
        holder = apt_locks.wait(apt_locks.LOCKS, limit)
        if holder:
            self.fail(
                f"{holder} still after {limit} s, and apt needs it",
                holder.lock,
                f"wait until process {holder.pid} ends, or set cuda_toolkit_sbsa_lock_timeout_seconds higher",
            )

    def install_keyring(self) -> None:
        """The keyring package, once its key is seen to be the archive's and its bytes those that the archive signs."""
        name = self.p["keyring_package"]
        address = f"{self.url}/{name}"
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "keyring.deb"
            package.write_bytes(self.read(name))
            self.apt("dpkg-deb", "-x", str(package), f"{folder}/tree")
            ring = Path(folder) / "tree" / _KEYRING.relative_to("/")
            found = signed_index.fingerprints(ring, Path(folder))
            wanted = self.p["key_fingerprint"]
            if wanted not in found:
                self.fail(
                    f"the archive's key is {' '.join(found) or 'not there'}, and {wanted} is wanted",
                    address,
                    "compare with NVIDIA's published key, then set cuda_toolkit_sbsa_key_fingerprint",
                )
            mend = f"compare {self.url} with what another network sees of it, then converge again"
            try:
                listed = signed_index.sha256_of(name, self.read, ring, wanted, Path(folder))
            except signed_index.Unsigned as error:
                self.fail(f"the archive's index is not the one that its key signs: {error}", self.url, mend)
            digest = hashlib.sha256(package.read_bytes()).hexdigest()
            if digest != listed:
                signed = f"{listed} is signed" if listed else "the archive's signed index has no such file"
                self.fail(f"{name} has sha256 {digest}, and {signed}", address, mend)
            self.apt("dpkg", "--force-confnew", "--force-confmiss", "-i", str(package))

    def read(self, name: str) -> bytes:
        """A file of the archive, unverified."""
        try:
            with urllib.request.urlopen(f"{self.url}/{name}", timeout=60) as reply:
                return bytes(reply.read())
        except (OSError, urllib.error.URLError) as error:
            self.fail(
                f"the archive cannot be read: {error}",
                f"{self.url}/{name}",
                "check the network and cuda_toolkit_sbsa_repository_url",
            )
            raise

    def install(self, *words: str) -> None:
        """Simulates the transaction first; a driver package in it is a reason to stop with nothing done."""
        done = subprocess.run(self.get("-s", *words), env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            self.fail(
                f"apt cannot install it: {_said(done.stderr)}",
                self.p["toolkit"],
                f"apt-cache policy {self.p['toolkit']}",
            )
        touched = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("Inst ", "Remv "))]
        drivers = [name for name in touched if _DRIVER.match(name)]
        if drivers:
            self.fail(
                f"the transaction would touch the driver: {' '.join(drivers)}; nothing was installed",
                self.p["toolkit"],
                "set cuda_toolkit_sbsa_toolkit to cuda-toolkit-X-Y, which has no driver",
            )
        self.apt(*self.get("-y", *words))

    def prove(self) -> None:
        """Compiles a kernel for the capability and reads the architecture from the cubin."""
        wanted = self.p["capability"].replace(".", "")
        with tempfile.TemporaryDirectory() as folder:
            source, cubin = Path(folder) / "probe.cu", Path(folder) / "probe.cubin"
            source.write_text("__global__ void probe(float *x) { x[threadIdx.x] *= 2.0f; }\n")
            argv = [str(_NVCC), f"-arch=sm_{wanted}", "-cubin", "-o", str(cubin), str(source)]
            done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False)
            if done.returncode:
                self.fail(
                    f"nvcc does not compile for {self.p['capability']}: {done.stderr.strip()[-300:]}",
                    str(_NVCC),
                    " ".join(argv),
                )
            found = capability_of(cubin.read_bytes())
        if found != self.p["capability"]:
            self.fail(
                f"nvcc made code for {found}, and {self.p['capability']} is wanted",
                str(_NVCC),
                "apt-get install --reinstall cuda-nvcc-13-2",
            )
        self.record.parent.mkdir(parents=True, exist_ok=True)
        self.record.write_text(json.dumps(self.proof()))

    def version(self) -> str:
        """nvcc's own version."""
        done = subprocess.run([str(_NVCC), "--version"], capture_output=True, text=True, check=False)
        return str((re.findall(r"V([\d.]+)", done.stdout) or [""])[0])

    def get(self, *words: str) -> list[str]:
        """An apt-get command that waits for the lock by itself as well: another may come between."""
        return ["apt-get", "-q", "-o", f"DPkg::Lock::Timeout={self.p['lock_timeout_seconds']}", *words]

    def apt(self, *argv: str) -> None:
        """Runs a package command that must succeed, once nobody else is at it."""
        self.wait_for_locks()
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            words = " ".join(argv[:2])
            self.fail(
                f"{words} ended with {done.returncode}: {_said(done.stderr)}",
                "apt",
                f"run {' '.join(argv)} on the host",
            )

    def fail(self, what: str, where: str, mend: str) -> None:
        """Ends in the house form."""
        host = os.uname().nodename
        self.module.fail_json(msg=f"cuda_toolkit_sbsa: {what}\n  where: {host} {where}\n  mend:  {mend}")


def _said(text: str) -> str:
    """What apt calls errors, else the last words: digests by the dozen stand between a mismatch and the end."""
    errors = [line for line in text.splitlines() if line.startswith("E: ")]
    return "; ".join(errors)[:600] or text.strip()[-300:]


def _distribution() -> str:
    """The archive's word for this system: ubuntu2404, debian12."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return release["ID"].strip('"') + release["VERSION_ID"].strip('"').replace(".", "")


def main() -> None:
    """Runs the module."""
    text = {"type": "str", "required": True}
    module = AnsibleModule(
        argument_spec={
            "repository_url": text,
            "key_fingerprint": text,
            "keyring_package": text,
            "toolkit": text,
            "capability": text,
            "lock_timeout_seconds": {"type": "int", "default": 600},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
        supports_check_mode=True,
    )
    Toolkit(module).run()


if __name__ == "__main__":
    main()
