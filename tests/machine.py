"""A sandbox from nothing, and the proof that nothing of it stays on the machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3

from fleet.paths import PROJECT
from sandbox import world
from sandbox.standins import aws


def runner(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as a person would."""
    return subprocess.run(
        [sys.executable, "-m", "fleet", *words], cwd=PROJECT, capture_output=True, text=True, check=False
    )


def put_secret(text: str) -> None:
    """Makes this the hosts' secret, in the local AWS that is up."""
    found = world.read()
    assert found is not None
    session = boto3.Session("testing", "testing", region_name=aws.REGION)
    client = session.client("secretsmanager", endpoint_url=found.aws_url)
    client.put_secret_value(SecretId=aws.SECRET_ID, SecretString=text)


@contextmanager
def bare_sandbox(*words: str) -> Iterator[None]:
    """Bare hosts inside, of `sandbox up` with these words, and afterwards the machine as it was before."""
    assert runner("sandbox", "down").returncode == 0
    before = _state()
    up = runner("sandbox", "up", *words)
    assert up.returncode == 0, up.stdout[-2000:] + up.stderr[-2000:]
    try:
        yield
    finally:
        down = runner("sandbox", "down")
    assert down.returncode == 0, down.stderr
    assert _state() == before


def _state() -> dict[str, Any]:
    """What a sandbox must leave as it was."""
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=False).stdout
    return {
        "swaps": Path("/proc/swaps").read_text(),
        "forward": Path("/proc/sys/net/ipv4/ip_forward").read_text(),
        "mounts": [m for m in Path("/proc/self/mounts").read_text().splitlines() if "vllm-fleet" in m],
        "handlers": sorted(path.name for path in Path("/proc/sys/fs/binfmt_misc").glob("*")),
        "rules": sorted(r for r in rules.splitlines() if r.startswith("-A") and "10.213.8." in r),
        "processes": [p for p in commands() if "sandbox.standins.server" in p or "sandbox.launched" in p],
    }


def commands() -> list[str]:
    """The command line of every process of the machine."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
