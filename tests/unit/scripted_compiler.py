"""A compile check that tells what it is to tell, in the place of the real one."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleet import patch_check

# Stands for the compiler: stock asks for 98,304 bytes, upstream's fix for 65,536, the patch for what is given.
CHECKER = """\
import json, pathlib, sys
request = json.loads(pathlib.Path(sys.argv[1]).read_text())
with open({log!r}, "a") as log:
    log.write(json.dumps(request) + "\\n")
text = pathlib.Path(request["sources"]["vllm/v1/attention/ops/triton_unified_attention.py"]).read_text()
compile(text, "attention", "exec")
{more}
shared = {patched} if "vllm-fleet patch" in text else 65536 if "    return 16\\n" in text else 98304
layer = {{"head_size": 512, "heads": 8, "kv_heads": 1}}
launch = {{"kernel": "unified_attention", "phase": "prefill", "tile": 32, "block_m": 16, "warps": 4, **layer}}
launches = [launch | {{"shared_bytes": shared, "registers": 64, "stack_bytes": 0}}]
fits = shared <= request["limit_bytes"]
print(json.dumps({{"triton": "3.7.1", "torch": "2.13.0", "launches": launches, "fits": fits}}))
"""


def put(
    folder: Path, monkeypatch: pytest.MonkeyPatch, patched: int = 65536, more: str = ""
) -> Callable[[], list[dict[str, Any]]]:
    """Puts it in place, with an empty cache: bytes of the patched source, more lines; returns what lists requests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(patch_check, "python_with", lambda _triton, _steps: Path(sys.executable))
    log, program = folder / "requests", folder / "checker.py"
    log.write_text("")
    program.write_text(CHECKER.format(log=str(log), patched=patched, more=more))
    monkeypatch.setattr(patch_check, "CHECKER", program)
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]
