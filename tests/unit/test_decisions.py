"""What a host needs, with the figures of FACTS and CASES."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.cubin import capability_of
from ansible.module_utils.host_decisions import MIB, Wishes, house_form, listed, make_plan, swap_need

GEMMA = 10_246_621_918


def memory(total_mib: int, *, mode: int = 0, swap_mib: int = 0, limit_mib: int = 0) -> dict[str, int]:
    return {
        "total_bytes": total_mib * MIB,
        "swap_total_bytes": swap_mib * MIB,
        "overcommit_memory": mode,
        "commit_limit_bytes": limit_mib * MIB,
        "own_swap_bytes": 0,
    }


def host(**changes: Any) -> dict[str, Any]:
    """A g5g.xlarge with the AMI's torch."""
    known = {
        "architecture": "aarch64",
        "os": {"id": "ubuntu", "version_id": "24.04", "codename": "noble"},
        "python": "3.12.3",
        "memory": memory(7680),
        "filesystems": {},
        "gpus": [
            {
                "name": "NVIDIA T4G",
                "capability": "7.5",
                "memory_bytes": 15360 * MIB,
                "shared_memory_per_block_bytes": 49152,
                "shared_memory_per_block_optin_bytes": 65536,
            }
        ],
        "gpu_error": "",
        "driver": {"version": "595.71.05", "cuda": "13.2"},
        "torch": {
            "prefix": "/opt/pytorch",
            "python": "/opt/pytorch/bin/python",
            "site_packages": "/opt/pytorch/lib/python3.12/site-packages",
            "version": "2.12.0+cu132",
            "cuda": "13.2",
            "arch_list": ["sm_75", "sm_80", "sm_90", "sm_100", "sm_110", "sm_120"],
        },
    }
    return {**known, **changes}


def model(**changes: Any) -> dict[str, Any]:
    known = {"path": "google/gemma-4-E2B-it", "exists": False, "config": False, "chat_template": False}
    return {**known, "model_type": "gemma4", "largest_bytes": GEMMA, "weights_bytes": GEMMA, **changes}


WISHES = Wishes(capabilities=("7.5", "8.0", "8.6", "8.9", "9.0"))


def test_turing_behind_arm_is_built_from_source_with_float16() -> None:
    plan = make_plan(host(), model(), WISHES)
    assert (plan.method, plan.dtype, plan.capability, plan.shared_memory_optin_bytes) == (
        "source",
        "float16",
        "7.5",
        65536,
    )
    assert plan.refusals == []


def test_turing_behind_x86_takes_the_published_wheel() -> None:
    plan = make_plan(host(architecture="x86_64"), model(), WISHES)
    assert plan.method == "wheel"


def test_a_small_host_needs_swap_for_the_checkpoint_and_a_large_one_none() -> None:
    # The cost analysis: 7.5 GiB usable fails with errno 12 at 10,246,621,918 bytes, 16 GiB needs no swap.
    mib, why, problem = swap_need(GEMMA, memory(7680), 0, 1024)
    assert mib * MIB + 7680 * MIB >= GEMMA
    assert mib == 3584
    assert "errno 12" in why
    assert problem == ""
    assert swap_need(GEMMA, memory(16000), 0, 1024)[0] == 0


def test_the_answer_is_the_same_once_our_own_swap_is_on() -> None:
    before = swap_need(GEMMA, memory(7680), 0, 1024)
    after = swap_need(GEMMA, memory(7680, swap_mib=before[0]), before[0] * MIB, 1024)
    assert after == before


def test_strict_overcommit_is_told_and_not_papered_over() -> None:
    mib, _, problem = swap_need(GEMMA, memory(32000, mode=2, limit_mib=8000), 0, 1024)
    assert mib == 0
    assert "the mode refuses it" in problem
    assert swap_need(GEMMA, memory(4000, mode=1), 0, 1024)[0] == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpus": [], "gpu_error": "cuInit answered 100"}, "no GPU answers"),
        ({"driver": {"version": "535.1", "cuda": "12.2"}}, "older than the CUDA 13.2"),
        ({"torch": {**host()["torch"], "arch_list": ["sm_80", "sm_90"]}}, "nothing for capability 7.5"),
        ({"torch": {**host()["torch"], "cuda": "", "version": "2.13.0+cpu"}}, "CPU build without CUDA"),
        ({"gpus": [{**host()["gpus"][0], "capability": "6.1"}]}, "6.1 has no plan"),
        ({"gpus": [{**host()["gpus"][0], "memory_bytes": 5722 * MIB}]}, "the model cannot fit"),
    ],
)
def test_what_cannot_work_is_refused_in_the_house_form(changes: dict[str, Any], words: str) -> None:
    plan = make_plan(host(**changes), model(), WISHES)
    text = house_form(plan.refusals, "one")
    assert words in text
    assert text.startswith("preflight: ")
    assert "\n  where: one " in text
    assert "\n  mend:  " in text


def test_a_folder_without_a_chat_template_is_refused() -> None:
    plan = make_plan(host(), model(path="/srv/m", exists=True, config=True), WISHES)
    assert any("no chat template" in refusal.what for refusal in plan.refusals)


def test_arch_lists_are_read_in_every_spelling() -> None:
    assert listed(["sm_75", "sm_90"], "7.5") == "sm_75"
    assert listed(["8.0", "9.0a"], "9.0") == "9.0a"
    assert listed(["8.0"], "8.6") == "8.0"
    assert listed(["8.6"], "8.0") == ""
    # CASES A17: the string 12.1 contains 2.1.
    assert listed(["2.1"], "12.1") == ""


def test_a_cubin_says_what_it_is_for() -> None:
    # FACTS: nvcc 13.2 writes ELF flags 0x6004b04 with CUDA ABI 8 for sm_75.
    header = bytearray(64)
    header[:4], header[8] = b"\x7fELF", 8
    header[18:20], header[48:52] = (190).to_bytes(2, "little"), (0x6004B04).to_bytes(4, "little")
    assert capability_of(bytes(header)) == "7.5"
    with pytest.raises(ValueError, match="not a cubin"):
        capability_of(bytes(64))
