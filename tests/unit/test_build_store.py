"""Whole builds of several hosts on one store: real uv, pip and environments, moto's S3 over HTTP."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import release_lock
from build_release import Build
from moto.server import ThreadedMotoServer
from publish_release import Publication

from tests.unit import test_build_release
from tests.unit.object_store import BUCKET, ObjectStore, object_store
from tests.unit.test_build_release import Site, run
from tests.unit.test_wheel_store import FILES, wait_until

ID = "vllm-0.33.0-0123456789ab"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
INPUTS = {"python": PYTHON, "architecture": platform.machine(), "torch": "2.12.0"}
MANIFEST = f"fleet/builds/{ID}/manifest.json"
LOCK = f"fleet/builds/{ID}/lock.json"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    # A dependency, small and real, that the package index has.
    needs = test_build_release.BACKEND.replace("Name: vllm\\n", "Name: vllm\\nRequires-Dist: idna\\n")
    assert needs != test_build_release.BACKEND
    monkeypatch.setattr(test_build_release, "BACKEND", needs)
    # The tools' environment is this one: uv, pip and boto3 are here.
    monkeypatch.setattr(Build, "make_tools", lambda _self: None)
    monkeypatch.setattr(Publication, "make_tools", lambda _self: None)
    with object_store() as found:
        yield found


def host(folder: Path, s3: ObjectStore, **store: Any) -> Build:
    """One host's build of the same source."""
    site = Site(folder)
    return site.build(build_id=ID, inputs=INPUTS, store=s3.settings(**store))


def compiled(build: Build) -> int:
    """How often the source was built, by the log."""
    return build.log_path.read_text().count("/uv build ")


def files(build: Build) -> set[str]:
    """What is installed, as distributions with their versions."""
    return {path.name for path in build.site_packages.glob("*.dist-info")}


def test_hosts_that_race_build_once_and_install_the_same(s3: ObjectStore, tmp_path: Path) -> None:
    builds = [host(tmp_path / f"host{number}", s3) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(run, builds))
    assert [status["state"] for status, _ in ends] == ["done"] * 3, ends
    assert sorted(compiled(build) for build in builds) == [0, 0, 1]
    assert sorted(record["store"]["state"] for _, record in ends) == ["fetched", "fetched", "published"]
    assert all("/uv pip install" in build.log_path.read_text() for build in builds)
    assert all("--no-index" in build.log_path.read_text() for build in builds)
    assert len({frozenset(files(build)) for build in builds}) == 1
    assert any(name.startswith("idna-") for name in files(builds[0]))
    manifest = s3.json(MANIFEST)
    assert (manifest["inputs"], manifest["tools"]["uv"][:3]) == (INPUTS, "uv ")
    assert not any(build.wheelhouse.exists() for build in builds)
    assert s3.json(LOCK)["outcome"] == "published"


def test_a_builder_that_is_killed_is_followed_by_another(s3: ObjectStore, tmp_path: Path) -> None:
    site = Site(tmp_path / "killed")
    build = site.build(build_id=ID, inputs=INPUTS, store=s3.settings(expires_s=4.0))
    # As the unit runs it, in the middle of compiling.
    script = (
        f"import sys, time; sys.path.insert(0, {str(FILES)!r}); from build_release import Build; from pathlib import "
        "Path; Build.make_tools = lambda self: None; Build.unpack = lambda self: time.sleep(600); "
        "Build(Path(sys.argv[1])).run()"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(build.home / "spec.json")]) as process:
        wait_until(lambda: LOCK in s3.listing(), 60)
        follower = host(tmp_path / "follower", s3, expires_s=4.0)
        ends: list[Any] = []
        thread = threading.Thread(target=lambda: ends.append(run(follower)))
        thread.start()
        wait_until(lambda: status(follower).get("state") == "waiting")
        told = status(follower)
        os.kill(process.pid, signal.SIGKILL)
    thread.join(120)
    assert (told["builder"], told["build_id"]) == (platform.node(), ID)
    assert told["progress"]["state"] == "running"
    assert ends[0][1]["store"]["state"] == "published", ends
    assert compiled(follower) == 1


