"""What is kept of a running sandbox."""

from __future__ import annotations

import json

import pytest

from sandbox import world
from sandbox.host_variables import record_path

EARLIER = {
    "podman": "/p", "hosts": [{"name": "one", "address": "10.0.0.1"}], "aws_url": "a", "files_url": "f",
    "cuda_key_fingerprint": "k", "rust": None, "ip_forward_before": "0",
}  # fmt: skip


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
