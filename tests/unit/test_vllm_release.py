"""The releases module on a real git repository and the real programs, run in the foreground instead of in units."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.patch_registry import ATTENTION

from fleet.paths import PROJECT
from plugins.modules import vllm_release
from plugins.modules.vllm_release import Releases
from tests.unit.object_store import BUCKET, object_store
from tests.unit.test_build_release import BACKEND, MEMORY, ROOM
from tests.unit.test_patch_sources import SOURCES
from tests.unit.test_source_fetch import git

LIB = PROJECT / "roles" / "vllm_source_build" / "files"


class Ended(Exception):
    """The module came to its end; `result` is what it told."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("msg", ""))
        self.result = result


class Module:
    """What the releases ask of an Ansible module."""

    def __init__(self, params: dict[str, Any], check_mode: bool) -> None:
        self.params, self.check_mode = params, check_mode

    def exit_json(self, **result: Any) -> None:
        raise Ended(result)

    def fail_json(self, **result: Any) -> None:
        raise Ended({**result, "failed": True})


class Host:
    """A host's folders, a torch, and an upstream repository with a tag."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[str] = []
        self.build: dict[str, Any] = {}
        self.since = 0.0
        self.store: dict[str, Any] = {"bucket": ""}
        self.site = folder / "ami" / "lib" / "python3.11" / "site-packages"
        (self.site / "torch").mkdir(parents=True)
        (self.site / "torch" / "__init__.py").write_text(
            "from types import SimpleNamespace\n__version__ = '2.12.0'\nversion = SimpleNamespace(cuda='13.2')\n"
        )
        # The tools' environment is this one: uv and pip are here.
        (folder / "tools").mkdir()
        (folder / "tools" / "bin").symlink_to(Path(sys.executable).parent)
        (folder / "tools" / "requirements.stamp").write_text((LIB / "tools-requirements.txt").read_text())
        self.upstream = folder / "upstream"
        for name, text in {
            "payload/__init__.py": "",
            "tools/use_existing_torch.py": "",
            "setup.py": "",
            "CMakeLists.txt": "",
            **SOURCES,
            "backend.py": BACKEND,
            "rust-toolchain.toml": '[toolchain]\nchannel = "1.95"\n',
            "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        }.items():
            path = self.upstream / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.decided: dict[str, Any] = {}
        git(self.upstream, "init", "-q")
        self.release()

    def release(self) -> str:
        """A commit under the tag."""
        git(self.upstream, "add", ".")
        git(self.upstream, "commit", "-q", "--allow-empty", "-m", "x")
        git(self.upstream, "tag", "-f", "v0.33.0")
        return git(self.upstream, "rev-parse", "v0.33.0")

    def entry(self, **more: Any) -> dict[str, Any]:
        return {
            "name": "a", "method": "source", "distribution": "vllm", "version": "0.33.0", "target_device": "empty",
            "repository": f"file://{self.upstream}", **more,
        }  # fmt: skip

    def ask(self, state: str, *releases: dict[str, Any], check_mode: bool = False) -> dict[str, Any]:
        need = {"builds": ROOM, "sources": ROOM, "root": ROOM, "cache": ROOM}
        params = {
            "state": state,
            "releases": list(releases),
            "torch": {
                "python": sys.executable, "site_packages": str(self.site), "version": "2.12.0", "cuda": "13.2",
            },
            "arch_list": "7.5",
            "folders": {
                **{name: str(self.folder / name) for name in ("root", "builds", "sources", "tools")},
                "lib": str(LIB),
            },
            "build": {
                "store": self.store,
                **self.decided,
                "cuda_home": "/nowhere/cuda", "host_compiler": "/nowhere/g++", "rust_home": "/nowhere/rust",
                "rust_toolchain": "", "jobs": 0, "mib_per_job": 0, "memory": MEMORY, "cache_environment": {},
                "cache": str(self.folder / "cache"), "need": {"source": {"empty": need, "cuda": need}},
                **self.build,
            },
            "wait_seconds": 60, "since": self.since,
        }  # fmt: skip
        asked = Releases(Module(params, check_mode))
        asked.systemd_run = self.systemd_run  # type: ignore[method-assign]
        with pytest.raises(Ended) as caught:
            asked.run()
        return caught.value.result

    def systemd_run(self, unit: str, argv: list[str], home: Path) -> None:  # noqa: ARG002
        """Runs the unit's program to its end, in the foreground."""
        self.started.append(unit)
        subprocess.run([sys.executable, *argv[1:]], check=False)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setattr(vllm_release, "at_work", lambda _unit: False)
    return Host(tmp_path)


