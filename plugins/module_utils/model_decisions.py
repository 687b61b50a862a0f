"""What a model asks of a host: type, kernels, memory and swap. Pure: reads and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.attention_shape import attention_shape, largest_group, least_bytes
from ansible.module_utils.host_plan import MIB, Plan, Wishes, version_pair
from ansible.module_utils.version_rules import NO_FLOAT16

FP8_CAPABILITY = "8.9"
# What vLLM's --dtype takes for a type (config/model.py).
_TYPES = {"float16": "float16", "half": "float16", "bfloat16": "bfloat16", "float32": "float32", "float": "float32"}
# The size is rounded up to this, so that a few MiB of MemTotal more or less do not resize the swapfile.
SWAP_STEP_MIB = 512


def decide_model(plan: Plan, host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes) -> None:
    """Everything but swap, which a host without a plan for its GPU is told too."""
    _told(plan, model, wishes)
    _files(plan, model, wishes)
    _dtype(plan, model, wishes)
    _kv_cache(plan, wishes)
    plan.attention = attention_shape(model["attention"], _computed_in(plan, model, wishes), wishes)
    _kernels(plan, model, wishes)
    if plan.below_8 and model["vision"]:
        plan.decide(
            "vision",
            "text only is sure",
            f"{model['model_type']} has a vision part, and below 8.0 no vision backend may be left for it "
            "(so for Qwen3-VL); ask it about an image before relying on it",
        )
    _fit(plan, host, model, wishes)


def _told(plan: Plan, model: Mapping[str, Any], wishes: Wishes) -> None:
    """What a hub's silence means: 401 and 403 differ in who can mend it, an outage decides nothing."""
    silence = model["silence"]
    if not silence:
        return
    name, status, words = model["name"], silence["status"], silence["words"]
    if status == 401 and silence["token"]:
        plan.refuse(
            f"the hub does not take the token: {words}",
            wishes.token_file,
            "put a valid token into the secret that secrets_fetch_secret_id names, then ./runner.py rotate",
        )
    elif status == 401 and wishes.token_file:
        plan.decide(
            "hub",
            "not known yet",
            f"{words}: it wants a token, and none is in {wishes.token_file} yet; the next converge asks with it",
        )
    elif status == 401:
        plan.refuse(
            f"{words}: {name} is gated, private or misspelled, and no token is sent",
            "preflight_token_file",
            "set vllm_service_token_file to the file that secrets_fetch keeps, or correct preflight_model",
        )
    elif status == 403:
        plan.refuse(
            f"{words}: the caller is known, and access to {name} is not granted",
            "preflight_model",
            f"ask for access on the page of {name} with the token's account",
        )
    elif status == 404:
        plan.refuse(f"{words}: no model {name} is there", "preflight_model", "correct preflight_model")
    else:
        held = "what it told at an earlier run holds" if model["largest_bytes"] else "nothing is decided from that"
        plan.decide("hub", "silent", f"{words}; {held}")


def _files(plan: Plan, model: Mapping[str, Any], wishes: Wishes) -> None:
    name = model["name"]
    if model["local"] and not model["exists"]:
        plan.refuse("the model's directory is not there", name, "set preflight_model to a directory that is")
        return
    if model["exists"] and not model["silence"] and not model["config"]:
        plan.refuse("the model has no config.json", name, "copy the whole model there, config.json too")
    if model["missing"]:
        plan.refuse(
            f"{len(model['missing'])} files that the model's index names are not there: "
            + ", ".join(model["missing"][:3]),
            name,
            "copy the whole model there again",
        )
    if model["chat_template"] is False and not wishes.argument("--chat-template"):
        plan.refuse(
            "the model has no chat template (neither chat_template.jinja, chat_template.json nor the key "
            "in tokenizer_config.json), so chat completions would be answered with 400",
            name,
            "use the instruction-tuned model, or add its chat_template.jinja",
        )


