"""What a host needs and why, in words, from what it says about itself. Pure: reads and writes nothing.

The arch lists of published builds were read from the cubins inside the wheels on the package index,
vLLM 0.33.0 and torch 2.14.0, on 2026-12-01.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MIB = 1024 * 1024
PUBLISHED_VERSIONS = {"vllm": "0.33.0", "torch": "2.14.0"}
PUBLISHED: dict[str, dict[str, tuple[str, ...]]] = {
    "aarch64": {
        "vllm": ("8.0", "8.6", "8.7", "8.9", "9.0", "9.0a", "10.0", "11.0", "12.0"),
        "torch": ("8.0", "9.0", "10.0", "10.3", "11.0", "12.0"),
    },
    "x86_64": {
        "vllm": ("7.5", "8.0", "8.6", "8.9", "9.0", "9.0a", "10.0", "12.0"),
        "torch": ("7.5", "8.0", "8.6", "9.0", "10.0", "10.3", "12.0"),
    },
}
# vLLM refuses float16 for these (numerically unstable), and bfloat16 needs capability 8.0.
FLOAT32_BELOW_8 = ("gemma2", "gemma3", "gemma3_text")
# The size is rounded up to this, so that a few MiB of MemTotal more or less do not resize the swapfile.
SWAP_STEP_MIB = 512


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason not to touch the host, in the parts of the house form."""

    what: str
    where: str
    mend: str


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for. Empty strings and `auto` leave the decision to the host's own facts."""

    method: str = "auto"
    capability: str = "auto"
    capabilities: tuple[str, ...] = ()
    cuda: str = ""
    checkpoint_bytes: int = 0
    swap_margin_mib: int = 1024
    swapfile_path: str = ""
    writes: tuple[Mapping[str, Any], ...] = ()
    disk_enforced: bool = True


