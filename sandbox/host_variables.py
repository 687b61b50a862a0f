"""What Ansible must know of the sandbox's hosts, however they are reached. The standard library alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from fleet.paths import state_dir


def record_path() -> Path:
    """The file that says what is up."""
    return state_dir() / "sandbox" / "world.json"


def recorded() -> dict[str, Any]:
    """The record. Raises SystemExit (2), with the house's words on standard error, where no sandbox is up."""
    try:
        found: dict[str, Any] = json.loads(record_path().read_text())
    except FileNotFoundError:
        sys.stderr.write(
            f"inventory: no sandbox is up, and one host at least is wanted\n  where: {record_path()}\n"
            "  mend:  ./runner.py sandbox up\n"
        )
        raise SystemExit(2) from None
    return found


def variables(world: dict[str, Any]) -> dict[str, Any]:
    """Variables of the group `sandbox`, but for the connection."""
    found = {
        "sandbox_files_url": world["files_url"],
        "sandbox_aws_url": world["aws_url"],
        "cuda_toolkit_sbsa_key_fingerprint": world["cuda_key_fingerprint"],
    }
    if world["rust"]:
        found |= {
            "rust_toolchain": world["rust"]["toolchain"],
            "rust_dist_server": f"{world['files_url']}/rust",
            "rust_rustup_version": world["rust"]["rustup_version"],
            "rust_rustup_init_sha256": {os.uname().machine: world["rust"]["rustup_init_sha256"]},
        }
    return found
