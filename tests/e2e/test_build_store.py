"""One source build for several sandbox hosts: a builder, one without an index, a race in which a builder dies.

One story in order: each test begins where the one before it ended. The source is vLLM's own sdist, without kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from fleet.paths import PROJECT
from sandbox import containers, world
from sandbox.standins.aws import REGION
from tests.machine import bare_sandbox, runner

HOSTS = tuple(f"vllm-fleet-host{number}" for number in (1, 2, 3))
TAGS = ("--tags", "preflight,vllm_source_build")
SOURCE = {
    "name": "source",
    "method": "source",
    "distribution": "vllm",
    "version": "0.32.0",
    "sha256": "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad",
    "target_device": "empty",
    "serve": True,
}


def asked(**more: Any) -> tuple[str, ...]:
    """The words that converge to this source, and an input that makes it another build."""
    return (*TAGS, "-e", f"vllm_source_build_releases={json.dumps([{**SOURCE, **more}])}")


def on(host: str, script: str) -> str:
    return containers.Podman().shell(host, script)


def records(host: str) -> list[dict[str, Any]]:
    """What the host has, the newest last."""
    text = on(host, "for f in $(ls -tr /opt/vllm/releases/*/release.json); do cat $f; echo; echo ,; done")
    found: list[dict[str, Any]] = json.loads(f"[{text.strip().rstrip(',')}]")
    return found


def builds(host: str, build_id: str) -> int:
    """How often the host built the source, by its log."""
    return int(on(host, f"grep -c '/uv build ' /var/lib/vllm-fleet/builds/{build_id}/build.log || true"))


@pytest.fixture(scope="module", autouse=True)
def bare_hosts() -> Iterator[None]:
    with bare_sandbox("--hosts", str(len(HOSTS))):
        yield


def test_a_builder_without_a_gpu_builds_and_the_others_wait(tmp_path: Path) -> None:
    builder = HOSTS[0]
    on(builder, f"umount /usr/bin/nvidia-smi /usr/lib/{os.uname().machine}-linux-gnu/libcuda.so.1")
    groups = tmp_path / "builder.yml"
    groups.write_text(json.dumps({"builder": {"hosts": {builder: {}}}}))
    inventories = ("-i", "inventory/sandbox.py", "-i", str(groups))
    done = runner("converge", "--json", *inventories, *asked())
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = {host: records(host)[-1] for host in HOSTS}
    [build_id] = {record["build_id"] for record in found.values()}
    assert [builds(host, build_id) for host in HOSTS] == [1, 0, 0]
    assert [found[host]["store"]["state"] for host in HOSTS] == ["published", "fetched", "fetched"]
    assert {record["store"]["built_by"] for record in found.values()} == {builder}
    listings = {on(host, f"ls /opt/vllm/releases/{build_id}/lib/python3*/site-packages") for host in HOSTS}
    assert len(listings) == 1


def test_a_host_installs_where_there_is_no_index() -> None:
    host = HOSTS[1]
    build_id = records(host)[-1]["build_id"]
    # One release stays, so that preflight has no index to ask for.
    on(host, f"cp -r /opt/vllm/releases/{build_id} /opt/vllm/releases/kept; rm -r /opt/vllm/releases/{build_id}")
    on(
        host,
        "cp /etc/pip.conf /root/pip.conf; printf '[global]\\nindex-url = http://127.0.0.1:9/simple\\n' >/etc/pip.conf",
    )
    done = runner("converge", "--json", "--limit", host, *asked())
    on(host, "mv /root/pip.conf /etc/pip.conf; rm -r /opt/vllm/releases/kept")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [record] = records(host)
    assert (record["build_id"], record["store"]["state"]) == (build_id, "fetched")


def test_of_hosts_that_race_one_dies_building_and_another_builds() -> None:
    words = [*asked(environment={"MAX_JOBS": "1"}), "-e", "vllm_source_build_lock_seconds=10"]
    # The first host has lost its GPU above.
    words += ["-e", "preflight_capability=7.5"]
    argv = [sys.executable, "-m", "fleet", "converge", "--json", *words]
    with subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        victim = ""
        while not victim:
            assert process.poll() is None, process.communicate()[0][-3000:]
            time.sleep(0.2)
            victim = holder()
        on(victim, "systemctl kill -s KILL 'vllm-build-*'")
        said = process.communicate()[0]
    assert process.returncode == 1, said[-3000:]
    left = [host for host in HOSTS if host != victim]
    found = {host: records(host)[-1] for host in left}
    [build_id] = {record["build_id"] for record in found.values()}
    assert sorted(builds(host, build_id) for host in left) == [0, 1], said[-3000:]
    assert sorted(record["store"]["state"] for record in found.values()) == ["fetched", "published"]


def holder() -> str:
    """The host that has begun to compile, by the one lock that is held; empty where none has."""
    up = world.read()
    assert up is not None
    s3 = boto3.Session("testing", "testing", region_name=REGION).client("s3", endpoint_url=up.aws_url)
    for entry in s3.list_objects_v2(Bucket="vllm-fleet").get("Contents", []):
        if entry["Key"].endswith("/lock.json"):
            lock = json.loads(s3.get_object(Bucket="vllm-fleet", Key=entry["Key"])["Body"].read())
            if lock["state"] == "building" and lock["progress"].get("stage") == "build_wheel":
                return str(lock["owner"]["host"])
    return ""
