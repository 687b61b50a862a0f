"""What stands behind an instance of the local AWS: a container, or a folder of this machine for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class Machine(Protocol):
    """Where an instance's commands run."""

    @property
    def instance_id(self) -> str:
        """The instance's id."""

    @property
    def folder(self) -> Path | None:
        """The folder of this machine to start the command in; None where the command says itself where it runs."""

    def command(self, argv: Sequence[str], *, tty: bool = False) -> list[str]:
        """The command line, to be run on this machine, that runs `argv` there; standard streams go through."""

    def switching(self, *, on: bool) -> list[list[str]]:
        """Commands of this machine that take it down, and up again if `on`; none where its processes are all of it."""


@dataclass(frozen=True, slots=True)
class Container:
    """An instance that is a podman container."""

    instance_id: str
    podman: str
    name: str
    folder: Path | None = None

    def command(self, argv: Sequence[str], *, tty: bool = False) -> list[str]:
        """Runs it in the container as root."""
        return [self.podman, "exec", "-i", *(["-t"] if tty else []), self.name, *argv]

    def switching(self, *, on: bool) -> list[list[str]]:
        """Restarts or stops it; the engine sets up networks where it is called, which is not this process's place."""
        podman = ["nsenter", "-t", "1", "-n", self.podman]
        if not on:
            return [[*podman, "stop", "--time", "60", self.name]]
        up = self.command(["systemctl", "is-system-running", "--wait"])
        return [[*podman, "restart", "--time", "60", self.name], up]


@dataclass(frozen=True, slots=True)
class Folder:
    """An instance that is a folder: its commands run on this machine, in it."""

    instance_id: str
    folder: Path

    def command(self, argv: Sequence[str], *, tty: bool = False) -> list[str]:
        """The command itself."""
        del tty
        return list(argv)

    def switching(self, *, on: bool) -> list[list[str]]:
        """Nothing: its processes are all of it."""
        del on
        return []
