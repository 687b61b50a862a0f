"""What a host needs and why, in words, from what it says about itself. Pure: reads and writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.driver_decisions import decide_compiler, decide_cuda, decide_module
from ansible.module_utils.host_plan import MIB, Plan, Wishes, version_pair
from ansible.module_utils.model_decisions import decide_model, decide_swap
from ansible.module_utils.published_builds import ARCH_LISTS, VERSIONS, listed
from ansible.module_utils.version_decisions import decide_versions


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
            f"capability {plan.capability or 'of no name'} has no plan; planned are {' '.join(wishes.capabilities)}",
            "the GPU" if gpus else "preflight_capability",
            "use an instance type with a planned GPU, or add the capability to preflight_capabilities after proving it",
        )


def _method(plan: Plan, host: Mapping[str, Any], wishes: Wishes) -> None:
    published = ARCH_LISTS.get(plan.architecture)
    torch = host["torch"]
    if published is None:
        plan.refuse(
            f"architecture {plan.architecture} has no plan; planned are {' '.join(sorted(ARCH_LISTS))}",
            "uname -m",
            "use an x86_64 or aarch64 instance type",
        )
        return
    missing = [name for name in ("vllm", "torch") if not listed(published[name], plan.capability)]
    lists = "; ".join(
        f"{name} {VERSIONS[name]} for {plan.architecture} holds {' '.join(published[name])}"
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


def _disk(plan: Plan, host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes) -> None:
    need: dict[int, list[Any]] = {}

    def want(path: str, mib: int, inodes: int) -> None:
        where = host["filesystems"][path]
        entry = need.setdefault(where["id"], [0, 0, where, []])
        entry[0] += mib
        entry[1] += inodes
        entry[3].append(path)

    for write in wishes.writes:
        path, where = write["path"], host["filesystems"][write["path"]]
        download = 0 if model["local"] or not write.get("model") else int(model["weights_bytes"])
        want(path, int(write.get(f"{plan.method}_mib") or 0) + download // MIB, int(write.get("inodes") or 0))
        if write.get("exec") and where["noexec"]:
            plan.refuse(
                f"{path} is mounted noexec ({where['device']}), and what is installed there must run",
                path,
                f"mount -o remount,exec {where['mount']}",
            )
    more_swap = plan.swap_mib - int(host["memory"]["swapfile_bytes"]) // MIB
    if more_swap > 0 and wishes.swapfile_path in host["filesystems"]:
        want(wishes.swapfile_path, more_swap, 1)
    for mib, inodes, where, paths in need.values():
        short = []
        if where["free_bytes"] < mib * MIB:
            short.append(f"{where['free_bytes'] // MIB:,} MiB free where {mib:,} are wanted")
        # Filesystems without a fixed inode table (btrfs) report none at all.
        if where["total_inodes"] and where["free_inodes"] < inodes:
            short.append(f"{where['free_inodes']:,} inodes free where {inodes:,} are wanted")
        words = f"{where['device']} ({where['fstype']}), which holds {', '.join(paths)}"
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
    temporary = host["temporary"]
    if temporary["noexec"]:
        plan.decide(
            "temporary files",
            f"nothing runs from {temporary['path']}",
            f"{temporary['mount']} is mounted noexec; builds and installers keep theirs in folders of their own",
        )


def _index(plan: Plan, wishes: Wishes) -> None:
    index, why = wishes.index_silence
    if why:
        plan.refuse(
            f"the package index {index} cannot be reached: {why}; releases and their requirements come from there",
            "index-url of pip on the host",
            "set index-url in the host's /etc/pip.conf to an index that it reaches",
        )


def make_plan(host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes) -> Plan:
    """Decide everything for one host, as read by `vllm_host`."""
    plan = Plan(architecture=host["architecture"], weights_bytes=int(model["weights_bytes"] or model["largest_bytes"]))
    if wishes.swap_margin_mib < 0:
        plan.refuse(
            f"{wishes.swap_margin_mib} MiB of room were asked for, and 0 or more are wanted",
            "preflight_swap_margin_mib",
            "set preflight_swap_margin_mib: 1024",
        )
    _capability(plan, host, wishes)
    decide_module(plan, host, wishes)
    if plan.capability:
        _method(plan, host, wishes)
        decide_cuda(plan, host, wishes)
        decide_compiler(plan, host)
        decide_model(plan, host, model, wishes)
        decide_versions(plan, host, model, wishes)
    decide_swap(plan, host, model, wishes)
    _disk(plan, host, model, wishes)
    _index(plan, wishes)
    return plan
