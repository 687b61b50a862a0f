#!/usr/bin/python
"""Ansible module: a swapfile of a size, crash-safe: built aside, formatted, renamed, then fstab, then on."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: vllm_swapfile
short_description: Keep a swapfile
description:
  - Probes what is there, and only makes, resizes or removes what differs. A swapfile in use is never formatted; one is
    taken out of use only where the memory that is available holds what it holds.
options:
  path: {type: path, required: true, description: The swapfile.}
  size_mib: {type: int, required: true, description: "Size, MiB; 0 for none."}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_swapfile: {path: /var/swapfile, size_mib: 4096}
"""
RETURN = "actions: {type: list, returned: always, description: What was done, in words.}"
_MIB = 1024 * 1024
_FSTAB = Path("/etc/fstab")
# swapon needs blocks of its own: none on an overlay or in memory, none that the kernel can reach over a network.
_FILESYSTEMS = ("ext4", "ext3", "xfs", "btrfs")


class Swapfile:
    """One swapfile."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.path = Path(module.params["path"])
        self.aside = self.path.with_name(f"{self.path.name}.new")
        self.size = module.params["size_mib"] * _MIB
        self.actions: list[str] = []

    def run(self) -> None:
        """Probe, decide, act, verify."""
        wanted = self.size > 0
        active, right = self.is_active(), self.is_right_size()
        if self.aside.exists():
            self.do("remove what an interrupted run left", lambda: self.aside.unlink())
        if wanted and not right:
            self.check_filesystem()
            if active:
                self.check_memory()
                self.do("switch the old size off", lambda: self.call("swapoff", str(self.path)))
            self.do(f"make {self.size // _MIB} MiB", self.make)
            active = False
        if not wanted and active:
            self.check_memory()
            self.do("switch off", lambda: self.call("swapoff", str(self.path)))
        entries, kept = self.fstab()
        line = f"{self.path} none swap sw 0 0"
        if entries != ([line] if wanted else []):
            self.do(
                "enter in fstab" if wanted else "take out of fstab",
                lambda: self.write_fstab(kept, line if wanted else ""),
            )
        if not wanted and self.path.exists():
            self.do("remove", lambda: self.path.unlink())
        if wanted and not active:
            self.do("switch on", lambda: self.call("swapon", str(self.path)))
        if not self.module.check_mode and self.is_active() != wanted:
            self.fail("is not as wanted after all steps", f"swapon {self.path}")
        self.module.exit_json(changed=bool(self.actions), actions=self.actions)

    def do(self, words: str, step: Any) -> None:
        """Notes a step, and takes it outside check mode."""
        self.actions.append(words)
        if not self.module.check_mode:
            step()

    def is_active(self) -> bool:
        """Whether the kernel swaps to it."""
        lines = Path("/proc/swaps").read_text().splitlines()[1:]
        names = {Path(line.split()[0]).name for line in lines if Path(line.split()[0]).name == self.path.name}
        # In a container the kernel names the file as the machine sees it: device and inode tell.
        listed = any(line.split()[0] == str(self.path) for line in lines)
        return listed or bool(names and self.path.exists() and self.is_busy())

    def is_busy(self) -> bool:
        """Whether the kernel refuses to open it for writing, as it does for a file it swaps to."""
        try:
            os.close(os.open(self.path, os.O_WRONLY))
        except OSError as error:
            return error.errno == 26
        return False

    def is_right_size(self) -> bool:
        """Whether it is there, formatted, without holes, and at most 1 MiB off."""
        try:
            found = self.path.stat()
            with self.path.open("rb") as file:
                file.seek(os.sysconf("SC_PAGE_SIZE") - 10)
                signature = file.read(10)
        except OSError:
            return False
        whole = found.st_blocks * 512 >= found.st_size
        return signature == b"SWAPSPACE2" and whole and abs(found.st_size - self.size) <= _MIB

    def check_filesystem(self) -> None:
        """The folder is on a filesystem that the kernel can swap on, with room."""
        folder = self.path.parent
        if not folder.is_dir():
            self.fail(f"has no folder {folder}", f"mkdir -p {folder}")
        done = subprocess.run(
            ["findmnt", "-no", "FSTYPE", "-T", str(folder)], capture_output=True, text=True, check=False
        )
        kind = done.stdout.strip()
        if kind not in _FILESYSTEMS:
            self.fail(
                f"would lie on {kind or 'an unknown filesystem'}, and one of {', '.join(_FILESYSTEMS)} is wanted",
                "set swapfile_path to a disk",
            )
        room = os.statvfs(folder)
        free = room.f_bavail * room.f_frsize + (self.path.stat().st_blocks * 512 if self.path.exists() else 0)
        if free < self.size + 64 * _MIB:
            self.fail(
                f"wants {self.size // _MIB} MiB and {free // _MIB} are free",
                "free space, or set swapfile_path to a larger disk",
            )
        self.btrfs = kind == "btrfs"

    def check_memory(self) -> None:
        """What lies in swap fits into the memory that is available."""
        table = {}
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":")
            table[name] = int(value.split()[0]) * 1024
        used = table["SwapTotal"] - table["SwapFree"]
        if used > table["MemAvailable"]:
            self.fail(
                f"holds {used // _MIB} MiB and {table['MemAvailable'] // _MIB} are available: it must stay on",
                "stop what uses memory, then converge again",
            )

    def make(self) -> None:
        """Writes every block beside the path, formats it, and renames it."""
        with self.aside.open("wb") as file:
            self.aside.chmod(0o600)
            if self.btrfs:
                # A swapfile must not be copied on write, and that can only be said of an empty file.
                self.call("chattr", "+C", str(self.aside))
            block = bytes(_MIB)
            for _ in range(self.size // _MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        self.call("mkswap", str(self.aside))
        self.aside.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def fstab(self) -> tuple[list[str], list[str]]:
        """The entries of this swapfile, and all other lines."""
        lines = _FSTAB.read_text().splitlines() if _FSTAB.exists() else []
        mine = [line for line in lines if line.split()[:1] == [str(self.path)]]
        return mine, [line for line in lines if line not in mine]

    def write_fstab(self, kept: list[str], line: str) -> None:
        """Writes fstab whole."""
        part = _FSTAB.with_name(".fstab.part")
        part.write_text("".join(f"{text}\n" for text in [*kept, *([line] if line else [])]))
        part.chmod(0o644)
        part.replace(_FSTAB)

    def call(self, *argv: str) -> None:
        """Runs a command that must succeed."""
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            self.fail(f"{argv[0]} said: {done.stderr.strip()}", " ".join(argv))

    def fail(self, what: str, mend: str) -> NoReturn:
        """Ends in the house form."""
        self.module.fail_json(
            msg=f"swapfile: {self.path} {what}\n  where: {os.uname().nodename} {self.path}\n  mend:  {mend}"
        )
        raise AssertionError("fail_json returns never")


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "size_mib": {"type": "int", "required": True},
        },
        supports_check_mode=True,
    )
    Swapfile(module).run()


if __name__ == "__main__":
    main()