def _dtype(plan: Plan, model: Mapping[str, Any], wishes: Wishes) -> None:
    kind, asked = model["model_type"], wishes.argument("--dtype")
    if plan.below_8 and kind in NO_FLOAT16:
        plan.dtype = "float32"
        why = f"{kind} is unstable in float16 and vLLM refuses it; bfloat16 needs 8.0"
    elif plan.below_8:
        plan.dtype = "float16"
        why = f"bfloat16 needs capability 8.0, this is {plan.capability}"
    else:
        why = f"capability {plan.capability} has bfloat16: the model's own type"
    plan.decide("dtype", plan.dtype, why)
    if plan.below_8 and asked == "bfloat16":
        plan.refuse(
            f"--dtype bfloat16 is asked for and needs capability 8.0, this is {plan.capability}",
            "vllm_service_arguments",
            f"set --dtype {plan.dtype} in vllm_service_arguments, or leave it out",
        )


def _kv_cache(plan: Plan, wishes: Wishes) -> None:
    asked = wishes.argument("--kv-cache-dtype")
    if asked.startswith("fp8") and version_pair(plan.capability) < version_pair(FP8_CAPABILITY):
        plan.refuse(
            f"--kv-cache-dtype {asked} is asked for and needs capability {FP8_CAPABILITY}, this is {plan.capability}",
            "vllm_service_arguments",
            "set --kv-cache-dtype auto in vllm_service_arguments",
        )


def _computed_in(plan: Plan, model: Mapping[str, Any], wishes: Wishes) -> str:
    """The type that vLLM computes in: what is asked for, else the plan's, else the model's own.

    From 8.0 on weights in float32, or in float16 of a model that is unstable in it, are computed in bfloat16, as are
    those whose type is not known (`_resolve_auto_dtype`, 0.33.0).
    """
    asked = _TYPES.get(wishes.argument("--dtype")) or _TYPES.get(plan.dtype)
    stable = model["weights_dtype"] == "float16" and model["model_type"] not in NO_FLOAT16
    return asked or ("float16" if stable else "bfloat16")


