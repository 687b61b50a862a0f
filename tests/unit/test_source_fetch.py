"""Sources fetched for real: a tag of a git repository, and an sdist behind a stubbed index client."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from build_release import Build
from fetch_source import Fetch

from fleet import vllm_sources
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from tests.unit.package_indexes import Index
from tests.unit.package_indexes import sdist as packed

TOOLCHAIN = '[toolchain]\nchannel = "1.95"\n'


def git(folder: Path, *words: str) -> str:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "init.defaultBranch=main"]
    return subprocess.run(
        ["git", "-C", str(folder), *author, *words], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "upstream"
    folder.mkdir()
    git(folder, "init", "-q")
    for number, version in enumerate(("0.31.0", "0.32.0")):
        (folder / "setup.py").write_text(f"# {version}\n")
        (folder / "rust-toolchain.toml").write_text(TOOLCHAIN)
        git(folder, "add", ".")
        git(folder, "commit", "-q", "-m", str(number))
        git(folder, "tag", f"v{version}")
    (folder / "setup.py").write_text("# later\n")
    git(folder, "commit", "-q", "-am", "later")
    return folder


def spec(tmp_path: Path, source: dict[str, Any], **more: Any) -> Path:
    home = tmp_path / "sources" / str(source["key"])
    home.mkdir(parents=True, exist_ok=True)
    path = home / "spec.json"
    path.write_text(json.dumps({"source": {**source, "path": str(home)}, "tools": str(tmp_path / "tools"), **more}))
    return path


def git_source(repository: Path, **more: str) -> dict[str, str]:
    return {
        "kind": "git", "key": "vllm-v0.32.0", "repository": f"file://{repository}", "tag": "v0.32.0",
        "version": "0.32.0", "digest": "", **more,
    }  # fmt: skip


def fetch(path: Path) -> dict[str, Any]:
    """The status after the fetch, with the record of the source beside it."""
    try:
        Fetch(path).run()
    except SystemExit as end:
        assert end.code == 1
    record = path.with_name("source.json")
    found: dict[str, Any] = json.loads(path.with_name("status.json").read_text())
    return {**found, "source": json.loads(record.read_text()) if record.is_file() else None}


def build_of(path: Path, build_id: str = "b1") -> Build:
    """A build of that source, far enough to unpack it."""
    found = {
        **json.loads(path.read_text()),
        "build_id": build_id,
        "path": str(path.parent / "release"),
        "method": "source",
        "torch": {"site_packages": str(path.parent / "ami")},
    }
    record = path.with_name("source.json")
    found["source"] |= json.loads(record.read_text())
    home = path.parent / "build"
    home.mkdir(exist_ok=True)
    (home / "spec.json").write_text(json.dumps({**found, "target_device": "empty"}))
    return Build(home / "spec.json")


def test_a_tag_is_cloned_shallow_and_says_its_toolchain(tmp_path: Path, repository: Path) -> None:
    path = spec(tmp_path, git_source(repository))
    found = fetch(path)
    assert found["state"] == "done"
    assert found["source"]["digest"] == git(repository, "rev-parse", "v0.32.0")
    assert found["source"]["rust_toolchain"] == "1.95"
    checkout = path.parent / "checkout"
    assert (checkout / "setup.py").read_text() == "# 0.32.0\n"
    assert git(checkout, "rev-list", "--count", "HEAD") == "1"
    assert git(checkout, "describe", "--tags", "--exact-match") == "v0.32.0"


def test_a_branch_of_the_tags_name_does_not_take_its_place(tmp_path: Path, repository: Path) -> None:
    git(repository, "branch", "v0.32.0", "HEAD")
    assert fetch(spec(tmp_path, git_source(repository)))["source"]["digest"] == git(
        repository, "rev-parse", "refs/tags/v0.32.0"
    )
    git(repository, "branch", "v0.40.0")
    found = fetch(spec(tmp_path, git_source(repository, tag="v0.40.0")))
    assert (found["state"], found["source"]) == ("failed", None)
    assert found["what"] == f"file://{repository} has no tag v0.40.0; its newest are v0.32.0, v0.31.0"
    assert found["refused"]
    assert found["mend"].startswith(f"git ls-remote --tags file://{repository}")


def test_a_tag_that_moved_from_its_commit_is_refused(tmp_path: Path, repository: Path) -> None:
    held = git(repository, "rev-parse", "v0.32.0")
    assert fetch(spec(tmp_path, git_source(repository, digest=held)))["state"] == "done"
    git(repository, "tag", "-f", "v0.32.0", "HEAD")
    found = fetch(spec(tmp_path, git_source(repository, digest=held)))
    assert (found["state"], found["source"]) == ("failed", None)
    assert found["what"] == f"tag v0.32.0 is commit {git(repository, 'rev-parse', 'HEAD')}, and {held} is wanted"


def test_builds_never_see_what_an_earlier_one_left(tmp_path: Path, repository: Path) -> None:
    # CASES F28, A42: the checkout stays clean, and the tree that is built in is always at the same place.
    path = spec(tmp_path, git_source(repository))
    fetch(path)
    checkout = path.parent / "checkout"
    (checkout / "setup.py").write_text("# patched\n")
    (checkout / "left.txt").write_text("")
    build = build_of(path)
    build.unpack()
    assert (build.tree / "setup.py").read_text() == "# 0.32.0\n"
    assert not (build.tree / "left.txt").exists()
    (build.tree / "setup.py").write_text("# changed by the build\n")
    assert git(checkout, "status", "--porcelain") == ""
    # The same build goes on where it was.
    build_of(path).unpack()
    assert (build.tree / "setup.py").read_text() == "# changed by the build\n"
    again = build_of(path, "b2")
    again.unpack()
    assert again.tree == build.tree
    assert (again.tree / "setup.py").read_text() == "# 0.32.0\n"


def sdist(tmp_path: Path, version: str, *, toolchain: bool = True) -> Path:
    tree = tmp_path / f"vllm-{version}"
    (tree / "rust").mkdir(parents=True)
    (tree / "PKG-INFO").write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n")
    # Another crate's file further down is not the source's own.
    (tree / "rust" / "rust-toolchain.toml").write_text('[toolchain]\nchannel = "0.1"\n')
    if toolchain:
        (tree / "rust-toolchain.toml").write_text(TOOLCHAIN)
    archive = tmp_path / f"vllm-{version}.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tree, tree.name)
    return archive


def sdist_spec(tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The index client's place is taken by a program that copies the file."""
    client = tmp_path / "tools" / "bin" / "python"
    client.parent.mkdir(parents=True, exist_ok=True)
    client.write_text(f'#!/bin/sh\ncp "{archive}" "$5"\n')
    client.chmod(0o755)
    monkeypatch.setattr(Fetch, "make_tools", lambda _self: None)
    source = {"kind": "sdist", "key": "vllm-0.32.0", "distribution": "vllm", "version": "0.32.0", "digest": ""}
    return spec(tmp_path, source)