@dataclass(slots=True)
class Plan:
    """The plan under construction; `facts()` is what other roles read."""

    capability: str = ""
    architecture: str = ""
    method: str = ""
    dtype: str = "auto"
    swap_mib: int = 0
    shared_memory_optin_bytes: int = 0
    decisions: list[dict[str, str]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def decide(self, topic: str, decision: str, why: str) -> None:
        """Note a decision in words."""
        self.decisions.append({"topic": topic, "decision": decision, "why": why})

    def refuse(self, what: str, where: str, mend: str) -> None:
        """Note a refusal."""
        self.refusals.append(Refusal(what, where, mend))

    def facts(self) -> dict[str, Any]:
        """The plan as `vllm_plan`; sizes in MiB and bytes as named."""
        return {
            "capability": self.capability,
            "architecture": self.architecture,
            "method": self.method,
            "dtype": self.dtype,
            "swap_mib": self.swap_mib,
            "shared_memory_optin_bytes": self.shared_memory_optin_bytes,
            "decisions": self.decisions,
            "refusals": [{"what": r.what, "where": r.where, "mend": r.mend} for r in self.refusals],
        }


def version_pair(text: str) -> tuple[int, int]:
    """`"13.2"` as `(13, 2)`; `(0, 0)` where no version can be read."""
    found = re.match(r"(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def listed(arches: Sequence[str], capability: str) -> str:
    """The entry of an arch list whose code runs on `capability`, or an empty string.

    Takes `7.5`, `sm_75`, `9.0a`, `sm_90a` and `compute_90`. A cubin runs on its own major at the same or
    a higher minor, an arch-specific one (`a`, `f`) on its own capability alone, PTX on anything newer.
    """
    wanted = version_pair(capability)
    for arch in arches:
        found = re.fullmatch(r"(sm_|compute_)?(\d+?)\.?(\d)([af]?)", arch)
        if not found:
            continue
        have = (int(found[2]), int(found[3]))
        if found[1] == "compute_":
            fits = have <= wanted and not found[4]
        elif found[4]:
            fits = have == wanted
        else:
            fits = have[0] == wanted[0] and have[1] <= wanted[1]
        if fits:
            return arch
    return ""


def swap_need(
    largest_bytes: int,
    memory: Mapping[str, Any],
    own_swap_bytes: int,
    margin_mib: int,
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
    if not largest_bytes:
        return 0, "the size of the checkpoint is not known (no local model, preflight_checkpoint_bytes 0)", ""
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


def _capability(plan: Plan, host: Mapping[str, Any], wishes: Wishes) -> None:
    gpus = host["gpus"]
    if gpus:
        lowest = min(gpus, key=lambda gpu: version_pair(gpu["capability"]))
        plan.capability = lowest["capability"]
        plan.shared_memory_optin_bytes = int(lowest["shared_memory_per_block_optin_bytes"])
        names = ", ".join(f"{g['name']} ({g['capability']}, {g['memory_bytes'] // MIB:,} MiB)" for g in gpus)
        plan.decide(
            "capability",
            plan.capability,
            f"the CUDA driver library reports {names}, shared memory per block "
            f"{int(lowest['shared_memory_per_block_bytes']):,} bytes, {plan.shared_memory_optin_bytes:,} with opt-in",
        )
        if wishes.capability not in ("auto", plan.capability):
            plan.refuse(
                f"capability {wishes.capability} was asked for and the GPU has {plan.capability}",
                "preflight_capability",
                "set preflight_capability: auto",
            )
    elif wishes.capability != "auto":
        plan.capability = wishes.capability
        plan.decide("capability", plan.capability, "asked for; no GPU answers here, so this host only builds")
    else:
        plan.refuse(
            f"no GPU answers, and one is wanted: {host['gpu_error'] or 'the driver lists no device'}",
            "the CUDA driver library",
            "run nvidia-smi on the host and mend its driver, or set preflight_capability on a builder without a GPU",
        )
        return
    if plan.capability not in wishes.capabilities:
        plan.refuse(
            f"capability {plan.capability} has no plan; planned are {' '.join(wishes.capabilities)}",
            "the GPU" if gpus else "preflight_capability",
            "use an instance type with a planned GPU, or add the capability to preflight_capabilities after proving it",
        )


def _method(plan: Plan, host: Mapping[str, Any], wishes: Wishes) -> None:
    published = PUBLISHED.get(plan.architecture)
    torch = host["torch"]
    if published is None:
        plan.refuse(
            f"architecture {plan.architecture} has no plan; planned are {' '.join(sorted(PUBLISHED))}",
            "uname -m",
            "use an x86_64 or aarch64 instance type",
        )
        return
    missing = [name for name in ("vllm", "torch") if not listed(published[name], plan.capability)]
    lists = "; ".join(
        f"{name} {PUBLISHED_VERSIONS[name]} for {plan.architecture} holds {' '.join(published[name])}"
        + (f" and no {plan.capability}" if name in missing else "")
        for name in ("vllm", "torch")
    )
    plan.method = ("source" if missing else "wheel") if wishes.method == "auto" else wishes.method
    words = {"source": "source build", "wheel": "published wheel"}[plan.method]
    if wishes.method == "auto":
        plan.decide("method", words, f"published builds: {lists}")
    else:
        plan.decide("method", words, f"asked for by preflight_method; published builds: {lists}")
        if plan.method == "wheel" and missing:
            plan.decide(
                "method",
                "only a wheel made for this capability will do",
                f"the published one has no kernel image for {plan.capability}",
            )
    _torch(plan, torch, wishes)


def _torch(plan: Plan, torch: Mapping[str, Any], wishes: Wishes) -> None:
    name = f"torch {torch['version']} in {torch['prefix']}"
    needed = plan.method == "source"
    if not torch["version"]:
        if needed:
            plan.refuse(
                "a source build uses the image's torch and none was found",
                "preflight_torch_prefixes",
                "set preflight_torch_prefixes to the environment that holds torch",
            )
        else:
            plan.decide("torch", "none found", "the published wheel brings its own")
    elif torch.get("error"):
        if needed:
            plan.refuse(
                f"{name} cannot be imported: {torch['error']}",
                torch["prefix"],
                f"run {torch['python']} -c 'import torch' and mend what it names",
            )
        else:
            plan.decide("torch", "not usable", f"{name} cannot be imported: {torch['error']}")
    elif not torch["cuda"]:
        if needed and wishes.method == "auto":
            plan.refuse(
                f"{name} is a CPU build without CUDA, and a source build for {plan.capability} is needed",
                torch["prefix"],
                "set preflight_torch_prefixes to a torch built for CUDA, or preflight_method by hand",
            )
        else:
            plan.decide(
                "torch",
                "a CPU build",
                f"{name} has no CUDA and no arch list: releases on it run on the CPU, none of their "
                f"code runs on the GPU; taken because preflight_method is {wishes.method}",
            )
    else:
        entry = listed(torch["arch_list"], plan.capability)
        if entry:
            plan.decide("torch", "kept", f"{name} (CUDA {torch['cuda']}) lists {entry}")
        elif needed:
            plan.refuse(
                f"{name} lists {' '.join(torch['arch_list'])} and nothing for capability {plan.capability}",
                torch["prefix"],
                "set preflight_torch_prefixes to a torch that lists the capability, or use a newer image",
            )
        else:
            plan.decide("torch", "not used", f"{name} lists {' '.join(torch['arch_list'])}, not {plan.capability}")


def _driver(plan: Plan, host: Mapping[str, Any], wishes: Wishes) -> None:
    have, driver = host["driver"]["cuda"], host["driver"]["version"]
    wanted, asked = (wishes.cuda, True) if wishes.cuda else (host["torch"]["cuda"], False)
    if not wanted or not host["gpus"]:
        return
    source = "preflight_cuda_wanted" if asked else f"torch {host['torch']['version']}"
    older = version_pair(have) < version_pair(wanted)
    if older and (asked or version_pair(have)[0] < version_pair(wanted)[0]):
        plan.refuse(
            f"driver {driver} speaks CUDA {have}, older than the CUDA {wanted} asked for by {source}",
            "the NVIDIA driver",
            f"install a driver for CUDA {wanted}, or set preflight_cuda_wanted: '{have}'",
        )
    elif older:
        plan.decide(
            "driver",
            "kept",
            f"driver {driver} speaks CUDA {have}, {source} is built for {wanted}: same major, so its cubins "
            "run and its PTX does not",
        )
    else:
        plan.decide("driver", "kept", f"driver {driver} speaks CUDA {have}, {source} wants {wanted}")


def _model(plan: Plan, host: Mapping[str, Any], model: Mapping[str, Any]) -> None:
    path = model["path"]
    below_8 = version_pair(plan.capability) < (8, 0)
    if below_8 and model["model_type"] in FLOAT32_BELOW_8:
        plan.dtype = "float32"
        why = f"{model['model_type']} is unstable in float16 and vLLM refuses it; bfloat16 needs 8.0"
    elif below_8:
        plan.dtype = "float16"
        why = f"bfloat16 needs capability 8.0, this is {plan.capability}"
    else:
        why = f"capability {plan.capability} has bfloat16: the model's own type"
    plan.decide("dtype", plan.dtype, why)
    if below_8 and re.match(r"qwen\d+(_\d+)?_vl", model["model_type"]):
        plan.decide(
            "vision",
            "text only is sure",
            f"{model['model_type']} has no vision backend known to run below 8.0",
        )
    if path.startswith("/"):
        if not model["exists"]:
            plan.refuse("the model's directory is not there", path, "set preflight_model to a directory that is")
        else:
            if not model["config"]:
                plan.refuse(
                    "the model's directory has no config.json",
                    path,
                    "copy the whole model there, config.json too",
                )
            if not model["chat_template"]:
                plan.refuse(
                    "the model has no chat template (neither chat_template.jinja, chat_template.json nor the key "
                    "in tokenizer_config.json), so chat completions would be answered with 400",
                    path,
                    "use the instruction-tuned model, or add its chat_template.jinja",
                )
    memory = sum(int(gpu["memory_bytes"]) for gpu in host["gpus"])
    weights = int(model["weights_bytes"])
    if memory and weights > memory:
        plan.refuse(
            f"the weights take {weights:,} bytes and the GPU has {memory:,}: the model cannot fit",
            path or "preflight_checkpoint_bytes",
            "use an instance type with more GPU memory, or set preflight_model to a smaller or quantized model",
        )
    elif memory and weights:
        plan.decide("model", "fits", f"weights {weights:,} bytes of {memory:,} bytes of GPU memory")


def _swap(plan: Plan, host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes) -> None:
    mib, why, problem = swap_need(
        int(model["largest_bytes"]),
        host["memory"],
        int(host["memory"]["own_swap_bytes"]),
        wishes.swap_margin_mib,
    )
    plan.swap_mib = mib
    plan.decide("swap", f"{mib:,} MiB" if mib else "none", why)
    if problem:
        plan.refuse(problem, "vm.overcommit_memory", "sysctl -w vm.overcommit_memory=0")


def _disk(plan: Plan, host: Mapping[str, Any], wishes: Wishes) -> None:
    need: dict[str, list[Any]] = {}
    for write in wishes.writes:
        where = host["filesystems"][write["path"]]
        entry = need.setdefault(where["device"], [0, 0, where, []])
        entry[0] += int(write.get(f"{plan.method}_mib") or 0)
        entry[1] += int(write.get("inodes") or 0)
        entry[3].append(write["path"])
        if write.get("exec") and where["noexec"]:
            plan.refuse(
                f"{write['path']} is mounted noexec ({where['device']}), and what is installed there must run",
                write["path"],
                f"mount -o remount,exec {where['mount']}",
            )
    swap_home = host["filesystems"].get(wishes.swapfile_path)
    if plan.swap_mib and swap_home and not host["memory"]["own_swap_bytes"]:
        entry = need.setdefault(swap_home["device"], [0, 0, swap_home, []])
        entry[0] += plan.swap_mib
        entry[3].append(wishes.swapfile_path)
    for device, (mib, inodes, where, paths) in need.items():
        short = []
        if where["free_bytes"] < mib * MIB:
            short.append(f"{where['free_bytes'] // MIB:,} MiB free where {mib:,} are wanted")
        # Filesystems without a fixed inode table (btrfs) report none at all.
        if where["total_inodes"] and where["free_inodes"] < inodes:
            short.append(f"{where['free_inodes']:,} inodes free where {inodes:,} are wanted")
        words = f"{device} ({where['fstype']}), which holds {', '.join(paths)}"
        if short and wishes.disk_enforced:
            plan.refuse(
                f"{words}, has {' and '.join(short)}",
                paths[0],
                f"free space on {where['mount']} or grow its volume",
            )
        elif short:
            plan.decide("disk", "short, a release is already in place", f"{words}, has {' and '.join(short)}")
        else:
            plan.decide("disk", "enough", f"{words}, has {where['free_bytes'] // MIB:,} MiB free, {mib:,} wanted")


def make_plan(host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes) -> Plan:
    """Decide everything for one host, as read by `vllm_host`."""
    plan = Plan(architecture=host["architecture"])
    _capability(plan, host, wishes)
    if plan.capability:
        _method(plan, host, wishes)
        _driver(plan, host, wishes)
        _model(plan, host, model)
    _swap(plan, host, model, wishes)
    _disk(plan, host, wishes)
    return plan


def house_form(refusals: Sequence[Refusal], host: str, who: str = "preflight") -> str:
    """All refusals as one text in the house form."""
    if len(refusals) == 1:
        only = refusals[0]
        return f"{who}: {only.what}\n  where: {host} {only.where}\n  mend:  {only.mend}"
    numbered = list(enumerate(refusals, 1))
    return (
        f"{who}: {len(refusals)} things stand against this host: "
        + "; ".join(f"({n}) {r.what}" for n, r in numbered)
        + f"\n  where: {host} "
        + "; ".join(f"({n}) {r.where}" for n, r in numbered)
        + "\n  mend:  "
        + "; ".join(f"({n}) {r.mend}" for n, r in numbered)
    )


def stable(host: Mapping[str, Any], plan: Mapping[str, Any]) -> dict[str, Any]:
    """What is recorded of a host: no value that moves by itself (free space, swap, the words)."""
    return {
        "host": {
            "architecture": host["architecture"],
            "os": host["os"],
            "python": host["python"],
            "memory": {key: host["memory"][key] for key in ("total_bytes", "overcommit_memory")},
            "filesystems": {
                path: {key: entry[key] for key in ("device", "fstype", "noexec")}
                for path, entry in host["filesystems"].items()
            },
            "gpus": host["gpus"],
            "driver": host["driver"],
            "torch": host["torch"],
        },
        "plan": {key: value for key, value in plan.items() if key not in ("decisions", "refusals")},
    }


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    """`host.torch.version: 2.12.0 -> 2.14.0` for every leaf that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        found: list[str] = []
        for key in sorted({*before, *after}):
            found += differences(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
        return found
    return [] if before == after else [f"{path}: {before} -> {after}"]
