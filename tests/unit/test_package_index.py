"""A silent index is told from one that answers, by the real pip against real sockets."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from ansible.module_utils.package_index import Answer, ask_index, ask_repository
from ansible.module_utils.version_choice import Candidate

from tests.unit.package_indexes import Index
from tests.unit.test_source_fetch import git


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
    answer = ask_index(sys.executable, "vllm")
    assert (answer.index, answer.candidates) == (f"http://{address}/simple", ())
    assert "Connection refused" in answer.error
    assert "hunter2" not in answer.error


def test_an_index_that_answers_without_the_package_is_no_silence(
    answering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", answering)
    assert ask_index(sys.executable, "vllm") == Answer()


def test_versions_yanked_files_kinds_and_the_python_that_they_want_are_read_as_pip_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index(tmp_path / "index", monkeypatch)
    index.add("vllm", "vllm-0.32.0.tar.gz", b"")
    index.add("vllm", "vllm-0.32.0-py3-none-any.whl", b"")
    index.add("vllm", "vllm-0.33.0.tar.gz", b"")
    # For another machine, an older Python's compiled code, and withdrawn.
    index.add("vllm", "vllm-0.33.0-cp38-abi3-manylinux_2_28_mips.whl", b"")
    page = index.folder / "simple" / "vllm" / "index.html"
    with page.open("a") as file:
        file.write('<a href="vllm-0.33.1.tar.gz" data-yanked="wrong pins">vllm-0.33.1.tar.gz</a>\n')
        file.write('<a href="vllm-0.34.0.tar.gz" data-requires-python="&gt;=3.99">vllm-0.34.0.tar.gz</a>\n')
        file.write('<a href="vllm-0.35.0rc1.tar.gz">vllm-0.35.0rc1.tar.gz</a>\n')
    found = {each.version: each for each in ask_index(sys.executable, "vllm").candidates}
    assert found == {
        "0.32.0": Candidate("0.32.0", wheel=True, sdist=True),
        "0.33.0": Candidate("0.33.0", wheel=False, sdist=True),
        "0.34.0": Candidate("0.34.0", wheel=False, sdist=True, requires_python=">=3.99"),
        "0.35.0rc1": Candidate("0.35.0rc1", wheel=False, sdist=True),
    }


def test_an_interpreter_without_pip_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no pip here >&2\nexit 1\n")
    python.chmod(0o755)
    assert ask_index(str(python), "vllm") == Answer(error=f"pip of {python}: no pip here")


def test_tags_that_are_versions_are_candidates_and_branches_are_none(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "up")
    repository = tmp_path / "up"
    git(repository, "commit", "-q", "--allow-empty", "-m", "one")
    for tag in ("v0.27.1", "v0.27.2rc0", "nightly", "0.1", "vendor"):
        git(repository, "tag", "-a", "-m", tag, tag)
    git(repository, "branch", "v0.99.0")
    assert sorted(each.version for each in ask_repository(f"file://{repository}").candidates) == ["0.27.1", "0.27.2rc0"]
    assert "does not appear to be a git repository" in ask_repository(f"file://{tmp_path}/none").error
