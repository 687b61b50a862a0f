"""What a boot takes up again, and what it leaves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import resume_builds
from resume_builds import BOOTS, main, resume


def begun(builds: Path, name: str, state: str, **marks: Any) -> Path:
    """A build that says how it is started: by leaving a file."""
    home = builds / name
    home.mkdir(parents=True)
    unit = {"unit": f"no-such-unit-{name}", "argv": ["touch", str(home / "started")]}
    for file, content in {"start": unit, "status": {"state": state, "stage": "build_wheel"}, **marks}.items():
        (home / f"{file}.json").write_text(json.dumps(content))
    return home


@pytest.mark.parametrize(
    ("state", "marks", "taken_up"),
    [
        ("running", {}, True),
        ("interrupted", {}, True),
        ("done", {}, False),
        ("failed", {}, False),
        ("cancelled", {}, False),
        # Cancelled while it could not say so.
        ("running", {"cancelled": {"who": "ada"}}, False),
    ],
)
def test_what_was_cut_off_is_taken_up(tmp_path: Path, state: str, marks: dict[str, Any], taken_up: bool) -> None:
    home = begun(tmp_path, "b", state, **marks)
    assert resume(tmp_path) == (["no-such-unit-b"] if taken_up else [])
    assert (home / "started").exists() == taken_up


def test_one_that_went_down_before_its_first_word_is_taken_up_and_keeps_the_boot_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = tmp_path / "vllm-fleet-builds.service"
    monkeypatch.setattr(resume_builds, "UNIT", unit)
    builds = tmp_path / "builds"
    home = begun(builds, "b", "running")
    (home / "status.json").unlink()
    unit.touch()
    # Another's end meanwhile must not take away what this one needs at the next boot.
    monkeypatch.setattr("sys.argv", ["resume_builds.py", str(builds), "--ended"])
    main()
    assert unit.exists()
    assert resume(builds) == ["no-such-unit-b"]


def test_one_that_takes_the_host_down_at_every_boot_is_left_in_the_end(tmp_path: Path) -> None:
    home = begun(tmp_path, "b", "running")
    assert [len(resume(tmp_path)) for _ in range(BOOTS + 2)] == [1] * BOOTS + [0, 0]
    status = json.loads((home / "status.json").read_text())
    assert status["state"] == "failed"
    assert status["what"].startswith("3 boots took it up")
    assert "converge again" in status["mend"]


@pytest.mark.parametrize("words", [[], ["--ended"]], ids=["at boot", "a build has ended"])
def test_where_nothing_is_left_to_take_up_the_boot_unit_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    unit = tmp_path / "vllm-fleet-builds.service"
    monkeypatch.setattr(resume_builds, "UNIT", unit)
    monkeypatch.setattr("sys.argv", ["resume_builds.py", str(tmp_path / "builds"), *words])
    home = begun(tmp_path / "builds", "b", "running")
    unit.touch()
    main()
    assert unit.exists()
    # The end of one build starts no other.
    assert (home / "started").exists() == (not words)
    (home / "status.json").write_text(json.dumps({"state": "done"}))
    main()
    assert not unit.exists()
