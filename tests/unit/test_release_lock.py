"""A release that is held to a lock takes nothing else from an index: real uv, an index that somebody has changed."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import release_lock
from build_release import Build
from job import LIB

from fleet.paths import PROJECT
from tests.unit.package_indexes import Index, wheel
from tests.unit.test_build_release import Site, run

GOOD = {name: wheel(name, "1.0") for name in ("needed", "builder")}
# The same version, with code of somebody else's; the index tells the digest of what it gives.
OTHER = {name: wheel(name, "1.0", {f"{name}.py": "taken = True\n"}) for name in GOOD}


def lock_text(**digests: str) -> str:
    """A lock as uv writes it, of all that is good but what is given."""
    found = {name: hashlib.sha256(content).hexdigest() for name, content in GOOD.items()} | digests
    return "".join(
        f"{name}==1.0 ; python_full_version < '3.99' \\\n    --hash=sha256:{'1' * 64} \\\n    --hash=sha256:{digest}\n"
        for name, digest in found.items()
        if digest
    )


class World:
    """A source that needs one package to be built and one to run, and the index that has them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.site = Site(folder / "site")
        self.site.requires = ["builder>=0.5"]
        self.index = Index(folder / "index", monkeypatch)
        self.locks = folder / "locks"
        self.locks.mkdir()

    def build(self, lock: str | None, **other: bytes) -> tuple[dict[str, Any], dict[str, Any], Build]:
        """Builds with this lock, or with none, from an index with these files in place of the good ones."""
        for name, content in {**GOOD, **other}.items():
            self.index.add(name, f"{name}-1.0-py3-none-any.whl", content)
        if lock is not None:
            (self.locks / "a.txt").write_text(lock)
        more = {"lock": "a.txt"} if lock is not None else {}
        build = self.site.build(environment={"BUILD_NEEDING": "needed"}, **more)
        return (*run(build), build)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(Build, "make_tools", lambda _self: None)
    # BUILD_NEEDING is the test's own, and no variable of a build's.
    monkeypatch.setattr(Build, "check_source", lambda _self: None)
    found = World(tmp_path, monkeypatch)
    monkeypatch.setattr(release_lock, "LOCKS", found.locks)
    return found


def code_of(build: Build, name: str) -> str:
    return (build.site_packages / f"{name}.py").read_text()


def test_what_the_lock_names_is_installed(world: World) -> None:
    status, record, build = world.build(lock_text())
    assert (status["state"], record.get("lock")) == ("done", "a.txt"), status
    assert [code_of(build, name) for name in GOOD] == ["version = '1.0'\n"] * 2


@pytest.mark.parametrize("name", sorted(GOOD))
def test_another_file_of_the_same_version_is_refused(world: World, name: str) -> None:
    status, record, build = world.build(lock_text(), **{name: OTHER[name]})
    assert (status["state"], record) == ("failed", {})
    assert "Hash mismatch" in build.log_path.read_text()
    assert status["where"] and status["mend"]
    assert not (build.site_packages / f"{name}.py").exists()


def test_without_a_lock_the_index_is_believed_and_the_record_says_so(world: World) -> None:
    status, record, build = world.build(None, needed=OTHER["needed"])
    assert status["state"] == "done", status
    assert code_of(build, "needed") == "taken = True\n"
    assert record["lock"].startswith("none: ")


@pytest.mark.parametrize("name", sorted(GOOD))
def test_what_the_lock_does_not_have_is_refused(world: World, name: str) -> None:
    status, record, build = world.build(lock_text(**{name: ""}))
    assert (status["state"], status["refused"], record) == ("failed", True, {})
    assert status["what"] == f"the release comes to {name}==1.0, which its lock does not have"
    assert (status["where"], "a.in" in status["mend"]) == (str(world.locks / "a.txt"), True)
    assert not (build.site_packages / f"{name}.py").exists()


@pytest.mark.parametrize("lock", ["b.txt", "../locks/a.txt"])
def test_a_lock_that_is_not_there_is_refused(world: World, lock: str) -> None:
    (world.locks / "a.txt").write_text(lock_text())
    status, record = run(world.site.build(lock=lock))
    assert (status["state"], status["refused"], record) == ("failed", True, {})
    assert status["what"] == f"there is no lock {lock}, and the release is to be held to it"


def test_the_default_releases_lock_is_there_and_holds_it() -> None:
    import yaml

    [entry] = yaml.safe_load((PROJECT / "roles/vllm_source_build/defaults/main.yml").read_text())[
        "vllm_source_build_releases"
    ]
    lock = LIB / "locks" / entry["lock"]
    held = release_lock._entries(lock.read_text())
    assert f"{entry['distribution']}=={entry['version']}" in held
    # Its sdist's digest is among those of its files.
    assert f"sha256:{entry['sha256']}" in held[f"{entry['distribution']}=={entry['version']}"]
    # What its pyproject.toml asks a build for; torch is the AMI's.
    assert {"cmake", "jinja2", "ninja", "packaging", "setuptools", "setuptools-rust", "setuptools-scm", "wheel"} <= {
        requirement.partition("==")[0] for requirement in held
    }