def test_an_sdist_says_its_digest_and_its_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = sdist(tmp_path, "0.32.0")
    path = sdist_spec(tmp_path, archive, monkeypatch)
    found = fetch(path)
    assert found["source"]["digest"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert found["source"]["rust_toolchain"] == "1.95"
    build = build_of(path)
    build.unpack()
    assert (build.tree / "rust-toolchain.toml").read_text() == TOOLCHAIN
    # A file that changed on disk since is not built from.
    (path.parent / "sdist.tar.gz").write_bytes(archive.read_bytes() + b"x")
    with pytest.raises(Exception, match="not the file any more"):
        build_of(path, "b2").unpack()


def test_an_sdist_of_another_version_or_without_a_toolchain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fetch(sdist_spec(tmp_path, sdist(tmp_path, "0.31.0"), monkeypatch))
    assert (found["state"], found["source"]) == ("failed", None)
    assert found["what"] == "the sdist says version 0.31.0, and 0.32.0 is wanted"
    found = fetch(sdist_spec(tmp_path, sdist(tmp_path, "0.32.0", toolchain=False), monkeypatch))
    assert found["source"]["rust_toolchain"] == ""


def test_an_sdist_that_the_index_does_not_have_names_those_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = vllm_sources._index_client(Steps(terminal(stderr=True), Durations(), "test"))
    index = Index(tmp_path / "index", monkeypatch)
    for version in ("0.31.0", "0.32.0", "0.33.0", "0.9.0"):
        index.add("vllm", f"vllm-{version}.tar.gz", packed(version, {}))
    index.add("vllm", "vllm-0.34.0-py3-none-any.whl", b"")
    monkeypatch.setattr(Fetch, "make_tools", lambda _self: None)
    (tmp_path / "tools" / "bin").mkdir(parents=True)
    python = tmp_path / "tools" / "bin" / "python"
    config = f"PIP_CONFIG_FILE=/dev/null PIP_INDEX_URL=file://{index.folder}/simple PYTHONPATH={client}"
    python.write_text(f'#!/bin/sh\n{config} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    source = {"kind": "sdist", "key": "vllm-0.34.0", "distribution": "vllm", "version": "0.34.0", "digest": ""}
    found = fetch(spec(tmp_path, source))
    has = "the package index has no sdist of vllm 0.34.0; its newest are 0.33.0, 0.32.0, 0.31.0"
    assert (found["what"], found["refused"], found["source"]) == (has, True, None)
    # CASES: a file that is not the one that was written down is refused, too.
    other = {**source, "key": "vllm-0.33.0", "version": "0.33.0", "digest": "0" * 64}
    found = fetch(spec(tmp_path, other))
    assert "sha256" in found["what"].lower() or "hash" in found["what"].lower()
    assert (found["refused"], found["source"]) == (True, None)
    assert not (tmp_path / "sources" / "vllm-0.33.0" / "sdist.tar.gz").exists()


def test_git_that_is_not_installed_is_told(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = spec(tmp_path, git_source(repository))
    monkeypatch.setattr(Fetch, "environment", lambda _self: {"PATH": str(tmp_path)})
    found = fetch(path)
    assert (found["what"], found["mend"]) == ("git is not installed", "apt-get install git")
