"""What a host needs, with the figures of FACTS and CASES."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible.module_utils.cubin import capability_of
from ansible.module_utils.host_decisions import make_plan
from ansible.module_utils.host_plan import MIB
from ansible.module_utils.host_record import differences, stable
from ansible.module_utils.published_builds import listed
from ansible.module_utils.refusals import house_form

from tests.unit.examples import GEMMA, WISHES, driver, filesystem, gpu, host, memory, model, torch


def words(plan: Any) -> str:
    """All decisions of a plan as one text."""
    return "\n".join(f"{d['topic']}: {d['decision']} - {d['why']}" for d in plan.decisions)


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
    assert make_plan(host(architecture="x86_64"), model(), WISHES).method == "wheel"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gpus": [], "gpu_error": "cuInit answered 100"}, "no GPU answers"),
        ({"driver": driver(version="535.1", cuda="12.2")}, "older than the CUDA 13.2"),
        ({"torch": torch(arch_list=["sm_80", "sm_90"])}, "nothing for capability 7.5"),
        ({"torch": torch(cuda="", version="2.13.0+cpu")}, "CPU build without CUDA"),
        ({"torch": torch(error="no module named numpy")}, "cannot be imported: no module named numpy"),
        ({"gpus": [gpu(capability="6.1")]}, "6.1 has no plan; planned are 7.5 8.0 8.6 8.9 9.0"),
        ({"gpus": [gpu(memory_bytes=5722 * MIB)]}, "the model cannot fit"),
        ({"architecture": "ppc64le"}, "architecture ppc64le has no plan"),
    ],
)
def test_what_cannot_work_is_refused_in_the_house_form(changes: dict[str, Any], expected: str) -> None:
    plan = make_plan(host(**changes), model(), WISHES)
    text = house_form(plan.refusals, "one")
    assert expected in text
    assert text.startswith("preflight: ")
    assert "\n  where: one " in text
    assert "\n  mend:  " in text


@pytest.mark.parametrize("asked", ["seven", "7,5", "75", ""])
def test_a_capability_that_is_none_has_no_plan(asked: str) -> None:
    plan = make_plan(host(gpus=[]), model(), replace(WISHES, capability=asked))
    assert plan.refusals[0].what.startswith(f"capability {asked or 'of no name'} has no plan")
    assert plan.refusals[0].where == "preflight_capability"


def test_a_negative_margin_is_refused() -> None:
    plan = make_plan(host(), model(), replace(WISHES, swap_margin_mib=-5))
    assert [refusal.where for refusal in plan.refusals] == ["preflight_swap_margin_mib"]


def test_a_builder_without_a_gpu_is_told_its_capability_and_needs_no_driver() -> None:
    bare = host(gpus=[], driver=driver(version="", module="", library="", cuda="", without_module=["6.14.0-1018-aws"]))
    plan = make_plan(bare, model(), replace(WISHES, capability="7.5"))
    assert plan.refusals == []
    assert plan.method == "source"


def test_arch_lists_are_read_in_every_spelling() -> None:
    assert listed(["sm_75", "sm_90"], "7.5") == "sm_75"
    assert listed(["8.0", "9.0a"], "9.0") == "9.0a"
    assert listed(["8.0"], "8.6") == "8.0"
    assert listed(["8.6"], "8.0") == ""
    # CASES A17: the string 12.1 contains 2.1.
    assert listed(["2.1"], "12.1") == ""


WRITES = (
    {"path": "/opt/releases", "wheel_mib": 10240, "source_mib": 20480, "inodes": 200_000, "exec": True},
    {"path": "/data/builds", "wheel_mib": 0, "source_mib": 10240, "inodes": 100_000},
    {"path": "/data/models", "wheel_mib": 0, "source_mib": 0, "inodes": 0, "model": True},
)


def disks(root: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """A root disk, and a data disk that two of the paths share."""
    return {"/opt/releases": root, "/data/builds": data, "/data/models": data}


@pytest.mark.parametrize(
    ("root", "data", "expected"),
    [
        ({"free_bytes": 20479 * MIB}, {}, "20,479 MiB free where 20,480 are wanted"),
        ({"free_inodes": 199_999}, {}, "199,999 inodes free where 200,000 are wanted"),
        # The build's 10,240 MiB and the model's 9,771 share a disk.
        ({}, {"free_bytes": 20_000 * MIB}, "20,000 MiB free where 20,011 are wanted"),
        ({"noexec": True}, {}, "/opt/releases is mounted noexec"),
    ],
)
def test_room_is_counted_for_each_file_system(root: dict[str, Any], data: dict[str, Any], expected: str) -> None:
    asked = replace(WISHES, writes=WRITES)
    found = disks(filesystem(**root), filesystem(id=2, device="/dev/data", mount="/data", **data))
    plan = make_plan(host(filesystems=found), model(), asked)
    assert [expected in refusal.what for refusal in plan.refusals] == [True]
    roomy = disks(filesystem(), filesystem(id=2))
    assert make_plan(host(filesystems=roomy), model(), asked).refusals == []


def test_a_local_model_wants_no_room_and_a_release_in_place_had_its_own() -> None:
    asked = replace(WISHES, writes=WRITES)
    tight = disks(filesystem(), filesystem(id=2, free_bytes=10_240 * MIB))
    assert make_plan(host(filesystems=tight), model(local=True, name="/srv/m"), asked).refusals == []
    plan = make_plan(host(filesystems=tight), model(), replace(asked, disk_enforced=False))
    assert plan.refusals == []
    assert "short, a release is already in place" in words(plan)


def test_swap_that_is_still_to_be_made_wants_room_and_none_once_it_is_there() -> None:
    asked = replace(WISHES, swapfile_path="/var/swapfile")
    found = {"/var/swapfile": filesystem(free_bytes=3583 * MIB)}
    plan = make_plan(host(filesystems=found), model(), asked)
    assert "3,583 MiB free where 3,584 are wanted" in plan.refusals[0].what
    made = host(filesystems=found, memory=memory(7680, swap_mib=3584, swapfile_mib=3584))
    assert make_plan(made, model(), asked).refusals == []


def test_temporary_files_that_cannot_run_are_noted() -> None:
    found = host(temporary={"path": "/tmp", **filesystem(noexec=True, mount="/tmp")})
    plan = make_plan(found, model(), WISHES)
    assert plan.refusals == []
    assert "nothing runs from /tmp" in words(plan)
    assert "nothing runs" not in words(make_plan(host(), model(), WISHES))


def test_a_record_names_what_changed_under_the_host() -> None:
    # CASES G14: AMI, driver, CUDA, Python and torch; what moves by itself is no difference.
    before = make_plan(host(), model(), WISHES)
    after = host(
        ami="ami-1", python="3.12.9", driver=driver(version="600.1", cuda="13.4"), torch=torch(version="2.14.0"),
        memory=memory(7680, swap_mib=3584, swapfile_mib=3584), temporary={"path": "/tmp", **filesystem(free_bytes=1)},
    )  # fmt: skip
    now = make_plan(after, model(), WISHES)
    assert differences(stable(host(), model(), before.facts()), stable(after, model(), now.facts())) == [
        "host.ami: ami-0123456789abcdef0 -> ami-1",
        "host.driver.cuda: 13.2 -> 13.4",
        "host.driver.version: 595.71.05 -> 600.1",
        "host.python: 3.12.3 -> 3.12.9",
        "host.torch.version: 2.12.0+cu132 -> 2.14.0",
    ]


def test_a_cubin_says_what_it_is_for() -> None:
    # FACTS: nvcc 13.2 writes ELF flags 0x6004b04 with CUDA ABI 8 for sm_75.
    header = bytearray(64)
    header[:4], header[8] = b"\x7fELF", 8
    header[18:20], header[48:52] = (190).to_bytes(2, "little"), (0x6004B04).to_bytes(4, "little")
    assert capability_of(bytes(header)) == "7.5"
    with pytest.raises(ValueError, match="not a cubin"):
        capability_of(bytes(64))


def test_gemmas_figure_is_nobody_elses() -> None:
    plan = make_plan(host(), model(name="other/model", largest_bytes=0, weights_bytes=0, source=""), WISHES)
    assert plan.swap_mib == 0
    assert f"{GEMMA:,}" not in words(plan)
    assert "the size of other/model is not known, and nothing is decided from that" in words(plan)
