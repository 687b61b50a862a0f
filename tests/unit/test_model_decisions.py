"""What is decided from a model's shape and size, with the figures of FACTS and CASES."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from ansible.module_utils.host_decisions import make_plan
from ansible.module_utils.host_plan import MIB, Plan, Wishes
from ansible.module_utils.model_decisions import swap_need

from tests.unit.examples import GEMMA, WISHES, gpu, host, memory, model

AMPERE = {"gpus": [gpu(capability="8.6", shared_memory_per_block_optin_bytes=101_376, memory_bytes=24_000 * MIB)]}


def planned(
    on: dict[str, Any] | None = None, of: dict[str, Any] | None = None, wishes: Wishes = WISHES, arguments: str = ""
) -> Plan:
    """The plan of a changed host for a changed model."""
    return make_plan(host(**(on or {})), model(**(of or {})), replace(wishes, arguments=tuple(arguments.split())))


def releases(*versions: str) -> tuple[dict[str, Any], ...]:
    """Entries that ask for these versions."""
    return tuple({"name": f"r{number}", "distribution": "vllm", "version": version, "target_device": "cuda"}
                 for number, version in enumerate(versions))  # fmt: skip


def reasons(plan: Plan) -> str:
    """Everything that stands against the host."""
    return "\n".join(refusal.what for refusal in plan.refusals)


def said(plan: Plan, topic: str) -> list[str]:
    """The decisions of a topic with their reasons."""
    return [f"{d['decision']}: {d['why']}" for d in plan.decisions if d["topic"] == topic]


def test_a_small_host_needs_swap_for_the_checkpoint_and_a_large_one_none() -> None:
    # The cost analysis: 7.5 GiB usable fails with errno 12 at 10,246,621,918 bytes, 16 GiB needs no swap.
    mib, why, problem = swap_need(GEMMA, memory(7680), 0, 1024)
    assert mib * MIB + 7680 * MIB >= GEMMA
    assert mib == 3584
    assert "errno 12" in why
    assert problem == ""
    assert swap_need(GEMMA, memory(16000), 0, 1024)[0] == 0


def test_the_answer_is_the_same_once_our_own_swap_is_on_and_the_server_is_up() -> None:
    before = planned()
    # Nothing that a running server changes is asked for at all; a foreign swap device counts, our own file does not.
    after = planned({"memory": memory(7680, swap_mib=3584, swapfile_mib=3584)})
    assert before.swap_mib == after.swap_mib == 3584
    assert planned({"memory": memory(7680, swap_mib=4096)}).swap_mib == 0


def test_strict_overcommit_is_told_and_not_papered_over() -> None:
    mib, _, problem = swap_need(GEMMA, memory(32000, mode=2, limit_mib=8000), 0, 1024)
    assert mib == 0
    assert "the mode refuses it" in problem
    assert swap_need(GEMMA, memory(4000, mode=1), 0, 1024)[0] == 0


def test_where_the_size_is_not_known_the_swap_that_is_there_stays() -> None:
    unknown = {"largest_bytes": 0, "weights_bytes": 0, "source": ""}
    assert planned({"memory": memory(7680, swap_mib=4096, swapfile_mib=4096)}, unknown).swap_mib == 4096
    assert planned(None, unknown).swap_mib == 0


@pytest.mark.parametrize(
    ("status", "token", "file", "expected"),
    [
        # CASES B13: 401 is no or a bad token, 403 a good one without access.
        (401, False, "", "gated, private or misspelled, and no token is sent"),
        (401, True, "/run/t", "the hub does not take the token"),
        (403, True, "/run/t", "the caller is known, and access to google/gemma-4-E2B-it is not granted"),
        (404, True, "/run/t", "no model google/gemma-4-E2B-it is there"),
        (401, False, "/run/t", ""),
        (0, False, "", ""),
        (503, True, "/run/t", ""),
    ],
)
def test_what_a_hub_refuses_is_told_apart(status: int, token: bool, file: str, expected: str) -> None:
    silent = {"status": status, "words": f"https://hub answers {status}", "token": token}
    unknown = {"silence": silent, "exists": False, "config": False, "chat_template": None, "largest_bytes": 0,
               "weights_bytes": 0, "attention": [], "model_type": ""}  # fmt: skip
    plan = planned(None, unknown, replace(WISHES, token_file=file))
    assert len(plan.refusals) == bool(expected)
    assert expected in reasons(plan)
    if not expected:
        assert ("none is in /run/t yet" if status == 401 else "nothing is decided") in said(plan, "hub")[0]


@pytest.mark.parametrize(
    ("attention", "arguments", "fits"),
    [
        # FACTS: head 512 with 32 query heads to a KV head asks for 98,304 with the tile at 16; with 8 for 65,536.
        ([[512, 32, 1, 0]], "", False),
        ([[512, 17, 1, 0]], "", False),
        ([[512, 16, 1, 0]], "", True),
        ([[512, 8, 1, 0], [256, 8, 1, 512]], "", True),
        ([[512, 64, 8, 0]], "", True),
        ([[256, 32, 1, 0]], "", True),
        # On two GPUs each has the KV head and half of what shares it.
        ([[512, 32, 1, 0]], "--tensor-parallel-size 2", True),
        # Nothing was said of these, so only the compiler judges them.
        ([[512, 33, 1, 0]], "", True),
        ([[512, 32, 1, 0]], "--dtype float", True),
        ([[128, 128, 1, 0]], "", True),
        ([], "", True),
    ],
)
def test_heads_whose_kernel_cannot_fit_are_refused_before_a_build(
    attention: list[list[int]], arguments: str, fits: bool
) -> None:
    plan = planned(None, {"attention": attention}, arguments=arguments)
    assert ("98,304 bytes of shared memory" not in reasons(plan)) is fits
    assert [refusal for refusal in plan.refusals if "KV head" in refusal.what] == plan.refusals[: not fits]
    assert planned(AMPERE, {"attention": attention}, arguments=arguments).refusals == []


def test_the_refusal_says_what_would_fit() -> None:
    (refusal,) = planned(None, {"attention": [[512, 32, 1, 0], [512, 32, 1, 512], [256, 8, 1, 0]]}).refusals
    assert refusal.what == (
        "32 query heads share a KV head 512 wide: the attention kernel asks for at least 98,304 bytes of shared "
        "memory in float16, and the GPU has 65,536; up to 16 fit at this width, and from capability 8.0 on that limit "
        "is gone, with at least 101,376 bytes"
    )
    small = {"gpus": [gpu(shared_memory_per_block_optin_bytes=49_151)]}
    assert "; none fit at this width" in reasons(planned(small, {"attention": [[512, 8, 1, 0]]}))


@pytest.mark.parametrize(
    ("capability", "attention", "dtype", "expected"),
    [
        ("7.5", [[256, 8, 1, 512], [512, 8, 1, 0]], "float16",
         "can fit: least shared memory in float16, bytes: 32,768 for 256 wide with 8 query heads to a KV head, 49,152 "
         "for 512 wide with 8 query heads to a KV head; the GPU has 65,536; the compiler decides after the build"),
        ("7.5", [[256, 8, 4, 0], [256, 8, 4, 4096]], "float32",
         "can fit: least shared memory in float32, bytes: 49,152 for 256 wide with 2 query heads to a KV head; the"),
        ("7.5", [[1024, 8, 1, 0], [256, 8, 1, 0]], "float16",
         "not known yet: nothing is known of heads 1024 wide with 8 query heads to a KV head in float16 at capability "
         "7.5; the compiler decides after the build"),
        # Nobody compiled for these.
        ("7.0", [[512, 32, 1, 0]], "float16", "not known yet: nothing is known of heads 512 wide with 32"),
        ("6.1", [[512, 32, 1, 0]], "float16", "at capability 6.1; the compiler decides after the build"),
        ("7.5", [], "float16", "the attention of google/gemma-4-E2B-it is not known; the compiler decides after"),
    ],
)  # fmt: skip
def test_what_is_known_of_the_kernels_before_a_build_is_said(
    capability: str, attention: list[list[int]], dtype: str, expected: str
) -> None:
    wishes = replace(WISHES, capabilities=(capability,))
    plan = planned({"gpus": [gpu(capability=capability)]}, {"attention": attention}, wishes, f"--dtype {dtype}")
    assert not any("query heads" in refusal.what for refusal in plan.refusals)
    assert expected in "".join(said(plan, "kernels"))
    assert said(planned(AMPERE, {"attention": attention}), "kernels") == []


@pytest.mark.parametrize(
    ("on", "of", "arguments", "dtype"),
    [
        ({}, {}, "", "float16"),
        ({}, {"model_type": "gemma3"}, "", "float32"),
        ({}, {}, "--dtype float32", "float32"),
        ({}, {}, "--dtype auto", "float16"),
        (AMPERE, {}, "", "bfloat16"),
        (AMPERE, {}, "--dtype=half", "float16"),
        (AMPERE, {"weights_dtype": "float16"}, "", "float16"),
        # vLLM computes these in bfloat16, too.
        (AMPERE, {"weights_dtype": "float16", "model_type": "gemma3"}, "", "bfloat16"),
        (AMPERE, {"weights_dtype": "float32"}, "", "bfloat16"),
        (AMPERE, {"weights_dtype": ""}, "", "bfloat16"),
    ],
)
def test_the_plan_carries_the_attention(on: dict[str, Any], of: dict[str, Any], arguments: str, dtype: str) -> None:
    layers = [{"head_size": 512, "heads": 8, "kv_heads": 1, "sliding_window": 0},
              {"head_size": 256, "heads": 8, "kv_heads": 1, "sliding_window": 512}]  # fmt: skip
    shape = {"dtype": dtype, "block_size": 16, "layers": layers}
    assert planned(on, of, arguments=arguments).facts()["attention"] == shape
    assert planned(on, {**of, "attention": []}, arguments=arguments).facts()["attention"] == {}


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gemma3_text", "glm4"])
def test_models_unstable_in_float16_take_float32_on_turing(kind: str) -> None:
    assert planned(None, {"model_type": kind, "weights_bytes": 5_000_000_000}).dtype == "float32"
    assert planned(AMPERE, {"model_type": kind}).dtype == "auto"
    assert planned(None, {"model_type": "gemma4"}).dtype == "float16"


def test_weights_count_twice_where_they_become_float32() -> None:
    # 10.2 GB of bfloat16 fit into 15,360 MiB as float16 and not as float32.
    assert planned().refusals == []
    assert "20,493,243,836 bytes, twice their bfloat16 size" in reasons(planned(None, {"model_type": "gemma3"}))


def test_a_model_for_two_cards_says_which_argument_uses_both() -> None:
    two = {"gpus": [gpu(), gpu()]}
    large = {"weights_bytes": 20_000_000_000}
    plan = planned(two, large)
    assert "cannot fit on 1 of 2 GPUs" in reasons(plan)
    assert plan.refusals[0].mend == "set --tensor-parallel-size 2 in vllm_service_arguments"
    assert planned(two, large, arguments="--tensor-parallel-size 2").refusals == []
    assert planned(two, large, arguments="--tensor-parallel-size=2").refusals == []


@pytest.mark.parametrize(
    ("arguments", "on", "kind", "expected"),
    [
        # CASES A08: asked for explicitly, bfloat16 raises below 8.0. FACTS: an fp8 cache needs 8.9.
        ("--dtype bfloat16", {}, "gemma4", "--dtype bfloat16 is asked for and needs capability 8.0"),
        ("--dtype=half", {}, "gemma3", "vLLM refuses gemma3 in float16"),
        ("--dtype half", AMPERE, "gemma3", "vLLM refuses gemma3 in float16"),
        ("--kv-cache-dtype fp8_e4m3", {}, "gemma4", "needs capability 8.9, this is 7.5"),
        ("--kv-cache-dtype fp8", AMPERE, "gemma4", "needs capability 8.9, this is 8.6"),
        ("--kv-cache-dtype fp8 --kv-cache-dtype auto", {}, "gemma4", ""),
        ("--dtype bfloat16", AMPERE, "gemma4", ""),
        ("--dtype float16 --enforce-eager", {}, "gemma4", ""),
    ],
)
def test_types_that_the_card_does_not_have_are_refused(
    arguments: str, on: dict[str, Any], kind: str, expected: str
) -> None:
    wishes = replace(WISHES, releases=releases("0.33.0"))
    plan = planned(on, {"model_type": kind, "weights_bytes": 1_000_000_000}, wishes, arguments=arguments)
    assert len(plan.refusals) == bool(expected)
    assert expected in reasons(plan)


@pytest.mark.parametrize(
    ("versions", "attention", "expected"),
    [
        # FACTS: a model with heads of several widths needs 0.27.2rc0, and 0.26.0 is the oldest that was patched.
        (
            ("0.27.1",),
            [[256, 8, 1, 512], [512, 8, 1, 0]],
            "0.27.2rc0 or newer is wanted: gemma4 has heads of several widths",
        ),
        (("0.27.2rc0",), [[256, 8, 1, 512], [512, 8, 1, 0]], ""),
        (("0.33.0", "0.32.0+cpu"), [[256, 8, 1, 512], [512, 8, 1, 0]], ""),
        (("0.27.1",), [[128, 8, 1, 0]], ""),
        (("0.27.1",), [[128, 8, 1, 0], [128, 8, 1, 4096]], ""),
        (("0.8.5",), [[128, 8, 1, 0]], "0.26.0 or newer is wanted: for capability 7.5"),
        (("main",), [[128, 8, 1, 0]], ""),
    ],
)
def test_versions_too_old_for_the_card_or_the_model_are_refused(
    versions: tuple[str, ...], attention: list[list[int]], expected: str
) -> None:
    plan = planned(None, {"attention": attention}, replace(WISHES, releases=releases(*versions)))
    assert len(plan.refusals) == bool(expected)
    assert expected in reasons(plan)


def test_an_older_version_is_no_matter_on_a_newer_card() -> None:
    assert planned(AMPERE, {"attention": [[128, 8, 1, 0]]}, replace(WISHES, releases=releases("0.8.5"))).refusals == []


def test_a_vision_part_on_turing_is_warned_of() -> None:
    # CASES A12.
    assert "text only is sure" in said(planned(None, {"vision": True, "model_type": "qwen3_vl"}), "vision")[0]
    assert said(planned(), "vision") == []
    assert said(planned(AMPERE, {"vision": True}), "vision") == []


def test_a_model_without_a_chat_template_is_refused_unless_the_server_is_given_one() -> None:
    # CASES B11.
    assert "no chat template" in reasons(planned(None, {"chat_template": False}))
    assert planned(None, {"chat_template": False}, arguments="--chat-template /srv/t.jinja").refusals == []
    assert planned(None, {"chat_template": None}).refusals == []


def test_a_folder_that_is_incomplete_is_refused() -> None:
    local = {"name": "/srv/m", "local": True}
    assert reasons(planned(None, {**local, "exists": False})) == "the model's directory is not there"
    assert "no config.json" in reasons(planned(None, {**local, "config": False}))
    missing = reasons(planned(None, {**local, "missing": ["model-00002-of-00002.safetensors"]}))
    assert "1 files that the model's index names are not there: model-00002-of-00002" in missing