def test_a_tag_is_fetched_once_and_built_once(host: Host) -> None:
    commit = git(host.upstream, "rev-parse", "HEAD")
    wanted = host.entry()
    bare = host.ask("built", wanted, check_mode=True)
    assert (bare["missing"], bare["unfetched"], host.started) == (["a"], ["a"], [])
    found = host.ask("fetched", wanted)
    assert (found["finished"], found["missing"], found["unfetched"]) == (True, ["a"], [])
    assert found["releases"][0]["rust_toolchain"] == "1.95"
    found = host.ask("built", wanted)
    assert (found["finished"], found["missing"]) == (True, [])
    (release,) = found["releases"]
    assert json.loads((Path(release["path"]) / "release.json").read_text())["source"]["digest"] == commit
    assert len(host.started) == 2
    assert host.ask("built", wanted)["finished"]
    assert host.ask("planned", wanted)["releases"] == [release]
    assert len(host.started) == 2
    # Held to the same commit it is the same release.
    assert host.ask("planned", host.entry(commit=commit))["releases"][0]["build_id"] == release["build_id"]


def test_a_moved_tag_is_noticed_by_its_commit(host: Host) -> None:
    first = host.ask("built", host.entry())["releases"][0]["build_id"]
    (host.upstream / "setup.py").write_text("# changed\n")
    commit = host.release()
    # Without a commit the source that was fetched stands.
    assert host.ask("built", host.entry())["releases"][0]["build_id"] == first
    again = host.ask("built", host.entry(commit=commit))
    assert again["finished"]
    assert again["releases"][0]["build_id"] != first
    failed = host.ask("built", host.entry(commit="c" * 40))
    assert failed["msg"].startswith("vllm_source_build: a: its source was not fetched: tag v0.33.0 is commit ")
    assert "\n  where: " in failed["msg"]
    assert "\n  mend:  " in failed["msg"]


def test_releases_are_built_one_after_the_other(host: Host) -> None:
    found = host.ask("built", host.entry(), host.entry(name="b", environment={"LANG": "C"}))
    assert found["finished"]
    kinds = [unit.split("-")[1] for unit in host.started]
    assert kinds == ["fetch", "build", "build"]


def test_a_build_cancelled_since_the_run_began_stays_so_and_a_later_run_starts_it(host: Host) -> None:
    began = host.ask("planned", host.entry())["now"]
    assert host.ask("fetched", host.entry())["finished"]
    build_id = host.ask("planned", host.entry())["releases"][0]["build_id"]
    home = host.folder / "builds" / build_id
    home.mkdir(parents=True)
    (home / "cancelled.json").write_text(json.dumps({"who": "ada@desk", "when": "10:00", "at": began + 1}))
    host.since = began
    failed = host.ask("built", host.entry())
    assert failed["msg"].startswith("vllm_source_build: a: the build was cancelled by ada@desk at 10:00\n  where: ")
    assert not host.ask("planned", host.entry())["finished"]
    host.since = began + 2
    assert host.ask("built", host.entry())["finished"]
    assert not (home / "cancelled.json").exists()


def test_a_build_killed_between_two_looks_is_told_of_and_the_next_run_goes_on(host: Host) -> None:
    assert host.ask("fetched", host.entry())["finished"]
    planned = host.ask("planned", host.entry())
    home = host.folder / "builds" / planned["releases"][0]["build_id"]
    home.mkdir(parents=True)
    host.since = planned["now"]
    # Begun by an earlier call of this run; the kill left its status as it was.
    (home / "spec.json").write_text("{}")
    (home / "status.json").write_text(json.dumps({"state": "running", "stage": "build_wheel"}))
    begun = len(host.started)
    failed = host.ask("built", host.entry())
    assert "it was not built: the unit ended without saying why (killed?)" in failed["msg"]
    assert len(host.started) == begun
    host.since = time.time() + 1
    assert host.ask("built", host.entry())["finished"]


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("SCCACHE_BUCKET", True),
        ("CCACHE_REMOTE_STORAGE", True),
        ("AWS_REGION", True),
        ("AWS_SECRET_ACCESS_KEY", False),
        ("SCCACHE_REDIS_PASSWORD", False),
        ("PATH", False),
    ],
)
def test_only_a_cache_s_variables_are_its_environment(host: Host, name: str, taken: bool) -> None:
    build_id = host.ask("planned", host.entry())["releases"][0]["build_id"]
    host.build = {"cache_environment": {name: "x"}}
    found = host.ask("planned", host.entry())
    if taken:
        # Where objects come from decides nothing of the binary.
        assert found["releases"][0]["build_id"] == build_id
        return
    assert found["msg"].startswith(f"vllm_source_build: {name} is no variable of a compiler cache")
    assert found["refused"]


