"""A silent index is told from one that answers, by the real pip against real sockets."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from ansible.module_utils.package_index import silence


class Empty(BaseHTTPRequestHandler):
    """An index that answers and has nothing."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing on standard error."""


@pytest.fixture
def answering() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/simple"
    server.shutdown()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def closed() -> str:
    """An address at which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listener.getsockname()[1]}"


def test_a_closed_port_is_silence_and_no_password_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    address = closed()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://user:hunter2@{address}/simple")
    index, why = silence(sys.executable, "vllm")
    assert index == f"http://{address}/simple"
    assert "Connection refused" in why
    assert "hunter2" not in why


def test_an_index_that_answers_without_the_package_is_no_silence(
    answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", answering)
    assert silence(sys.executable, "vllm") == ("", "")