def status(build: Build) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((build.home / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def after(build: Build, stage: str, act: Callable[[], None]) -> None:
    """Something happens to the world once a stage is through."""
    real = getattr(build, stage)

    def staged() -> None:
        real()
        act()

    staged.__name__ = stage
    setattr(build, stage, staged)


def test_a_store_that_goes_away_costs_no_build_and_gets_it_later(s3: ObjectStore, tmp_path: Path) -> None:
    build = host(tmp_path / "one", s3)
    after(build, "gather", s3.server.stop)
    ended, record = run(build)
    assert ended["state"] == "done", ended
    assert record["store"]["state"] == "unpublished"
    assert record["warnings"][0].startswith("not published: the store does not answer")
    assert (build.wheelhouse / "manifest.json").is_file()
    s3.server = ThreadedMotoServer(ip_address="127.0.0.1", port=s3.port, verbose=False)
    s3.server.start()
    built_ns = (build.release / "release.json").stat().st_mtime_ns
    Publication(build.home / "spec.json").run()
    record = json.loads((build.release / "release.json").read_text())
    assert (record["store"]["state"], record["warnings"]) == ("published", [])
    assert (build.release / "release.json").stat().st_mtime_ns == built_ns
    assert not build.wheelhouse.exists()
    second = host(tmp_path / "two", s3)
    assert run(second)[1]["store"]["state"] == "fetched"


def test_whoever_loses_the_race_takes_the_winners_wheels(s3: ObjectStore, tmp_path: Path) -> None:
    loser, winner = host(tmp_path / "loser", s3), host(tmp_path / "winner", s3)

    def other_wins() -> None:
        # The lock is advisory: one that ran out under its owner lets two build. Once: the loser checks again.
        if not winner.release.exists():
            s3.client.delete_object(Bucket=BUCKET, Key=LOCK)
            assert run(winner)[1]["store"]["state"] == "published"

    after(loser, "check", other_wins)
    ended, record = run(loser)
    assert ended["state"] == "done", ended
    assert record["store"]["state"] == "fetched"
    assert (compiled(loser), compiled(winner)) == (1, 1)
    # The wheel tells where it was built.
    assert str(tmp_path / "winner") in (loser.site_packages / "vllm" / "environment.txt").read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"build_id": "vllm-0.33.0-other"}, "is of build vllm-0.33.0-other"),
        ({"architecture": "sparc"}, "is for sparc"),
        ({"schema": 2}, "has schema 2"),
        ({"inputs": {**INPUTS, "torch": "2.11.0"}}, "says torch '2.11.0', and '2.12.0' is wanted"),
        ({"wheels": []}, "lists no wheels"),
        ({"wheels": "py2"}, f"which Python {PYTHON} on this {platform.machine()} does not take"),
        ({"wheels": "sha256"}, "has sha256"),
        ({"wheels": "upwards"}, "lists no wheels"),
        ({"wheels": "version"}, "calls"),
        ({"wheels": "absent"}, "the store answered GetObject with NoSuchKey"),
    ],
)
def test_what_the_store_has_is_judged_before_it_is_installed(
    s3: ObjectStore, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    build = host(tmp_path / "one", s3)
    body = "a wheel"
    digest = "2dc9a9d6d3d7e2fba1ee9d8b1b80c6a9ab05a9aa5d1b4a3d5d7c3c3f4b1c0a77"
    wheel = {"name": "vllm", "version": "0.33.0", "file": "vllm-0.33.0-py3-none-any.whl", "sha256": digest, "bytes": 7}
    kind = change.get("wheels")
    if kind == "py2":
        wheel["file"] = "vllm-0.33.0-py2-none-any.whl"
    if kind == "upwards":
        wheel["file"] = "../vllm-0.33.0-py3-none-any.whl"
    if kind == "version":
        wheel["version"] = "0.34.0"
    if kind != "absent":
        s3.client.put_object(Bucket=BUCKET, Key=f"fleet/wheels/{digest}/{wheel['file']}", Body=body)
    manifest = {"schema": 1, "build_id": ID, "architecture": platform.machine(), "inputs": INPUTS, "host": "x"}
    manifest |= {"wheels": [wheel], **{key: value for key, value in change.items() if kind in (None, [])}}
    s3.client.put_object(Bucket=BUCKET, Key=MANIFEST, Body=json.dumps(manifest))
    ended, record = run(build)
    assert (ended["state"], ended["refused"], record) == ("failed", True, {})
    assert words in ended["what"]
    assert ended["where"]
    assert ended["mend"]
    assert not build.release.exists()
    assert [path.name for path in build.wheelhouse.glob("*.whl")] == []


def test_a_dependency_with_another_digest_than_the_locks_is_never_published(
    s3: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_lock, "LOCKS", tmp_path)
    lock = tmp_path / "a.txt"
    # As the project's own locks have it.
    pinned = (FILES / "tools-requirements.txt").read_text().split("idna==")[1].split("\njmespath")[0]
    lock.write_text(f"idna=={pinned.split()[0]} --hash=sha256:{'0' * 64}\n")
    site = Site(tmp_path / "one")
    ended, record = run(site.build(build_id=ID, inputs=INPUTS, store=s3.settings(), lock="a.txt"))
    assert (ended["state"], record) == ("failed", {})
    assert "pip wheel" in ended["what"] or "pip --python" in ended["what"], ended
    assert not any(key.endswith((".whl", "manifest.json")) for key in s3.listing())
    lock.write_text(f"idna=={pinned}\n")
    ended, record = run(site.build(build_id=ID, inputs=INPUTS, store=s3.settings(), lock="a.txt"))
    assert (ended["state"], record["store"]["state"]) == ("done", "published"), ended


@pytest.mark.parametrize("actions", [["s3:GetObject", "s3:ListBucket"], ["s3:PutObject"]])
def test_a_store_that_denies_is_refused_before_anything_is_built(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, actions: list[str]
) -> None:
    key, secret = s3.only(*actions)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    build = host(tmp_path / "one", s3)
    ended, record = run(build)
    assert (ended["state"], ended["refused"], record) == ("failed", True, {})
    assert ended["what"].startswith("the store denies")
    assert "s3:PutObject" in ended["mend"]
    assert not build.release.exists()
    assert not build.tree.exists()


def test_a_bucket_that_is_not_there_is_refused_before_anything_is_built(s3: ObjectStore, tmp_path: Path) -> None:
    build = host(tmp_path / "one", s3, bucket="nowhere")
    ended, _ = run(build)
    assert (ended["refused"], ended["what"]) == (True, "bucket nowhere is not there")
    assert not build.tree.exists()


def test_a_host_beside_builders_never_builds_and_tells_what_they_build(s3: ObjectStore, tmp_path: Path) -> None:
    site = Site(tmp_path / "builder")
    other = ID.replace("0123", "ffff")
    builder = site.build(build_id=other, inputs={**INPUTS, "torch": "2.11.0"}, store=s3.settings())
    builder.open_store()
    assert builder.found_or_locked() is None
    serving = host(tmp_path / "serving", s3, builds=False, wait_s=1.0)
    began = time.monotonic()
    ended, record = run(serving)
    assert time.monotonic() - began > 1
    assert (ended["state"], record, compiled(serving)) == ("failed", {}, 0)
    assert ended["what"] == (
        f"no builder took {ID} within 1 s; beside it: {platform.node()} builds {other} "
        "(torch '2.11.0' there, '2.12.0' here)"
    )
    assert LOCK not in s3.listing()
    builder.release_lock()


def test_what_a_failed_builder_said_is_told_to_those_that_wait(s3: ObjectStore, tmp_path: Path) -> None:
    site = Site(tmp_path / "builder")
    broken = site.build(build_id=ID, inputs=INPUTS, store=s3.settings(), environment={"BUILD_AS": "0.31.0"})
    assert run(broken)[0]["state"] == "failed"
    ended, _ = run(host(tmp_path / "serving", s3, builds=False, wait_s=0.5))
    assert "failed: version 0.31.0 was built and 0.33.0 is wanted" in ended["what"]
    assert MANIFEST not in s3.listing()
