"""One systemd unit of ours: its file, and what systemd says of it."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from ansible.module_utils.patch_files import write_whole

UNITS = Path("/etc/systemd/system")


class Unit:
    """A unit by name, such as `vllm.service`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = UNITS / name

    def text(self) -> str:
        """The unit file's text, empty where there is none."""
        return self.path.read_text() if self.path.is_file() else ""

    def write(self, text: str) -> None:
        """Puts the text in place whole; the caller reloads systemd once for all its units."""
        write_whole(self.path, text.encode())

    def call(self, verb: str) -> int:
        """The exit status of `systemctl VERB UNIT`."""
        return subprocess.run(["systemctl", "--quiet", verb, self.name], capture_output=True, check=False).returncode

    def show(self, *names: str) -> dict[str, str]:
        """Properties as systemd tells them."""
        done = subprocess.run(
            ["systemctl", "show", self.name, f"--property={','.join(names)}"],
            capture_output=True,
            text=True,
            check=False,
        )
        return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)

    def is_on(self) -> bool:
        """Whether it runs now and will after a reboot."""
        return self.call("is-active") == 0 and self.call("is-enabled") == 0

    def journal(self, lines: int) -> list[str]:
        """The last lines of its journal."""
        done = subprocess.run(
            ["journalctl", "-u", self.name, "-n", str(lines), "--no-pager", "-o", "cat"],
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout.splitlines()


def daemon_reload() -> None:
    """systemd reads the unit files anew. Raises CalledProcessError."""
    subprocess.run(["systemctl", "daemon-reload"], capture_output=True, check=True)


def objection(name: str, text: str) -> str:
    """What systemd has against a unit text, before it lands; empty for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        unit = Path(folder) / name
        unit.write_text(text)
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
        )
    words = [line for line in done.stderr.splitlines() if name in line]
    return " ".join(words)[-300:] or (f"status {done.returncode}" if done.returncode else "")
