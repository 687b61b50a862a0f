"""What is kept of a running sandbox."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fleet.errors import ExitCode, FleetError
from sandbox import world
from sandbox.host_variables import record_path

EARLIER = {
    "podman": "/p", "hosts": [{"name": "one", "address": "10.0.0.1"}], "aws_url": "a", "files_url": "f",
    "cuda_key_fingerprint": "k", "rust": None, "ip_forward_before": "0",
}  # fmt: skip


@pytest.fixture
def without_pages() -> Iterator[str]:
    """A server that knows no page, as one of an earlier version does not know the newer ones."""

    class Nothing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(404)

    with HTTPServer(("127.0.0.1", 0), Nothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("more", [{}, {"base_image": "image", "emulated": ["arm"]}])
def test_a_sandbox_of_an_earlier_version_is_still_known(more: dict[str, object]) -> None:
    record_path().parent.mkdir(parents=True)
    record_path().write_text(json.dumps({**EARLIER, **more}))
    found = world.read()
    assert found is not None
    assert found.hosts == (world.Host("one", "10.0.0.1"),)
    assert found.base_image == more.get("base_image")
    assert list(found.emulated) == more.get("emulated", [])


def test_no_record_is_no_sandbox() -> None:
    assert world.read() is None


def test_a_local_aws_that_takes_no_machine_is_told(without_pages: str) -> None:
    record_path().parent.mkdir(parents=True)
    record_path().write_text(json.dumps({**EARLIER, "aws_url": without_pages}))
    found = world.read()
    assert found is not None
    with pytest.raises(FleetError, match="an earlier version's or in trouble, takes no machine") as told:
        world._join_local_aws(found)
    assert (told.value.code, told.value.mend) == (ExitCode.REFUSED, "./runner.py sandbox down; then up again")
