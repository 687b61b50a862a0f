"""A unit that is ending has not ended: what it still has to say is waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ansible.module_utils.transient_unit import at_work


# States and their meaning: systemctl(1), systemd's unit_active_state.
@pytest.mark.parametrize(
    ("state", "expected"),
    [("active", True), ("activating", True), ("deactivating", True), ("inactive", False), ("failed", False)],
)
def test_at_work_until_it_has_ended(
    state: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "systemctl"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'show -P ActiveState vllm-build-x' ] && echo {state}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert at_work("vllm-build-x") is expected
