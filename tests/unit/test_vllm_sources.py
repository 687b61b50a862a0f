"""vLLM's sources by version, fetched for real from an index at hand with the real index client."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fleet import vllm_sources
from fleet.errors import ExitCode, FleetError
from fleet.paths import cache_dir
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from fleet.vllm_sources import Tree, tree_of, versions
from tests.unit.package_indexes import Index, sdist

FILES = {
    "vllm/__init__.py": "",
    "vllm/v1/a.py": "a = 1\n",
    "csrc/b.cu": "",
    # A line that pins it for some other build is not the pin.
    "requirements/cuda.txt": "-r common.txt\n\nnumba == 0.65.0\ntorch==2.13.0\ntorchaudio==2.11.0  # with torch\n",
    "requirements/rubin-prerelease.txt": "torch==2.15.0\n",
}


@pytest.fixture
def steps() -> Steps:
    return Steps(terminal(stderr=True), Durations(), "test")


@pytest.fixture
def index(steps: Steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """An index with four sdists, and a cache that holds the index client alone."""
    vllm_sources._index_client(steps)
    real = cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (cache_dir() / "tools").symlink_to(real / "tools")
    found = Index(tmp_path / "index", monkeypatch)
    for version in ("0.9.2", "0.25.1", "0.26.0", "0.27.1"):
        found.add("vllm", f"vllm-{version}.tar.gz", sdist(version, FILES))
    return found


def test_a_version_is_fetched_once_and_only_its_kernels_are_kept(index: Index, steps: Steps) -> None:
    assert versions() == ["0.26.0", "0.27.1"]
    tree = tree_of("0.26.0", steps)
    assert (tree.version, tree.torch_pin()) == ("0.26.0", "2.13.0")
    kept = {str(path.relative_to(tree.path)) for path in tree.path.rglob("*") if path.is_file()}
    assert kept == {"PKG-INFO", "requirements/cuda.txt", "vllm/__init__.py", "vllm/v1/a.py"}
    newest = tree_of("newest", steps)
    assert newest.version == "0.27.1"
    shutil.rmtree(index.folder)
    assert tree_of("0.26.0", steps) == tree
    assert sorted(path.name for path in tree.path.parent.iterdir()) == ["0.26.0", "0.27.1", "lock"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("0.25.1", "is older than 0.26.0, the oldest that was patched"),
        ("0.99.0", "is not on the package index"),
        ("0.27.x", "is no version"),
    ],
)
def test_another_version_is_refused_with_those_that_are(index: Index, steps: Steps, asked: str, words: str) -> None:
    with pytest.raises(FleetError, match=f"vLLM {asked} {words}; there are 0.26.0, 0.27.1") as error:
        tree_of(asked, steps)
    assert error.value.code is ExitCode.BAD_INPUT
    assert index.folder.is_dir()


def test_a_file_with_another_digest_or_version_is_refused_and_not_kept(index: Index, steps: Steps) -> None:
    index.add("vllm", "vllm-0.28.0.tar.gz", sdist("0.28.0", FILES), digest="0" * 64)
    index.add("vllm", "vllm-0.29.0.tar.gz", sdist("0.29.0", FILES, says="0.28.0"))
    for version, words in (("0.28.0", "(?i)hash"), ("0.29.0", "says version 0.28.0, and 0.29.0 is wanted")):
        with pytest.raises(FleetError, match=words) as error:
            tree_of(version, steps)
        assert error.value.code is ExitCode.REFUSED
    assert [path.name for path in (cache_dir() / "vllm").iterdir()] == ["lock"]


def test_an_index_that_tells_digests_as_json(index: Index, steps: Steps) -> None:
    index.add("vllm", "vllm-0.28.0.tar.gz", sdist("0.28.0", FILES), digest="0" * 64)
    with index.as_json():
        assert tree_of("0.27.1", steps).torch_pin() == "2.13.0"
        with pytest.raises(FleetError, match=r"Hash mismatch .* Expected\(sha256\): 0000"):
            tree_of("0.28.0", steps)


def test_a_folder_is_taken_as_it_is(steps: Steps, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="neither a version nor a folder that holds vllm/") as error:
        tree_of(str(tmp_path), steps)
    assert error.value.code is ExitCode.BAD_INPUT
    (tmp_path / "vllm").mkdir()
    assert tree_of(str(tmp_path), steps) == Tree(tmp_path, "")
    assert Tree(tmp_path, "").torch_pin() == ""
    # As the wheel of a release says it.
    told = tmp_path / "vllm-0.32.0.dist-info" / "METADATA"
    told.parent.mkdir()
    told.write_text("Metadata-Version: 2.4\nName: vllm\nVersion: 0.32.0\nRequires-Dist: torch==2.13.0\n\nText\n")
    found = tree_of(str(tmp_path), steps)
    assert (found.version, found.torch_pin()) == ("0.32.0", "2.13.0")
