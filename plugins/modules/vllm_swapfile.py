#!/usr/bin/python
"""Ansible module: a swapfile of a size, crash-safe: built aside, formatted, renamed, then fstab, then on."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import time
from pathlib import Path
from typing import Any, NoReturn

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.mounts import mount_of, unescape

DOCUMENTATION = r"""
module: vllm_swapfile
short_description: Keep a swapfile
description:
  - Probes what is there, and only makes, resizes or removes what differs. A swapfile in use is never formatted; one is
    taken out of use only where the memory that is available holds what it holds. A file at the path that is no
    swapfile is refused, never overwritten or removed.
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
_SIGNATURE = b"SWAPSPACE2"
# The signature ends the first page, and a page is 4, 16 or 64 KiB: a kernel with another size may have formatted it.
_PAGES = (4096, 16384, 65536)
# A cancelled run's module goes on writing on the host; at 100 MB/s it is done with 60 GB by then.
_WAIT_SECONDS = 600
_FSTAB = Path("/etc/fstab")
# swapon needs blocks of its own (checked: an overlay and a tmpfs are refused with EINVAL).
_FILESYSTEMS = ("ext4", "ext3", "xfs", "btrfs")
_UNFIT = {
    "overlay": "an overlay, which has no blocks of its own",
    "tmpfs": "a tmpfs, which is memory itself",
    "ramfs": "a ramfs, which is memory itself",
    **dict.fromkeys(
        ("nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "virtiofs", "fuse.sshfs", "fuse.glusterfs"),
        "a network file system, which wants memory to write what memory cannot hold",
    ),
}


def swapoff_problem(used_bytes: int, available_bytes: int) -> str:
    """Why a swapfile must stay on: what lies in it has to fit into the memory that is available; empty if it does."""
    if used_bytes < available_bytes:
        return ""
    return f"holds {used_bytes // _MIB} MiB and {available_bytes // _MIB} are available: it must stay on"


class Swapfile:
    """One swapfile."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.path = Path(module.params["path"])
        self.aside = self.path.with_name(f"{self.path.name}.new")
        self.size = module.params["size_mib"] * _MIB
        self.actions: list[str] = []
        self.before = ""

    def run(self) -> None:
        """Probe, decide, act, verify."""
        wanted = self.size > 0
        if self.size < 0:
            self.refuse(
                f"of {self.size // _MIB} MiB was asked for, and 0 or more is wanted", "set swapfile_size_mib: 0"
            )
        self.wait_for_another_run()
        self.check_it_is_ours()
        active, right = self.is_active(), self.is_right_size()
        self.before = self.describe()
        # Every guard before the first act.
        aside_first = self.check_filesystem() if wanted and not right else False
        if active and not (wanted and right):
            self.check_memory()
        if self.aside.exists():
            self.do("remove what an interrupted run left", lambda: self.aside.unlink())
        if wanted and not right:
            if aside_first:
                self.do(f"make {self.size // _MIB} MiB", self.make)
            if active:
                self.do("switch the old size off", self.switch_off)
            if not aside_first:
                self.do("remove the old one to make room", lambda: self.path.unlink())
                self.do(f"make {self.size // _MIB} MiB", self.make)
            # Not a step of its own: where it is cut off, the next run starts from the file left aside.
            if not self.module.check_mode:
                self.put_in_place()
            active = False
        elif wanted and not self.is_private():
            self.do("take it from other users", self.make_private)
        if not wanted and active:
            self.do("switch off", self.switch_off)
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
        after = f"{self.size // _MIB} MiB, 0600, on\n{_FSTAB}: {line}\n" if wanted else "none\n"
        self.module.exit_json(
            changed=bool(self.actions),
            actions=self.actions,
            diff={"before": self.before, "after": after if self.actions else self.before},
        )

    def describe(self) -> str:
        """What is there, in words, for a diff: size, mode, whether it is on, and its entries in fstab."""
        entries = "".join(f"{_FSTAB}: {line}\n" for line in self.fstab()[0])
        if not self.path.exists():
            return f"none\n{entries}"
        found = self.path.stat()
        state = "on" if self.is_active() else "off"
        return f"{found.st_size // _MIB} MiB, {stat.S_IMODE(found.st_mode):04o}, {state}\n{entries}"

    def wait_for_another_run(self) -> None:
        """A run that is still writing aside holds a lock on it: neither disturb it nor format what it writes."""
        end = time.monotonic() + (0 if self.module.check_mode else _WAIT_SECONDS)
        while True:
            try:
                held = os.open(self.aside, os.O_RDONLY)
            except OSError:
                return
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() >= end:
                    self.fail("is being made by another run", f"wait for that run to end (fuser {self.aside})")
            finally:
                os.close(held)
            time.sleep(1)

    def check_it_is_ours(self) -> None:
        """What lies at the path is a swapfile, or an empty file; anything else is someone's."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return
        if stat.S_ISREG(found.st_mode):
            with self.path.open("rb") as file:
                start = file.read(_PAGES[-1])
            if any(start[page - 10 : page] == _SIGNATURE for page in _PAGES) or not start:
                return
        self.refuse(
            "exists and is no swapfile; it is left alone, and a swapfile or nothing is wanted there",
            "set swapfile_path to a path that is free",
        )

    def do(self, words: str, step: Any) -> None:
        """Notes a step, and takes it outside check mode."""
        self.actions.append(words)
        if not self.module.check_mode:
            step()

    def is_active(self) -> bool:
        """Whether the kernel swaps to it."""
        return self.used_bytes() >= 0 or self.is_busy()

    def used_bytes(self) -> int:
        """Bytes that lie in it, as the kernel lists them under this path; -1 where it does not."""
        for line in Path("/proc/swaps").read_text().splitlines()[1:]:
            name, _, _, used = line.split()[:4]
            if unescape(name) == str(self.path):
                return int(used) * 1024
        return -1

    def is_busy(self) -> bool:
        """Whether the kernel refuses to write to it, as it does for a file it swaps to, under whatever name.

        Opening one for writing is allowed; a write of no bytes is refused (checked: ext4, Linux 6.18).
        """
        try:
            file = os.open(self.path, os.O_WRONLY)
        except OSError:
            return False
        try:
            os.pwrite(file, b"", 0)
        except OSError as error:
            return bool(error.errno == errno.ETXTBSY)
        finally:
            os.close(file)
        return False

    def is_private(self) -> bool:
        """Whether only root reads it: it holds other processes' memory."""
        found = self.path.stat()
        return stat.S_IMODE(found.st_mode) == 0o600 and (found.st_uid, found.st_gid) == (0, 0)

    def make_private(self) -> None:
        """Root's, and nobody else's."""
        os.chown(self.path, 0, 0)
        self.path.chmod(0o600)

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
        return signature == _SIGNATURE and whole and abs(found.st_size - self.size) <= _MIB

    def check_filesystem(self) -> bool:
        """The folder is on a filesystem that the kernel can swap on, with room.

        Returns:
            Whether there is room beside the old one, which then stays in use while the new one is made.
        """
        folder = self.path.parent
        if not folder.is_dir():
            self.refuse(f"has no folder {folder}", f"mkdir -p {folder}")
        kind = mount_of(folder).fstype
        if kind not in _FILESYSTEMS:
            self.refuse(
                f"would lie on {_UNFIT.get(kind, kind)}; one of {', '.join(_FILESYSTEMS)} is wanted",
                "set swapfile_path to a path on a local disk",
            )
        room = os.statvfs(folder)
        left = self.aside.stat().st_blocks * 512 if self.aside.exists() else 0
        beside = room.f_bavail * room.f_frsize + left
        free = beside + (self.path.stat().st_blocks * 512 if self.path.exists() else 0)
        if free < self.size + 64 * _MIB:
            self.refuse(
                f"wants {self.size // _MIB} MiB and {free // _MIB} are free",
                "free space, or set swapfile_path to a larger disk",
            )
        self.btrfs = kind == "btrfs"
        return bool(beside >= self.size + 64 * _MIB)

    def switch_off(self) -> None:
        """Takes it out of use; minutes may have passed since the guards looked."""
        self.check_memory()
        self.call("swapoff", str(self.path))

    def check_memory(self) -> None:
        """What lies in it fits into the memory that is available."""
        table = {}
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, value = line.split(":")
            table[name] = int(value.split()[0]) * 1024
        used = self.used_bytes()
        if used < 0:
            used = table["SwapTotal"] - table["SwapFree"]
        problem = swapoff_problem(used, table["MemAvailable"])
        if problem:
            self.refuse(problem, "stop what uses memory, then converge again")

    def make(self) -> None:
        """Writes every block beside the path, and formats it; a lock tells other runs that it is being made."""
        file = os.open(self.aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.btrfs:
                # A swapfile must not be copied on write, and that can only be said of an empty file.
                self.call("chattr", "+C", str(self.aside))
            block = bytes(_MIB)
            for _ in range(self.size // _MIB):
                written = 0
                while written < _MIB:
                    written += os.write(file, block[written:])
            os.fsync(file)
            self.call("mkswap", str(self.aside))
            os.fsync(file)
        except OSError:
            self.aside.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def put_in_place(self) -> None:
        """Renames the file made aside, durably."""
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
        target = _FSTAB.resolve()
        part = target.with_name(".fstab.part")
        with part.open("w") as file:
            file.write("".join(f"{text}\n" for text in [*kept, *([line] if line else [])]))
            file.flush()
            os.fsync(file.fileno())
        part.chmod(stat.S_IMODE(target.stat().st_mode) if target.exists() else 0o644)
        part.replace(target)

    def call(self, *argv: str) -> None:
        """Runs a command that must succeed."""
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            self.fail(f"{argv[0]} said: {done.stderr.strip()}", " ".join(argv))

    def refuse(self, what: str, mend: str) -> NoReturn:
        """Ends before anything is touched, as a guard."""
        self.fail(what, mend, refused=True)

    def fail(self, what: str, mend: str, *, refused: bool = False) -> NoReturn:
        """Ends in the house form."""
        self.module.fail_json(
            msg=f"swapfile: {self.path} {what}\n  where: {os.uname().nodename} {self.path}\n  mend:  {mend}",
            refused=refused,
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
    swapfile = Swapfile(module)
    try:
        swapfile.run()
    except OSError as error:
        swapfile.fail(f"could not be kept: {error}", f"mend what it names, then converge again ({swapfile.path})")


if __name__ == "__main__":
    main()
