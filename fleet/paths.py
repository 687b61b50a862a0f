"""Where the controller keeps what it can make again (cache) and what it must remember (state).

The standard library alone, since the bootstrap reads it too.
"""

from __future__ import annotations

import os
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
_NAME = "vllm-fleet"


def cache_dir() -> Path:
    """Folder for what can be rebuilt: images, wheels, the sandbox's model. Created on use."""
    return _made(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _NAME)


def state_dir() -> Path:
    """Folder for what must outlive a command: logs, durations, the sandbox's record. Created on use."""
    return _made(Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / _NAME)


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
