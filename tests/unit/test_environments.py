"""Environments made with the real uv from an index at hand."""

from __future__ import annotations

import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest

from fleet.compilers import python_with
from fleet.environments import NotThere, environment, on_index, site_packages
from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from tests.unit.package_indexes import Index, wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index with one distribution, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = Index(tmp_path / "index", monkeypatch)
    for version in ("1.0", "1.1"):
        found.add("demo", f"demo-{version}-py3-none-any.whl", wheel("demo", version))
    return found


@pytest.fixture
def steps() -> Steps:
    return Steps(terminal(stderr=True), Durations(), "test")


def says(python: Path, program: str) -> str:
    return subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()


def test_it_is_made_once_and_sees_what_lies_beside(index: Index, steps: Steps, tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "neighbor.py").write_text("there = 1\n")
    python = environment("demo-1.0", "demo", ["demo==1.0"], 1, steps, beside=tmp_path / "beside")
    assert says(python, "import demo, neighbor; print(demo.version, neighbor.there)") == "1.0 1"
    assert (site_packages(python) / "demo.py").is_file()
    shutil.rmtree(index.folder)
    assert environment("demo-1.0", "demo", ["demo==1.0"], 1, steps) == python


def test_a_file_with_another_digest_than_the_indexs_is_refused(index: Index, steps: Steps) -> None:
    index.add("other", "other-1.0-py3-none-any.whl", wheel("other", "1.0"), digest="0" * 64)
    with pytest.raises(FleetError, match=r"[Hh]ash mismatch") as error:
        environment("other", "other", ["other==1.0"], 1, steps)
    assert error.value.code is ExitCode.REFUSED
    assert [path.name for path in (cache_dir() / "tools").iterdir()] == ["lock"]


def test_what_the_index_lacks_is_told_apart_from_an_index_that_is_out_of_reach(
    index: Index, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotThere, match=r"no version of demo==9\.0"):
        environment("demo-9.0", "demo", ["demo==9.0"], 1, steps)
    assert on_index("demo") == ["1.1", "1.0"]
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    for asked in (lambda: environment("demo", "demo", ["demo"], 1, steps), lambda: on_index("demo")):
        with pytest.raises(FleetError) as error:
            asked()
        assert (error.value.code, "PIP_INDEX_URL" in error.value.mend) == (ExitCode.REFUSED, True)
    assert index.folder.is_dir()


def test_no_room_is_told_before_anything_is_fetched(
    index: Index, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(100, 90, 10))
    with pytest.raises(FleetError, match="10 bytes free for demo, and 11 are wanted") as error:
        environment("demo-1.0", "demo", ["demo==1.0"], 11, steps)
    assert (error.value.code, "XDG_CACHE_HOME" in error.value.mend) == (ExitCode.REFUSED, True)
    assert index.folder.is_dir()


def test_what_a_killed_run_left_is_made_anew(index: Index, steps: Steps) -> None:
    made = environment("demo-1.1", "demo", ["demo==1.1"], 1, steps).parent.parent
    made.rename(made.with_name(f".{made.name}.part"))
    python = environment("demo-1.1", "demo", ["demo==1.1"], 1, steps)
    assert says(python, "import demo; print(demo.version)") == "1.1"
    assert sorted(path.name for path in made.parent.iterdir()) == sorted(["lock", made.name])
    assert index.folder.is_dir()


def test_a_torch_that_no_index_has_names_the_variable(index: Index, steps: Steps) -> None:
    with pytest.raises(FleetError, match="no CPU build of torch") as error:
        python_with("3.7.1", steps)
    assert (error.value.where, error.value.code) == ("VLLM_FLEET_TORCH_INDEX", ExitCode.REFUSED)
    for words in ("3.7", "newest", "../3.7.1"):
        with pytest.raises(FleetError, match="is no version") as error:
            python_with(words, steps)
        assert error.value.code is ExitCode.BAD_INPUT
    assert index.folder.is_dir()
