"""The wheel store and its lock against moto's S3 over HTTP: races of threads and processes, expiry, bad objects."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from build_lock import BuildLock, others
from job import JobError
from wheel_store import Store, StoreError, digest_of, open_store, wheels_of
from wheelhouse import described

from fleet.paths import PROJECT
from tests.unit.object_store import BUCKET, ObjectStore, object_store

ID = "vllm-0.33.0-0123456789ab"
FILES = PROJECT / "roles" / "vllm_source_build" / "files"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with object_store() as found:
        yield found


def built(folder: Path, host: str) -> dict[str, Any]:
    """A wheelhouse of one host, whose own wheel is unlike any other's, and its manifest."""
    folder.mkdir(parents=True)
    (folder / "vllm-0.33.0-py3-none-any.whl").write_text(f"built by {host}")
    (folder / "dependency-1.0-py3-none-any.whl").write_text("the same everywhere")
    wheels = [{key: getattr(wheel, key) for key in wheel.__slots__} for wheel in described(folder)]
    return {"schema": 1, "build_id": ID, "host": host, "wheels": wheels}


def lock_of(store: Store, host: str, expires_s: float = 60.0) -> BuildLock:
    return BuildLock(store, ID, {"torch": "2.12.0"}, {"host": host}, expires_s, lambda: {"stage": "build_wheel"})


def test_of_many_publishers_one_is_first_and_its_wheels_are_all_there(s3: ObjectStore, tmp_path: Path) -> None:
    hosts = [f"host{number}" for number in range(8)]
    manifests = {host: built(tmp_path / host, host) for host in hosts}
    with ThreadPoolExecutor(len(hosts)) as pool:
        told = list(
            pool.map(lambda host: open_store(s3.settings()).publish(manifests[host], tmp_path / host)["host"], hosts)
        )
    [winner] = set(told)
    assert s3.json(f"fleet/builds/{ID}/manifest.json") == manifests[winner]
    store = open_store(s3.settings())
    store.fetch(wheels_of(manifests[winner]), tmp_path / "second")
    assert (tmp_path / "second" / "vllm-0.33.0-py3-none-any.whl").read_text() == f"built by {winner}"


