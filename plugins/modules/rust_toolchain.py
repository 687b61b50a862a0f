#!/usr/bin/python
"""Ansible module: a Rust toolchain, installed by rustup for the whole host beside whatever the distribution has."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: rust_toolchain
short_description: Install a Rust toolchain with rustup
description: [Fetches rustup-init by digest, installs the toolchain under a folder of its own, and proves that it runs.]
options:
  toolchain: {type: str, required: true, description: "Channel or version, such as 1.95."}
  home: {type: path, required: true, description: "Folder of the installation; rustup, cargo and their files."}
  server: {type: str, required: true, description: Base address of the distribution server.}
  rustup_version: {type: str, required: true, description: Version of rustup-init.}
  sha256: {type: dict, required: true, description: Digest of rustup-init by machine.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- rust_toolchain: {toolchain: '1.95', home: /opt/rust}
"""
RETURN = "versions: {type: dict, returned: success, description: What rustc and cargo say of themselves.}"


class Toolchain:
    """The toolchain of one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.home = Path(self.p["home"])
        # Under become, HOME is somebody else's; a login shell's PATH is nobody's.
        self.environment = {
            "PATH": f"{self.home}/cargo/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "RUSTUP_HOME": f"{self.home}/rustup",
            "CARGO_HOME": f"{self.home}/cargo",
            "RUSTUP_DIST_SERVER": self.p["server"],
            # /tmp may be mounted noexec, and rustup-init runs from where it lies.
            "TMPDIR": str(self.home / "tmp"),
        }

    def run(self) -> None:
        """Probe, decide, act, verify."""
        versions = self.versions()
        if self.is_wanted(versions):
            self.module.exit_json(changed=False, versions=versions)
        if self.module.check_mode:
            self.module.exit_json(changed=True, versions={})
        temporary = self.home / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            self.install()
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        versions = self.versions()
        if not self.is_wanted(versions):
            self.fail(
                f"{versions or 'nothing'} runs after the install, and {self.p['toolchain']} is wanted",
                f"rm -r {self.home}, then converge again",
            )
        self.module.exit_json(changed=True, versions=versions)

    def versions(self) -> dict[str, str]:
        """What the two programs say; a program that does not run says nothing."""
        found = {}
        for name in ("rustc", "cargo"):
            program = self.home / "cargo" / "bin" / name
            if not program.exists():
                continue
            done = subprocess.run(
                [str(program), "--version"], env=self.environment, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                found[name] = done.stdout.strip()
        return found

    def is_wanted(self, versions: dict[str, str]) -> bool:
        """Whether both programs run, at the version asked for."""
        wanted = self.p["toolchain"].split(".")
        return len(versions) == 2 and all(
            text.split()[1].split(".")[: len(wanted)] == wanted for text in versions.values()
        )

    def install(self) -> None:
        """Runs rustup-init, or rustup where it is there and works."""
        rustup = self.home / "cargo" / "bin" / "rustup"
        if rustup.exists():
            argv = [
                str(rustup),
                "toolchain",
                "install",
                self.p["toolchain"],
                "--profile",
                "minimal",
                "--no-self-update",
            ]
            said = self.call(argv) or self.call([str(rustup), "default", self.p["toolchain"]])
            # rustup takes a toolchain that lacks its programs for installed.
            if not said and self.is_wanted(self.versions()):
                return
            # What an interrupted install left is not worth mending.
            shutil.rmtree(self.home / "rustup", ignore_errors=True)
            shutil.rmtree(self.home / "cargo", ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            init = Path(folder) / "rustup-init"
            init.write_bytes(self.download())
            init.chmod(0o755)
            argv = [
                str(init),
                "-y",
                "--no-modify-path",
                "--profile",
                "minimal",
                "--default-toolchain",
                self.p["toolchain"],
            ]
            words = self.call(argv)
        if words:
            self.fail(f"rustup-init failed: {words}", "check rust_dist_server and rust_toolchain")

    def download(self) -> bytes:
        """rustup-init, by digest."""
        machine = platform.machine()
        wanted = self.p["sha256"].get(machine)
        if wanted is None:
            self.fail(f"no digest of rustup-init is known for {machine}", "add it to rust_rustup_init_sha256")
        url = f"{self.p['server']}/rustup/archive/{self.p['rustup_version']}/{machine}-unknown-linux-gnu/rustup-init"
        try:
            with urllib.request.urlopen(url, timeout=120) as reply:
                content: bytes = reply.read()
        except (OSError, urllib.error.URLError) as error:
            self.fail(f"{url} cannot be read: {error}", "check the network, or set rust_dist_server to a mirror")
        found = hashlib.sha256(content).hexdigest()
        if found != wanted:
            self.fail(
                f"rustup-init has sha256 {found}, and {wanted} is wanted",
                "set rust_rustup_version and rust_rustup_init_sha256 together",
            )
        return content

    def call(self, argv: list[str]) -> str:
        """The last words of a command that failed, or nothing."""
        done = subprocess.run(argv, env=self.environment, capture_output=True, text=True, check=False, cwd="/")
        return "" if done.returncode == 0 else (done.stderr.strip() or f"status {done.returncode}")[-300:]

    def fail(self, what: str, mend: str) -> None:
        """Ends in the house form."""
        self.module.fail_json(msg=f"rust: {what}\n  where: {os.uname().nodename} {self.home}\n  mend:  {mend}")


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "toolchain": {"type": "str", "required": True},
            "home": {"type": "path", "required": True},
            "server": {"type": "str", "required": True},
            "rustup_version": {"type": "str", "required": True},
            "sha256": {"type": "dict", "required": True},
        },
        supports_check_mode=True,
    )
    Toolchain(module).run()


if __name__ == "__main__":
    main()
