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
description:
  - Fetches rustup-init by digest, installs the toolchains that the sources of the releases ask for under a folder of
    its own, and proves that they run. Where nothing is built from source it says so and does nothing.
options:
  toolchain: {type: str, default: '', description: "Channel or version, such as 1.95; empty for the sources' own."}
  releases:
    type: list
    elements: dict
    required: true
    description: "The wanted releases: name, method, fetched and rust_toolchain of each."
  home: {type: path, required: true, description: "Folder of the installation; rustup, cargo and their files."}
  server: {type: str, required: true, description: Base address of the distribution server.}
  rustup_version: {type: str, required: true, description: Version of rustup-init.}
  sha256: {type: dict, required: true, description: Digest of rustup-init by machine.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- rust_toolchain: {releases: [{name: vllm, method: source, rust_toolchain: '1.95'}], home: /opt/rust}
"""
RETURN = """
---
decision: {type: str, returned: success, description: Which toolchains are needed and why, in words.}
versions: {type: dict, returned: success, description: What rustc and cargo of each toolchain say of themselves.}
"""


def wanted_toolchains(pinned: str, releases: list[dict[str, Any]]) -> tuple[list[str], list[str], str]:
    """Toolchains to install, releases whose source is not here to say which, and the decision in words.

    Args:
        pinned: the toolchain that overrides the sources; empty for none.
        releases: name, method, built or fetched, and rust_toolchain of each.
    """
    built = [release for release in releases if release["method"] == "source"]
    if not built:
        return [], [], "nothing is built from source here, so no Rust is needed"
    names = ", ".join(release["name"] for release in built)
    if pinned:
        return [pinned], [], f"Rust {pinned} is needed for {names}: rust_toolchain says so"
    unknown = [r["name"] for r in built if not (r["rust_toolchain"] or r["fetched"] or r["built"])]
    channels = sorted({r["rust_toolchain"] for r in built if r["rust_toolchain"]})
    words = [f"Rust {' and '.join(channels)} is needed: the sources of {names} ask for it"] if channels else []
    words += [f"the source of {', '.join(unknown)} will say which Rust it needs once it is fetched"] if unknown else []
    return channels, unknown, "; ".join(words) or f"the sources of {names} ask for no Rust toolchain"


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
        toolchains, unknown, decision = wanted_toolchains(self.p["toolchain"], self.p["releases"])
        missing = [name for name in toolchains if not self.runs(name)]
        if self.module.check_mode or not missing:
            versions = {name: self.versions(name) for name in toolchains if name not in missing}
            self.module.exit_json(changed=bool(missing or unknown), decision=decision, versions=versions)
        temporary = self.home / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        try:
            # Twice: mending one toolchain may mean to start anew.
            for name in [*toolchains, *toolchains]:
                if not self.runs(name):
                    self.install(name)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        versions = {name: self.versions(name) for name in toolchains}
        for name in toolchains:
            if not self.runs(name):
                self.fail(
                    f"{versions[name] or 'nothing'} runs after the install, and {name} is wanted",
                    f"rm -r {self.home}, then converge again",
                )
        self.module.exit_json(changed=True, decision=decision, versions=versions)

    def versions(self, toolchain: str) -> dict[str, str]:
        """What the two programs of a toolchain say; a program that does not run says nothing."""
        found = {}
        for name in ("rustc", "cargo"):
            program = self.home / "cargo" / "bin" / name
            if not program.exists():
                continue
            # By name, and without a download where it is not there: this is a question, not an install.
            environment = {**self.environment, "RUSTUP_TOOLCHAIN": toolchain, "RUSTUP_AUTO_INSTALL": "0"}
            done = subprocess.run(
                [str(program), "--version"], env=environment, capture_output=True, text=True, check=False, cwd="/"
            )
            if done.returncode == 0:
                found[name] = done.stdout.strip()
        return found

    def runs(self, toolchain: str) -> bool:
        """Whether both programs run, and where the toolchain is a version, at that version."""
        versions = self.versions(toolchain)
        # A channel such as stable or nightly-2026-01-01 names no version.
        wanted = toolchain.split(".") if toolchain[:1].isdigit() else []
        return len(versions) == 2 and all(
            text.split()[1].split(".")[: len(wanted)] == wanted for text in versions.values()
        )

    def install(self, toolchain: str) -> None:
        """Runs rustup where it is there and works, else rustup-init."""
        rustup = self.home / "cargo" / "bin" / "rustup"
        if rustup.exists():
            words = self.call(
                [str(rustup), "toolchain", "install", toolchain, "--profile", "minimal", "--no-self-update"]
            )
            # rustup takes a toolchain that lacks its programs for installed.
            if not words and self.runs(toolchain):
                return
            # What an interrupted install left is not worth mending.
            shutil.rmtree(self.home / "rustup", ignore_errors=True)
            shutil.rmtree(self.home / "cargo", ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.home) as folder:
            init = Path(folder) / "rustup-init"
            init.write_bytes(self.download())
            init.chmod(0o755)
            words = self.call(
                [str(init), "-y", "--no-modify-path", "--profile", "minimal", "--default-toolchain", toolchain]
            )
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
            "toolchain": {"type": "str", "default": ""},
            "releases": {"type": "list", "elements": "dict", "required": True},
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
