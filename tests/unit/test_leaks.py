"""The hunt finds what is planted, in whatever form and however packed, and nothing else."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, quote_plus, urlencode

import pytest

from bench.leaks.canaries import Canary, Hunter
from bench.leaks.places import Ground, all_places
from bench.leaks.sampler import Sampler

# All that a form could change: quotes, a backslash, a line's end, +, /, =, %, a letter that is no ASCII.
VALUE = "K+/=\"'\\$&%\n é" + "q7Zt0Wm4Xv2Rb9Ld"
HUNTER = Hunter([Canary("it", VALUE)])


def zipped(data: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inside", data)
    return file.getvalue()


def tarred(data: bytes) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("inside")
        member.size = len(data)
        archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


@pytest.mark.parametrize(
    "given",
    [
        lambda v: v.encode(),
        lambda v: json.dumps({"a": v}).encode(),
        lambda v: json.dumps({"line": json.dumps({"a": v})}).encode(),
        lambda v: quote(v, safe="").encode(),
        lambda v: f"https://x/{quote(v)}".encode(),
        lambda v: urlencode({"t": v}).encode(),
        lambda v: quote_plus(v).encode(),
        lambda v: v.encode().hex().encode(),
        *(lambda v, n=n: base64.b64encode(b"p" * n + v.encode() + b"s" * 5) for n in range(6)),
        *(lambda v, n=n: base64.urlsafe_b64encode(b"p" * n + v.encode()) for n in range(3)),
        lambda v: gzip.compress(v.encode()),
        lambda v: gzip.compress(tarred(zipped(json.dumps(v).encode()))),
    ],
)
def test_every_form_is_found(given: Callable[[str], bytes]) -> None:
    data = given(VALUE)
    assert {hit.canary for hit in HUNTER.hits(b"before " * (data[:2] not in (b"\x1f\x8b", b"PK")) + data, "x")} == {
        "it"
    }
    assert HUNTER.hits(given(VALUE[:-3] + "..."), "x") == []


def test_what_is_cut_off_is_looked_at_as_it_is() -> None:
    whole = gzip.compress(os.urandom(4000) + VALUE.encode())
    assert HUNTER.hits(whole[:2000], "x") == []
    assert "x (unpacked)" in [hit.where for hit in HUNTER.hits(whole, "x")]


def test_processes_are_seen_while_they_live_and_what_was_planted_is_left_out() -> None:
    token = "hf_" + "v" * 34
    hunter = Hunter([Canary("token", token)])
    with Sampler(hunter, lambda _kind, data: b"PLANTED=1" in data) as sampler:
        for argv, more in (
            ([sys.executable, "-c", "import time; time.sleep(1)", token], {}),
            ([sys.executable, "-c", "import time; time.sleep(1)"], {"HF_TOKEN": token}),
            ([sys.executable, "-c", "import time; time.sleep(1)"], {"HF_TOKEN": token, "PLANTED": "1"}),
        ):
            subprocess.run(argv, env={**os.environ, **more}, check=True)
    kinds = sorted(hit.where.rpartition(" ")[2] for hit in sampler.hits)
    assert kinds == ["arguments", "environment"]


@pytest.mark.parametrize(
    "name",
    [
        "what commands say",
        "the runner's logs and directories",
        "other files of the controller, Ansible's caches among them",
        "arguments of processes",
        "environments of processes",
    ],
)
def test_what_is_planted_in_a_place_is_found_while_it_is_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (Path(os.environ["XDG_STATE_HOME"]) / "vllm-fleet" / "logs").mkdir(parents=True)
    place = next(place for place in all_places() if place.name == name)
    token = "hf_" + os.urandom(17).hex()
    hunter, ground = Hunter([Canary("token", token)]), Ground(since=time.time() - 1, containers=())
    assert place.look(hunter, ground)[0] == []
    with place.plant(token, ground):
        assert place.look(hunter, ground)[0]
    assert place.look(hunter, ground)[0] == []