def test_what_the_store_has_missed_is_published_when_it_is_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with object_store() as s3:
        host.store = s3.settings()
        [release] = host.ask("built", host.entry())["releases"]
        manifest = f"fleet/builds/{release['build_id']}/manifest.json"
        assert manifest in s3.listing()
        # As a build leaves it that lost the store.
        kept = host.folder / "builds" / release["build_id"] / "wheelhouse"
        kept.mkdir()
        (kept / "manifest.json").write_text(json.dumps(s3.json(manifest)))
        for wheel in (kept.parent / "dist").glob("*.whl"):
            shutil.copy(wheel, kept)
        record = Path(release["path"]) / "release.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "store": {"state": "unpublished"}}))
        s3.client.delete_object(Bucket=BUCKET, Key=manifest)
        host.store = s3.settings(endpoint_url="http://127.0.0.1:9")
        away = host.ask("built", host.entry())
        assert (away["finished"], away["missing"]) == (True, [])
        assert (away["unpublished"], away["published"]) == (["a"], [])
        host.store = s3.settings()
        assert host.ask("planned", host.entry())["unpublished"] == ["a"]
        back = host.ask("built", host.entry())
        assert (back["finished"], back["unpublished"], back["published"]) == (True, [], ["a"])
        assert manifest in s3.listing()
    assert [unit.split("-")[1] for unit in host.started] == ["fetch", "build", "publish", "publish"]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            [{"target_device": "cuda", "rust_frontend": False}],
            "a: it was not built: there is no nvcc, and a CUDA build",
        ),
        (
            [{"target_device": "cuda", "tag": "moved", "rust_frontend": False}],
            "a: patch triton-tile-clamp does not fit vllm/v1/attention/ops/triton_unified_attention.py: TILE",
        ),
        (
            [{"environment": {"VLLM_NOTHING": "1"}}],
            "a: it was not built: VLLM_NOTHING is set, and nothing in the build",
        ),
        ([{}, {}], "2 releases are named a"),
        ([{"tag": "v0.32.0"}], "tag v0.32.0 and version 0.33.0 do not agree"),
    ],
)
def test_refusals_are_marked(host: Host, entries: list[dict[str, Any]], words: str) -> None:
    # A later tag, in whose source the patch has no place.
    (host.upstream / ATTENTION).write_text(SOURCES[ATTENTION].replace("TILE_SIZE_PREFILL = _get", "TILE = _get"))
    git(host.upstream, "commit", "-qam", "moved")
    git(host.upstream, "tag", "moved")
    failed = host.ask("built", *[host.entry(**entry) for entry in entries])
    assert failed["msg"].startswith(f"vllm_source_build: {words}")
    assert failed["refused"]
    assert not list(host.folder.glob("builds/*"))
    assert not list(host.folder.glob("sources/*/tree"))


def test_a_tag_that_does_not_exist_names_the_newest_and_leaves_no_folder(host: Host) -> None:
    failed = host.ask("fetched", host.entry(version="0.34.0"))
    upstream = f"file://{host.upstream}"
    assert failed["msg"].startswith(
        f"vllm_source_build: a: its source was not fetched: {upstream} has no tag v0.34.0; its newest are v0.33.0\n"
    )
    assert failed["refused"]
    assert not list(host.folder.glob("sources/*"))


def test_what_the_entry_leaves_open_is_what_preflight_decided(host: Host) -> None:
    wanted = host.entry(version="newest", method="auto")
    failed = host.ask("planned", wanted)
    assert "preflight decided no version and method for it" in failed["msg"]
    assert failed["refused"]
    host.decided = {"method": "source", "versions": {"a": "0.33.0"}}
    same = host.ask("planned", host.entry())["releases"]
    assert host.ask("planned", wanted)["releases"] == same
