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


@dataclass(frozen=True, slots=True)
class Folder:
    """An instance that is a folder: its commands run on this machine, in it."""

    instance_id: str
    folder: Path

    def command(self, argv: Sequence[str], *, tty: bool = False) -> list[str]:
        """The command itself."""
        del tty
        return list(argv)
