"""The fetcher takes what a secret may hold, refuses what it may not, and never says a value."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

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


PROGRAM = PROJECT / "roles/secrets_fetch/files/fetch_secret.py"
ROLE = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


def fetch(
    endpoint: str,
    folder: Path,
    command: tuple[str, ...] = (sys.executable,),
    environment: dict[str, str] | None = None,
    **asked: str,
) -> subprocess.CompletedProcess[str]:
    """Runs the fetcher as its unit does."""
    request = folder / "request.json"
    request.write_text(json.dumps({**ASKED, **asked, "folder": str(folder), "file": "hf_token"}))
    return subprocess.run(
        [*command, str(PROGRAM), str(request)],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "AWS_ENDPOINT_URL_SECRETS_MANAGER": endpoint,
            **(ROLE if environment is None else environment),
        },
        capture_output=True,
        text=True,
        check=False,
    )


def client(endpoint: str) -> Any:
    return boto3.client(
        "secretsmanager",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
    )


def put(endpoint: str, name: str, **value: str | bytes) -> None:
    client(endpoint).create_secret(Name=name, **value)


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


# Everything that someone looking for a fault may have switched on (CASES F22), before the program's first line.
SWITCHES = """
import http.client, logging, boto3, botocore.session
http.client.HTTPConnection.debuglevel = 1
logging.basicConfig(level=logging.DEBUG)
boto3.set_stream_logger("", logging.DEBUG)
boto3.set_stream_logger("botocore.parsers", logging.DEBUG)
boto3.set_stream_logger("botocore.endpoint", logging.DEBUG)
logging.getLogger("botocore.parsers").setLevel(logging.DEBUG)
"""


@pytest.mark.parametrize(
    "command", [(sys.executable,), (sys.executable, "-v"), ("bash", "-xc", 'exec "$0" "$@"', sys.executable)]
)
def test_no_debug_switch_prints_the_value(endpoint: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    name = f"debug-{len(command)}-{command[0][-4:]}"
    put(endpoint, name, SecretString=json.dumps({"HF_TOKEN": "hf_leak_me"}))
    (tmp_path / "sitecustomize.py").write_text(SWITCHES)
    switches = {"AWS_DEBUG": "1", "BOTO_DEBUG": "1", "PYTHONVERBOSE": "1", "PYTHONDEVMODE": "1"}
    done = fetch(endpoint, tmp_path, command, {**ROLE, **switches, "PYTHONPATH": str(tmp_path)}, secret_id=name)
    assert done.returncode == 0, done.stderr[-2000:]
    # The switches are on: the reply's own headers are printed, its body is not.
    assert "reply:" in done.stdout
    assert "hf_leak_me" not in done.stdout + done.stderr
    assert (tmp_path / "hf_token").read_text() == "hf_leak_me"


def test_an_error_in_the_middle_prints_no_value(endpoint: str, tmp_path: Path) -> None:
    put(endpoint, "no-room", SecretString=json.dumps({"HF_TOKEN": "hf_leak_me"}))
    (tmp_path / ".hf_token.part").mkdir()
    done = fetch(endpoint, tmp_path, secret_id="no-room")
    assert done.returncode != 0
    assert "hf_leak_me" not in done.stdout + done.stderr
    assert "unexpected " in done.stderr


def test_a_rotated_value_replaces_the_file_and_its_version(endpoint: str, tmp_path: Path) -> None:
    put(endpoint, "rotated", SecretString=json.dumps({"HF_TOKEN": "hf_first"}))
    assert fetch(endpoint, tmp_path, secret_id="rotated").returncode == 0
    first = (tmp_path / "version").read_text()
    client(endpoint).put_secret_value(SecretId="rotated", SecretString=json.dumps({"HF_TOKEN": "hf_second"}))
    assert fetch(endpoint, tmp_path, secret_id="rotated").returncode == 0
    assert (tmp_path / "hf_token").read_text() == "hf_second"
    assert (tmp_path / "version").read_text() != first


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("AccessDeniedException", "is denied to this instance's role (AccessDeniedException)"),
        ("UnrecognizedClientException", "is denied to this instance's role (UnrecognizedClientException)"),
        ("InternalServiceError", "Secrets Manager answered InternalServiceError"),
    ],
)
def test_a_refusal_is_told_in_the_house_form(tmp_path: Path, code: str, words: str) -> None:
    # The local AWS knows no policies, so this one answers as the service does: JSON with the exception's name.
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(400)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.end_headers()
            self.wfile.write(json.dumps({"__type": code, "Message": "no"}).encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        done = fetch(f"http://127.0.0.1:{server.server_address[1]}", tmp_path)
        server.shutdown()
    assert done.returncode == 1
    assert words in done.stderr
    assert done.stderr.startswith("secrets_fetch: ")
    assert "\n  where: " in done.stderr
    assert "\n  mend:  " in done.stderr


def test_a_host_without_a_role_is_told(endpoint: str, tmp_path: Path) -> None:
    done = fetch(endpoint, tmp_path, environment={"AWS_EC2_METADATA_DISABLED": "true"})
    assert done.returncode == 1
    assert done.stderr.startswith("secrets_fetch: no instance role gives credentials\n  where: ")
    assert "mend:  attach an instance profile" in done.stderr


def test_an_address_that_does_not_answer_is_said_within_bounds(tmp_path: Path) -> None:
    done = fetch("http://127.0.0.1:9", tmp_path)
    assert done.returncode == 1
    assert "did not answer" in done.stderr


def test_a_secret_without_a_key_is_the_token_itself() -> None:
    assert fetch_secret.value_of("hf_x", {**ASKED, "key": ""}) == "hf_x"
