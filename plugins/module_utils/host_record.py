"""What is kept of a host between runs, and how two records differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.model_probe import FACTS


def stable(host: Mapping[str, Any], model: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded of a host: no value that moves by itself (free space, swap, the words)."""
    return {
        "host": {
            "ami": host["ami"],
            "architecture": host["architecture"],
            "os": host["os"],
            "python": host["python"],
            "memory": {key: host["memory"][key] for key in ("total_bytes", "overcommit_memory")},
            "filesystems": {
                path: {key: entry[key] for key in ("device", "fstype", "noexec")}
                for path, entry in host["filesystems"].items()
            },
            "gpus": host["gpus"],
            "driver": {key: host["driver"][key] for key in ("version", "library", "cuda")},
            "torch": host["torch"],
        },
        "model": {key: model[key] for key in ("name", *FACTS)},
        "plan": {key: value for key, value in plan.items() if key not in ("decisions", "refusals")},
    }


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """`host.torch.version: 2.12.0 -> 2.14.0` for every leaf that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: list[str] = []
        for key in sorted({*before, *after}):
            found += differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
        return found
    if before == after:
        return []
    was, now = ("nothing" if value in ("", None) else value for value in (before, after))
    return [f"{path}: {was} -> {now}"]