def test_a_lock_is_taken_once_by_processes(s3: ObjectStore) -> None:
    script = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); from build_lock import BuildLock; from wheel_store import "
        "open_store; store = open_store(json.loads(sys.argv[2])); sys.stdin.read(1);"
        "lock = BuildLock(store, sys.argv[3], {}, {'host': sys.argv[4]}, 60.0, dict); print(lock.take())"
    )
    argv = [sys.executable, "-c", script, str(FILES), json.dumps(s3.settings()), ID]
    running = [
        subprocess.Popen([*argv, f"host{number}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(5)
    ]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("go")
        process.stdin.flush()
    answers = sorted(process.communicate()[0].strip() for process in running)
    assert answers == ["False", "False", "False", "False", "True"]


def test_a_lock_that_ran_out_is_taken_by_exactly_one_of_many(s3: ObjectStore) -> None:
    dead = lock_of(open_store(s3.settings()), "dead", expires_s=4.0)
    dead._thread.start = lambda: None  # type: ignore[method-assign]
    assert dead.take()
    takers = [lock_of(open_store(s3.settings()), f"host{number}") for number in range(8)]
    assert not any(taker.take() for taker in takers)
    wait_until(lambda: not alive(takers[0]))
    with ThreadPoolExecutor(len(takers)) as pool:
        taken = list(pool.map(BuildLock.take, takers))
    assert taken.count(True) == 1
    # The dead one comes back: it finds the lock another's, and does not take it away from there.
    dead._write()
    assert dead.lost
    winner = takers[taken.index(True)]
    assert s3.json(f"fleet/builds/{ID}/lock.json")["owner"] == winner.body["owner"]
    winner.release("published")


def alive(lock: BuildLock) -> bool:
    holder = lock.holder()
    assert holder is not None
    return holder.alive


def wait_until(there: Any, longest_s: float = 20.0) -> None:
    deadline = time.monotonic() + longest_s
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_builder_that_lives_keeps_its_lock_and_shows_how_far_it_is(s3: ObjectStore) -> None:
    builder = lock_of(open_store(s3.settings()), "builder", expires_s=2.0)
    assert builder.take()
    first = builder.etag
    wait_until(lambda: builder.etag != first)
    waiter = lock_of(open_store(s3.settings()), "waiter")
    time.sleep(3)
    holder = waiter.holder()
    assert holder is not None
    assert (holder.alive, holder.host, holder.body["progress"]) == (True, "builder", {"stage": "build_wheel"})
    assert not waiter.take()
    builder.release("failed: no room")
    holder = waiter.holder()
    assert holder is not None
    assert (holder.alive, holder.body["outcome"]) == (False, "failed: no room")
    assert waiter.take()
    waiter.release("published")


# A host whose clock is wrong, for itself and for the signatures that it sends.
SKEWED = """
import datetime, json, sys, time
sys.path.insert(0, sys.argv[1])
import botocore.auth, botocore.compat
seconds, real, now = float(sys.argv[4]), time.time, botocore.compat.get_current_datetime
time.time = lambda: real() + seconds
skewed = lambda *args, **kwargs: now(*args, **kwargs) + datetime.timedelta(seconds=seconds)
botocore.auth.get_current_datetime = skewed
from build_lock import BuildLock
from wheel_store import open_store
lock = BuildLock(open_store(json.loads(sys.argv[2])), sys.argv[3], {}, {"host": "skewed"}, 60.0, dict)
print(json.dumps([lock.holder().alive, lock.holder().age_s, lock.take()]))
"""


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_wrong_clock_on_the_host_changes_no_judgement(s3: ObjectStore, hours: int) -> None:
    builder = lock_of(open_store(s3.settings()), "builder", expires_s=120.0)
    assert builder.take()
    argv = [sys.executable, "-c", SKEWED, str(FILES), json.dumps(s3.settings()), ID, str(hours * 3600)]
    lives, age_s, taken = json.loads(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)
    assert (lives, taken) == (True, False)
    assert 0 <= age_s < 120
    builder.release("published")


def test_a_job_that_starts_anew_has_its_own_lock_at_once(s3: ObjectStore) -> None:
    store = open_store(s3.settings())
    killed = lock_of(store, "one")
    assert killed.take()
    again = lock_of(store, "one")
    assert again.take()
    killed._over.set()
    again.release("published")
    assert s3.json(f"fleet/builds/{ID}/lock.json")["outcome"] == "published"


def test_a_put_whose_answer_was_lost_is_known_as_ones_own(s3: ObjectStore) -> None:
    store = open_store(s3.settings())
    assert store.put("a", b"mine")
    assert store.put("a", b"mine")
    assert store.put("a", b"another's") is None
    assert store.put("a", b"new", over='"0123"') is None
    assert s3.client.get_object(Bucket=BUCKET, Key="fleet/a")["Body"].read() == b"mine"


def test_a_download_goes_on_where_it_ended_and_another_digest_is_refused(s3: ObjectStore, tmp_path: Path) -> None:
    store = open_store(s3.settings())
    manifest = built(tmp_path / "one", "one")
    store.publish(manifest, tmp_path / "one")
    wheel = next(wheel for wheel in wheels_of(manifest) if wheel.name == "vllm")
    second = tmp_path / "second"
    second.mkdir()
    (second / f"{wheel.file}.part").write_bytes((tmp_path / "one" / wheel.file).read_bytes()[:5])
    store.fetch([wheel], second)
    assert digest_of(second / wheel.file) == wheel.sha256
    s3.client.put_object(Bucket=BUCKET, Key=f"fleet/{wheel.key}", Body=b"something else")
    with pytest.raises(JobError) as caught:
        store.fetch([wheel], tmp_path / "third")
    assert f"and {wheel.sha256} is wanted" in caught.value.what
    assert list((tmp_path / "third").iterdir()) == []


@pytest.mark.parametrize(
    ("actions", "denied"),
    [
        (["s3:GetObject", "s3:ListBucket"], "PutObject"),
        (["s3:PutObject"], "GetObject"),
    ],
)
def test_a_role_that_may_not_is_told_by_name(
    s3: ObjectStore, monkeypatch: pytest.MonkeyPatch, actions: list[str], denied: str
) -> None:
    key, secret = s3.only(*actions)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    store = open_store(s3.settings())
    with pytest.raises(StoreError) as caught:
        store.manifest(ID)
        store.probe_writing()
    assert caught.value.what == f"the store denies {denied} to this host (AccessDenied)"
    assert caught.value.refused


def test_who_has_another_build_id_is_told_with_the_input_that_differs(s3: ObjectStore) -> None:
    store = open_store(s3.settings())
    other = BuildLock(store, "vllm-0.33.0-ffffffffffff", {"torch": "2.11.0"}, {"host": "old"}, 60.0, dict)
    assert other.take()
    assert others(store, ID, {"torch": "2.12.0"}) == [
        "old builds vllm-0.33.0-ffffffffffff (torch '2.11.0' there, '2.12.0' here)"
    ]
    other.release("published")
    assert others(store, ID, {"torch": "2.12.0"}) == []


def test_a_bucket_that_is_not_there_and_a_store_that_is_silent_are_told(s3: ObjectStore) -> None:
    with pytest.raises(StoreError, match="bucket nowhere is not there"):
        open_store(s3.settings(bucket="nowhere")).manifest(ID)
    with pytest.raises(StoreError, match="the store does not answer"):
        open_store(s3.settings(endpoint_url="http://127.0.0.1:9")).manifest(ID)
