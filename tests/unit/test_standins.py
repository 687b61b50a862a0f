"""The stand-ins speak the real protocol where it matters."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ansible.module_utils import host_probe

from sandbox.standins import gpu, metadata


@pytest.fixture
def imds() -> Iterator[str]:
    server = metadata.serve("127.0.0.1", 0, lambda _: None)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_metadata_demands_a_token(imds: str) -> None:
    role = f"{imds}/latest/meta-data/iam/security-credentials/"
    assert httpx.get(role, trust_env=False).status_code == 401
    assert httpx.put(f"{imds}/latest/api/token", trust_env=False).status_code == 400
    token = httpx.put(
        f"{imds}/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"}, trust_env=False
    ).text
    headers = {"X-aws-ec2-metadata-token": token}
    assert httpx.get(role, headers=headers, trust_env=False).text == metadata.ROLE
    reply = httpx.get(f"{imds}/latest/meta-data/nothing", headers=headers, trust_env=False)
    assert reply.status_code == 404


def test_botocore_takes_the_role_from_it(imds: str) -> None:
    program = (
        "import boto3; c = boto3.Session(region_name='us-east-1').get_credentials(); print(c.method, c.access_key[:4])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"AWS_EC2_METADATA_SERVICE_ENDPOINT": imds, "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["iam-role", "ASIA"]


def test_the_gpu_answers_with_a_t4g_through_the_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gpu.build(tmp_path)
    ctypes.CDLL(str(made[gpu.LIBRARY]))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    host = host_probe.read_host([str(tmp_path)], [], "", tmp_path / "torch.json")
    # FACTS: capability 7.5, 15,360 MiB, 49,152 bytes static, 65,536 with opt-in, driver 595.71.05, CUDA 13.2.
    assert (host["driver"]["version"], host["driver"]["cuda"]) == ("595.71.05", "13.2")
    (card,) = host["gpus"]
    assert (card["capability"], card["memory_bytes"]) == ("7.5", 15360 * 1024 * 1024)
    assert card["shared_memory_per_block_bytes"] == 49152
    assert card["shared_memory_per_block_optin_bytes"] == 65536


def test_a_host_without_a_driver_library_says_so(tmp_path: Path) -> None:
    host = host_probe.read_host([str(tmp_path)], [], "", tmp_path / "torch.json")
    assert host["gpus"] == []
    assert "libcuda.so.1" in host["gpu_error"]
