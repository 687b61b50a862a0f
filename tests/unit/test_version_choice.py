"""The newest version that nothing known rules out, and the words for each that is ruled out (FACTS, field report)."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from ansible.module_utils.host_decisions import make_plan
from ansible.module_utils.host_plan import Plan, Wishes
from ansible.module_utils.version_choice import (
    Candidate,
    Facts,
    choose,
    grouped,
    is_prerelease,
    judgement,
    rejection,
    told,
    version_key,
)
from packaging.version import Version

from tests.unit.examples import WISHES, host, model, torch

# FACTS: what the index has; 0.27.2 and its candidate are tags only.
INDEX = ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
# The tags when the field report was written.
TAGS = ("0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.27.2rc0")
# The field report's host and model.
REPORT = Facts(
    "source", architecture="aarch64", capability="7.5", model_type="gemma4", mixed_heads=True, torch="2.12.0+cu132",
    gcc="13.3.0", python="3.12", unpublished=True,
)  # fmt: skip


def of(*versions: str) -> list[Candidate]:
    return [Candidate(version) for version in versions]


def rejected(versions: tuple[str, ...], facts: Facts, **more: bool) -> tuple[str, dict[str, str]]:
    """The choice, and the constraint that rules out each version."""
    found = choose(of(*versions), facts, **more)
    return found.version, {each.version: each.id for each in found.rejected}


def test_the_order_is_that_of_the_packaging_library() -> None:
    known = [
        "0.9.2", "0.27", "0.27.1.dev0", "0.27.1a1", "0.27.1rc1.dev0+g7f7a32cfe", "0.27.1rc1", "0.27.1", "0.27.1.post1",
        "0.27.2rc0", "0.27.2rc1.dev0+g7f7a32cfe", "0.27.2", "0.27.10", "1.0",
    ]  # fmt: skip
    assert sorted(known, key=Version) == known
    assert all(version_key(older) < version_key(newer) for older, newer in pairwise(known))
    assert version_key("0.32.0+cpu") == version_key("0.32")
    assert version_key("v0.27.2rc0") == version_key("0.27.2rc0")
    assert version_key("main") == ()
    assert [version for version in known if is_prerelease(version)] == [
        version for version in known if Version(version).is_prerelease
    ]


def test_the_newest_of_the_index_is_taken_for_gemma_4_on_torch_2_12() -> None:
    assert rejected(INDEX, REPORT) == ("0.33.0", {})


def test_the_field_reports_story() -> None:
    # It took 0.26.0 first, and only the newest tag worked.
    chosen, why = rejected(TAGS, REPORT)
    assert chosen == "0.27.2rc0"
    assert why == dict.fromkeys(("0.27.1", "0.27.0", "0.26.0", "0.25.1"), "mixed heads")
    words = {each.version: str(each) for each in choose(of(*TAGS), REPORT).rejected}
    assert words["0.27.1"].startswith("mixed heads: gemma4 has heads of several widths (field report")
    assert "AmbiguousGlobalPerLayerAttributeError" in words["0.27.1"]


def test_a_prerelease_is_taken_where_asked_for_or_where_nothing_else_is_left() -> None:
    versions = (*INDEX, "0.34.0rc1", "0.27.2rc0")
    assert rejected(versions, REPORT) == ("0.33.0", {"0.34.0rc1": "prerelease"})
    assert rejected(versions, REPORT, prereleases=True) == ("0.34.0rc1", {})
    # A prerelease that is ruled out anyway says why.
    assert rejected(("0.27.0", "0.27.1rc0"), replace(REPORT, mixed_heads=False, rust="1.90"))[1] == {
        "0.27.1rc0": "Rust", "0.27.0": "Rust",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "versions", "chosen", "why"),
    [
        # torch 2.7.0+cu128 of the older image: the extensions ask for libtorch's stable ABI of 2.11.
        ({"torch": "2.7.0+cu128"}, ("0.32.0", "0.33.0"), "", {"0.33.0": "torch", "0.32.0": "torch"}),
        ({"torch": "2.7.0+cu128", "target_device": "empty"}, ("0.33.0",), "0.33.0", {}),
        ({"torch": "2.11.0"}, ("0.33.0",), "0.33.0", {}),
        # CMakeLists.txt of all nine wants g++ 11.3; from 0.32 on 13 for units of 8.0 and newer.
        ({"gcc": "11.2.0"}, ("0.33.0",), "", {"0.33.0": "compiler"}),
        ({"gcc": "12.3.0"}, ("0.33.0",), "0.33.0", {}),
        ({"gcc": "12.3.0", "capability": "8.9"}, INDEX, "0.31.0", {"0.33.0": "compiler", "0.32.0": "compiler"}),
        ({"gcc": "13.1.0", "capability": "8.9"}, ("0.33.0",), "0.33.0", {}),
        ({"gcc": ""}, ("0.33.0",), "0.33.0", {}),
        ({"rust": "1.94.1"}, ("0.33.0",), "", {"0.33.0": "Rust"}),
        ({"rust": "1.95.0"}, ("0.33.0",), "0.33.0", {}),
        # The kernel patch is known from 0.26.0 on, below capability 8.0.
        ({"mixed_heads": False}, ("0.25.1", "0.9.2"), "", {"0.25.1": "kernel patch", "0.9.2": "kernel patch"}),
        ({"mixed_heads": False, "capability": "8.6"}, ("0.25.1",), "0.25.1", {}),
        # No published wheel for aarch64 holds 7.5; what comes after the newest that was looked at is not known.
        ({"method": "wheel"}, ("0.32.0", "0.33.0"), "", {"0.33.0": "published wheel", "0.32.0": "published wheel"}),
        ({"method": "wheel"}, ("0.33.0", "0.34.0"), "0.34.0", {}),
        ({"method": "wheel", "unpublished": False}, ("0.33.0",), "0.33.0", {}),
        # _FLOAT16_NOT_SUPPORTED_MODELS is the same in all nine sdists.
        ({"model_type": "gemma3", "mixed_heads": False, "float16": True}, ("0.26.0", "0.33.0"), "",
         {"0.33.0": "float16", "0.26.0": "float16"}),
        ({"model_type": "gemma4", "float16": True}, ("0.33.0",), "0.33.0", {}),
    ],
)  # fmt: skip
def test_each_constraint_rules_out_what_its_source_says(
    facts: dict[str, Any], versions: tuple[str, ...], chosen: str, why: dict[str, str]
) -> None:
    assert rejected(versions, replace(REPORT, **facts)) == (chosen, why)


def test_what_the_index_says_of_a_file_counts() -> None:
    found = choose(
        [
            Candidate("0.34.0", sdist=False),
            Candidate("0.33.0", requires_python=">=3.13"),
            Candidate("0.32.0", wheel=False),
        ],
        REPORT,
    )
    assert found.version == "0.32.0"
    assert [str(each) for each in found.rejected] == [
        "files: no sdist for this host is there (the package index)",
        "Python: Python is 3.12, and >=3.13 is wanted (Requires-Python on the index)",
    ]


def test_versions_with_the_same_reason_are_told_together() -> None:
    found = choose(of("0.26.0", "0.27.0", "0.27.1"), REPORT)
    assert found.version == ""
    assert grouped(found.rejected).startswith("0.27.1 to 0.26.0 (3 versions): mixed heads: gemma4 ")


@pytest.mark.parametrize(
    ("version", "on", "verdict"),
    [
        # FACTS: pins, and what the field report saw.
        ("0.27.2rc0", "2.12.0+cu132", "proven"), ("0.26.0", "2.12.0+cu132", "compiles"), ("0.33.0", "2.14.0", "proven"),
        ("0.32.0", "2.13.0", "proven"), ("0.26.0", "2.11.0", "proven"), ("0.33.0", "2.7.0+cu128", "refused"),
        ("0.31.0", "2.12.0", "unknown"), ("0.40.0", "2.12.0", "unknown"), ("main", "2.12.0", "unknown"),
        ("0.33.0", "2.12.0+cu132", "compiles"),
    ],
)  # fmt: skip
def test_what_is_known_of_a_pair_is_told(version: str, on: str, verdict: str) -> None:
    assert judgement(version, on).verdict == verdict
    assert told(version, on).startswith(f"{verdict}: vLLM {version} on torch {on}: ")


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "name": "vllm",
        "method": "auto",
        "distribution": "vllm",
        "version": "newest",
        "target_device": "cuda",
        **changes,
    }


def planned(wanted: dict[str, Any], versions: tuple[str, ...], silence: str = "", **changes: Any) -> Plan:
    wishes = replace(WISHES, releases=(wanted,), candidates={"vllm": (tuple(of(*versions)), silence)}, **changes)
    return plan_of(wishes)


def plan_of(wishes: Wishes, **on: Any) -> Plan:
    return make_plan(host(**on), model(), wishes)


def said(plan: Plan, topic: str) -> list[str]:
    return [f"{each['decision']}: {each['why']}" for each in plan.decisions if each["topic"] == topic]


def test_the_plan_says_what_was_chosen_and_what_ruled_each_newer_one_out() -> None:
    plan = planned(entry(), (*INDEX, "0.34.0", "0.35.0rc1"))
    assert plan.refusals == []
    assert plan.facts()["versions"] == {"vllm": "0.34.0"}
    assert said(plan, "version of vllm") == [
        "not 0.35.0rc1: prerelease: a prerelease, and a final version is left (prereleases of that entry is false)",
        "0.34.0: the newest of 11 from the index, vllm that nothing rules out; "
        "unproven: newer than 0.33.0, the newest that is known here",
    ]
    (pair,) = said(plan, "torch of vllm")
    assert pair.startswith("unknown: vLLM 0.34.0 on torch 2.12.0+cu132: nobody has shown this pair")


def test_a_refusal_lists_what_ruled_all_of_them_out() -> None:
    plan = planned(entry(), ("0.26.0", "0.27.0", "0.27.1"))
    (refusal,) = plan.refusals
    assert refusal.what.startswith(
        "no version of vllm is left of 3 from the index, vllm: 0.27.1 to 0.26.0 (3 versions): mixed heads: gemma4 has "
    )
    assert refusal.where == "vllm_source_build_releases: vllm"


def test_of_a_silent_index_the_choice_of_an_earlier_run_holds() -> None:
    plan = planned(entry(), (), "Connection refused", versions_before={"vllm": "0.33.0"})
    assert (plan.refusals, plan.versions) == ([], {"vllm": "0.33.0"})
    assert "does not answer now: Connection refused" in said(plan, "version of vllm")[0]
    (refusal,) = planned(entry(), (), "Connection refused").refusals
    assert refusal.what.endswith("cannot be read from the index, vllm: Connection refused")
    # The index's own refusal says it for all.
    (refusal,) = planned(entry(), (), "refused", index_silence=("http://index", "refused")).refusals
    assert "the package index http://index cannot be reached" in refusal.what


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ({"commit": "c" * 40, "repository": "https://git.example/vllm.git"}, "commit holds the release to one source"),
        ({"sha256": "00"}, "sha256 holds the release to one source"),
        ({"lock": "vllm-0.33.0.txt"}, "lock holds the release to one source"),
        ({"version": "0.33.9"}, "the package index has no sdist of vllm 0.33.9; it has 0.33.0"),
        ({"version": "0.30.5"}, "the package index has no sdist of vllm 0.30.5; it has 0.30.0, 0.31.0, 0.33.0"),
        ({"version": "0.34.0", "repository": "https://git.example/v"}, "/v has no tag of vllm 0.34.0; it has 0.33.0"),
        ({"version": "0.27.1"}, "vLLM 0.27.1 is asked for, and 0.27.2rc0 or newer is wanted: gemma4"),
        ({"version": "0.33.0"}, ""), ({"version": "0.33.0+cpu"}, ""), ({"version": "main"}, ""),
        ({"version": "0.34.0", "repository": "https://git.example/v", "tag": "nightly"}, ""),
    ],
)  # fmt: skip
def test_an_entry_that_cannot_be_met_is_refused_with_what_there_is(wanted: dict[str, Any], words: str) -> None:
    refusals = planned(entry(**wanted), INDEX).refusals
    assert len(refusals) == bool(words)
    assert words in "".join(refusal.what for refusal in refusals)


def test_a_pair_that_is_known_not_to_compile_is_refused() -> None:
    wishes = replace(WISHES, releases=(entry(version="0.33.0"),))
    old = torch(version="2.7.0+cu128", cuda="12.8", arch_list=["sm_75", "sm_90", "sm_100", "sm_120"])
    (refusal,) = plan_of(wishes, torch=old).refusals
    assert refusal.what.startswith(
        "vLLM 0.33.0 is asked for, and torch is 2.7.0+cu128: its extensions ask for libtorch"
    )


def test_a_version_of_no_number_is_not_judged() -> None:
    assert rejection("main", REPORT) is None
