"""What a task changes in texts, as a person reads it: unified, a few lines of surroundings, colored."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

_MOST_LINES = 60
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def lines(diff: Any) -> Iterator[tuple[str, str]]:
    """Lines with their styles, of what a module returns as `diff`: one entry or a list of them.

    An entry holds `before` and `after` (texts, or values that are shown as JSON), or a `prepared` text.
    """
    for entry in diff if isinstance(diff, list) else [diff]:
        if not isinstance(entry, dict):
            continue
        found = _entry(entry)
        for line in found[:_MOST_LINES]:
            yield line, _STYLES.get(line[:1], "dim")
        if len(found) > _MOST_LINES:
            yield f"… {len(found) - _MOST_LINES} more lines", "dim"


def _entry(entry: dict[str, Any]) -> list[str]:
    if entry.get("prepared"):
        return str(entry["prepared"]).splitlines()
    for side in ("src", "dst"):
        if entry.get(f"{side}_binary") or entry.get(f"{side}_larger"):
            return [
                f"{entry.get('after_header') or entry.get('before_header') or 'the file'}: not shown, no short text"
            ]
    before, after = _text(entry.get("before")), _text(entry.get("after"))
    names = (str(entry.get("before_header") or "before"), str(entry.get("after_header") or "after"))
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=2))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, indent=1, sort_keys=True) if value else ""