def _kernels(plan: Plan, model: Mapping[str, Any], wishes: Wishes) -> None:
    """Whether the attention kernels can fit at all, by the compiler's figures; of what is built it tells anew."""
    limit, later = plan.shared_memory_optin_bytes, "the compiler decides after the build"
    if not plan.below_8 or not limit:
        return
    if not plan.attention:
        name = model["name"] or "the model"
        plan.decide(
            "kernels", "not known yet", f"the attention of {name} is not known; {later}, for triton_patch_shape"
        )
        return
    dtype = plan.attention["dtype"]
    figures = wishes.kernel_figures.get("capabilities", {}).get(plan.capability, {}).get("shapes", [])
    kinds = sorted({(layer["head_size"], layer["heads"], layer["kv_heads"]) for layer in plan.attention["layers"]})
    fitting, unknown = [], []
    for head, heads, kv_heads in kinds:
        group, least = -(-heads // kv_heads), least_bytes(figures, head, heads, kv_heads, dtype)
        if least is None:
            unknown.append(f"{head} wide with {group} query heads to a KV head")
        elif least <= limit:
            fitting.append(f"{least:,} for {head} wide with {group} query heads to a KV head")
        else:
            most = largest_group(figures, head, dtype, limit)
            plan.refuse(
                f"{group} query heads share a KV head {head} wide: the attention kernel asks for at least {least:,} "
                f"bytes of shared memory in {dtype}, and the GPU has {limit:,}; "
                f"{f'up to {most}' if most else 'none'} fit at this width, and from capability 8.0 on that limit is "
                "gone, with at least 101,376 bytes",
                f"{model['name']} config.json",
                "use an instance type with capability 8.0 or newer, or set preflight_model to another model",
            )
    if unknown:
        words = f"nothing is known of heads {', '.join(unknown)} in {dtype} at capability {plan.capability}"
        plan.decide("kernels", "not known yet", f"{words}; {later}")
    elif len(fitting) == len(kinds):
        words = f"least shared memory in {dtype}, bytes: {', '.join(fitting)}; the GPU has {limit:,}"
        plan.decide("kernels", "can fit", f"{words}; {later}")


def _fit(plan: Plan, host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes) -> None:
    weights, why = int(model["weights_bytes"]), ""
    if plan.dtype == "float32" and model["weights_dtype"] in ("bfloat16", "float16"):
        weights, why = 2 * weights, f", twice their {model['weights_dtype']} size as float32"
    sizes = [int(gpu["memory_bytes"]) for gpu in host["gpus"]]
    used = sizes[: wishes.number(1, "--tensor-parallel-size", "-tp")]
    if not used or not weights:
        return
    words = f"weights {weights:,} bytes{why}, {sum(used):,} bytes of GPU memory"
    if weights <= sum(used):
        plan.decide("model", "fits", words)
    elif weights <= sum(sizes):
        plan.refuse(
            f"the model cannot fit on {len(used)} of {len(sizes)} GPUs: {words}",
            "vllm_service_arguments",
            f"set --tensor-parallel-size {len(sizes)} in vllm_service_arguments",
        )
    else:
        plan.refuse(
            f"the model cannot fit: {words}",
            model["name"],
            "use an instance type with more GPU memory, or set preflight_model to a smaller or quantized model",
        )


def decide_swap(plan: Plan, host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes) -> None:
    """How much swap the checkpoint needs; where its size is not known, the swap that is there stays."""
    largest, memory = int(model["largest_bytes"]), host["memory"]
    if not largest:
        plan.swap_mib = -(-int(memory["swapfile_bytes"]) // MIB)
        plan.decide(
            "swap",
            f"as it is, {plan.swap_mib:,} MiB",
            f"the size of {model['name'] or 'the model'} is not known, and nothing is decided from that; "
            "preflight_checkpoint_bytes gives it",
        )
        return
    plan.swap_mib, why, problem = swap_need(largest, memory, int(memory["own_swap_bytes"]), wishes.swap_margin_mib)
    plan.decide("swap", f"{plan.swap_mib:,} MiB" if plan.swap_mib else "none", f"{why}; size {model['source']}")
    if problem:
        plan.refuse(problem, "vm.overcommit_memory", "sysctl -w vm.overcommit_memory=0")


def swap_need(
    largest_bytes: int, memory: Mapping[str, Any], own_swap_bytes: int, margin_mib: int
) -> tuple[int, str, str]:
    """How much swap mapping the largest checkpoint file needs.

    The kernel decides at the mapping, not at residency: heuristic mode (0) refuses a private mapping
    larger than MemTotal plus swap, mode 1 none, strict mode (2) what exceeds CommitLimit. Neither what
    is free nor this project's own swapfile counts, so the answer is the same before and after.

    Returns:
        MiB of swap, the reason, and a problem that swap is not the answer to (or an empty string).
    """
    mode = int(memory["overcommit_memory"])
    other_swap = max(0, int(memory["swap_total_bytes"]) - own_swap_bytes)
    total = int(memory["total_bytes"])
    size = f"the largest checkpoint file, {largest_bytes:,} bytes,"
    if mode == 1:
        return 0, f"{size} is mapped whatever its size: overcommit mode 1", ""
    if mode == 2:
        limit = max(0, int(memory["commit_limit_bytes"]) - own_swap_bytes)
        words = f"CommitLimit {limit:,} bytes in strict overcommit (mode 2)"
        if largest_bytes > limit and largest_bytes + margin_mib * MIB <= total + other_swap:
            return (
                0,
                f"{size} exceeds {words}, not memory and swap",
                (
                    f"{size} exceeds {words} although memory and swap come to {total + other_swap:,} bytes: "
                    "the mode refuses it, not a lack of memory"
                ),
            )
    else:
        limit = total + other_swap
        words = f"MemTotal {total:,} plus swap {other_swap:,} bytes (overcommit mode {mode})"
    if largest_bytes <= limit:
        return 0, f"{size} can be mapped: {words}", ""
    lack = largest_bytes + margin_mib * MIB - limit
    mib = -(-lack // (SWAP_STEP_MIB * MIB)) * SWAP_STEP_MIB
    return mib, f"{size} exceeds {words}, and mapping it would fail with errno 12; {margin_mib} MiB spare", ""
