"""Where the controller keeps what it can make again (cache) and what it must remember (state)."""

from __future__ import annotations

from pathlib import Path

import platformdirs

PROJECT = Path(__file__).resolve().parent.parent
_NAME = "vllm-fleet"


def cache_dir() -> Path:
    """Folder for what can be rebuilt: images, wheels, the sandbox's model. Created on use."""
    return _made(platformdirs.user_cache_path(_NAME))


def state_dir() -> Path:
    """Folder for what must outlive a command: logs, durations, the sandbox's record. Created on use."""
    return _made(platformdirs.user_state_path(_NAME))


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path
