"""The machine's own pip configuration, so that sandbox hosts find packages where this machine does."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

_KEYS = ("index-url", "extra-index-url", "find-links", "trusted-host", "cert", "constraint", "timeout")
_MANY = ("extra-index-url", "find-links", "trusted-host")


@dataclass(frozen=True, slots=True)
class PipConfig:
    """What pip would use here: option values by name, and the local files and folders they name."""

    values: dict[str, tuple[str, ...]]

    @property
    def local_paths(self) -> tuple[Path, ...]:
        """Existing paths of this machine that the values point to; a host needs them at the same place."""
        paths: dict[Path, None] = {}
        for value in (v for values in self.values.values() for v in values):
            path = Path(urlsplit(value).path) if value.startswith("file:") else Path(value)
            if path.is_absolute() and path.exists():
                paths[path] = None
        found = list(paths)
        # A simple index links to files beside it (../files), so its parent goes along.
        return tuple(dict.fromkeys(p.parent if p.name == "simple" else p for p in found))

    def render(self, extra_find_links: tuple[str, ...] = ()) -> str:
        """The text of a pip.conf with these values."""
        lines = ["[global]"]
        for key in _KEYS:
            values = self.values.get(key, ())
            if key == "find-links":
                values = tuple(dict.fromkeys((*values, *extra_find_links)))
            if values:
                # pip keeps the line break of a folded value, so only lists are folded.
                joined = "".join(f"\n    {value}" for value in values) if key in _MANY else f" {values[-1]}"
                lines.append(f"{key} ={joined}")
        lines.append("disable-pip-version-check = true")
        return "\n".join(lines) + "\n"


def read_pip_config(python: str = sys.executable) -> PipConfig:
    """Asks pip itself, which merges its files and environment; later sources win, lists are joined."""
    listing = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True).stdout
    values: dict[str, tuple[str, ...]] = {}
    for line in listing.splitlines():
        name, _, quoted = line.partition("=")
        key = name.split(".")[-1]
        if key not in _KEYS:
            continue
        found = tuple(str(ast.literal_eval(quoted)).split())
        values[key] = tuple(dict.fromkeys((*values.get(key, ()), *found))) if key in _MANY else found
    return PipConfig(values)
