"""The fetcher takes what a secret may hold, refuses what it may not, and never says a value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import fetch_secret
import pytest
from moto.server import ThreadedMotoServer

from fleet.paths import PROJECT

ASKED = {"secret_id": "s", "key": "HF_TOKEN", "region": "us-east-1"}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def fetch(endpoint: str, folder: Path, **asked: str) -> subprocess.CompletedProcess[str]:
    """Runs the fetcher as its unit does."""
    request = folder / "request.json"
    request.write_text(json.dumps({**ASKED, **asked, "folder": str(folder), "file": "hf_token"}))
    return subprocess.run(
        [sys.executable, str(PROJECT / "roles/secrets_fetch/files/fetch_secret.py"), str(request)],
        env={
            "PATH": os.environ["PATH"],
            "AWS_ENDPOINT_URL_SECRETS_MANAGER": endpoint,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEBUG": "1",
            "PYTHONDEVMODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )


def put(endpoint: str, name: str, **value: str | bytes) -> None:
    client = boto3.client(
        "secretsmanager",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )
    client.create_secret(Name=name, **value)


@pytest.mark.parametrize("value", ["hf_plain", 'a=b$c"d#e f', "$(id)", "%d %n", "\u00e4\u00f6"])
def test_values_arrive_as_they_are(endpoint: str, tmp_path: Path, value: str) -> None:
    name = f"ok-{abs(hash(value))}"
    put(endpoint, name, SecretString=json.dumps({"HF_TOKEN": value}))
    done = fetch(endpoint, tmp_path, secret_id=name)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hf_token").read_text() == value
    assert (tmp_path / "hf_token").stat().st_mode & 0o777 == 0o400
    assert value not in done.stdout + done.stderr
    assert (tmp_path / "version").read_text()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"SecretString": "no json hf_leak"}, "is no JSON"),
        ({"SecretString": '{"OTHER": "hf_leak"}'}, "holds nothing under HF_TOKEN"),
        ({"SecretString": '{"HF_TOKEN": ""}'}, "holds nothing under HF_TOKEN"),
        ({"SecretString": '{"HF_TOKEN": "hf_leak\\n"}'}, "control character or line break"),
        ({"SecretBinary": b"hf_leak"}, "is binary"),
        (None, "is not there"),
    ],
)
def test_what_is_no_token_has_its_own_error_and_leaves_the_file(
    endpoint: str, tmp_path: Path, value: dict[str, str | bytes] | None, words: str
) -> None:
    name = f"bad-{abs(hash(words + str(value)))}"
    if value is not None:
        put(endpoint, name, **value)
    (tmp_path / "hf_token").write_text("earlier")
    done = fetch(endpoint, tmp_path, secret_id=name)
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.startswith("secrets_fetch: ")
    assert "\n  where: " in done.stderr
    assert "\n  mend:  " in done.stderr
    assert "hf_leak" not in done.stdout + done.stderr
    assert (tmp_path / "hf_token").read_text() == "earlier"


def test_an_address_that_does_not_answer_is_said_within_bounds(tmp_path: Path) -> None:
    done = fetch("http://127.0.0.1:9", tmp_path)
    assert done.returncode == 1
    assert "did not answer" in done.stderr


def test_a_secret_without_a_key_is_the_token_itself() -> None:
    assert fetch_secret.value_of("hf_x", {**ASKED, "key": ""}) == "hf_x"
