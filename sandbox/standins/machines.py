"""What stands behind an instance of the local AWS: a container, or a folder of this machine for tests."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

# A container that is not up again by then stays down.
_RESTART_S = 120.0
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


class Machine(Protocol):
    """Where an instance's commands run."""

    @property
    def name(self) -> str:
        """The machine's own name."""

    @property
    def instance_id(self) -> str:
        """The instance's id."""

    @property
    def folder(self) -> Path | None:
        """The folder of this machine to start the command in; None where the command says itself where it runs."""

    def command(self, argv: Sequence[str], *, tty: bool = False) -> list[str]:
        """The command line, to be run on this machine, that runs `argv` there; standard streams go through."""

    def restart(self) -> None:
        """Makes it another boot of the machine; returns when it is up."""


@dataclass(slots=True)
class Container:
    """An instance that is a podman container.

    It is restarted by who may: the engine makes networks where it is called, and this process is in the stand-ins'
    namespace. `restart_wanted` asks for it, `restarted` tells that it is done (sandbox/launched.py).
    """

    instance_id: str
    podman: str
    name: str
    folder: Path | None = None
    restart_wanted: threading.Event = field(default_factory=threading.Event)
    restarted: threading.Event = field(default_factory=threading.Event)

    def command(self, argv: Sequence[str], *, tty: bool = False) -> list[str]:
        """Runs it in the container as root."""
        return [self.podman, "exec", "-i", *(["-t"] if tty else []), self.name, *argv]

    def restart(self) -> None:
        """Has the container restarted; its init gives it the id of another boot."""
        self.restarted.clear()
        self.restart_wanted.set()
        self.restarted.wait(_RESTART_S)


@dataclass(frozen=True, slots=True)
class Folder:
    """An instance that is a folder: its commands run on this machine, in it.

    Once it was restarted they see the id of a boot of their own, in a mount namespace, for which this must be root.
    """

    instance_id: str
    folder: Path

    def command(self, argv: Sequence[str], *, tty: bool = False) -> list[str]:
        """The command itself."""
        del tty
        if not self._boot_id.exists():
            return list(argv)
        see = f'mount --bind "$0" {_BOOT_ID} && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", see, str(self._boot_id), *argv]

    def restart(self) -> None:
        """Another boot's id."""
        self._boot_id.write_text(f"{uuid.uuid4()}\n")

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.name

    @property
    def _boot_id(self) -> Path:
        return self.folder / "boot_id"
