"""What pip is configured with on this host, for the tools that do not read pip's configuration themselves."""

from __future__ import annotations

import ast
import subprocess

_PIP_TO_UV = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}


def read(python: str) -> dict[str, list[str]]:
    """Option name to its values for that interpreter's pip, as `pip config list` merges them.

    Lists are joined, of single values the last wins.
    """
    argv = [python, "-m", "pip", "config", "list"]
    listing = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    config: dict[str, list[str]] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        words = str(ast.literal_eval(value)).split()
        key = name.split(".")[-1]
        joined = key in ("extra-index-url", "find-links", "trusted-host", "constraint")
        config[key] = [*config.get(key, []), *words] if joined else words
    return config


def for_uv(config: dict[str, list[str]]) -> list[str]:
    """What `read` found in uv's words; the newest of all indexes is taken, as pip does."""
    words = ["--index-strategy", "unsafe-best-match"]
    for name, values in config.items():
        if name in _PIP_TO_UV:
            words += [word for value in values for word in (_PIP_TO_UV[name], value)]
    return words
