"""What stands against the driver, its module and the compiler that kernels are launched with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.module_utils.host_plan import Plan, Wishes, version_pair
from ansible.module_utils.published_builds import CUDA, VERSIONS

# Oldest driver branch for a CUDA major, from NVIDIA's CUDA compatibility guide (minor version compatibility, table 1).
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}


def decide_module(plan: Plan, host: Mapping[str, Any], wishes: Wishes) -> None:
    """The driver's two halves and the kernels, on every host that has a GPU or should have one."""
    driver = host["driver"]
    if not host["gpus"] and wishes.capability != "auto":
        return
    module, library, newest = driver["module"], driver["library"], driver["newest_kernel"]
    if module and library and module != library:
        words = f"the loaded kernel module is {module}, the driver library {library}"
        if host["gpus"]:
            plan.decide("driver", "two versions, and it answers", f"{words} (a compatibility package)")
        else:
            plan.refuse(
                f"{words}: the library was updated under a running module, and only a reboot loads its own",
                f"/proc/driver/nvidia/version and libcuda.so.{library}",
                "reboot the host, then converge again",
            )
    if driver["kernel"] in driver["without_module"] and not host["gpus"]:
        plan.refuse(
            f"the running kernel {driver['kernel']} has no NVIDIA module",
            f"/lib/modules/{driver['kernel']}",
            f"dkms autoinstall -k {driver['kernel']}",
        )
    elif newest in driver["without_module"]:
        plan.decide(
            "kernel",
            "do not reboot yet",
            f"kernel {newest} is installed and has no NVIDIA module, so the next boot would have no GPU; "
            f"dkms autoinstall -k {newest} makes it",
        )
    loose = sorted(set(driver["packages"]) - set(driver["hold"]))
    if driver["packages"]:
        plan.decide(
            "driver packages",
            "held" if not loose else "not held",
            "an unattended upgrade leaves them alone"
            if not loose
            else f"an unattended upgrade can replace {', '.join(loose[:3])} under the running module",
        )


def decide_cuda(plan: Plan, host: Mapping[str, Any], wishes: Wishes) -> None:
    """Whether the driver speaks the CUDA that is wanted; it says so itself."""
    have, driver, torch = host["driver"]["cuda"], host["driver"]["version"], host["torch"]
    if wishes.cuda:
        wanted, source = wishes.cuda, "preflight_cuda_wanted"
    elif torch["version"] or plan.method != "wheel":
        wanted, source = torch["cuda"], f"torch {torch['version']}"
    else:
        wanted, source = CUDA, f"the published torch {VERSIONS['torch']}"
    if not wanted or not host["gpus"]:
        return
    older = version_pair(have) < version_pair(wanted)
    major = version_pair(wanted)[0]
    if older and (wishes.cuda or version_pair(have)[0] < major):
        branch = f" ({OLDEST_DRIVER[major]} or newer for CUDA {major})" if major in OLDEST_DRIVER else ""
        plan.refuse(
            f"driver {driver} speaks CUDA {have}, older than the CUDA {wanted} asked for by {source}",
            "the NVIDIA driver",
            f"install a driver for CUDA {wanted}{branch}, or set preflight_cuda_wanted: '{have}'",
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


def decide_compiler(plan: Plan, host: Mapping[str, Any]) -> None:
    """Triton compiles a C module for every kernel that it launches; a source build needs a compiler anyway."""
    compiler = host["compiler"]
    if not host["gpus"] and plan.method != "source":
        return
    if compiler["error"]:
        plan.refuse(
            f"a C module for Python {compiler['python']} does not compile, and Triton makes one at the first "
            f"request: {compiler['error']}",
            compiler["path"] or "the C compiler",
            f"apt-get install -y gcc python{compiler['python'] or '3'}-dev",
        )
    elif not compiler["path"]:
        plan.decide("compiler", "none yet", "cuda_toolkit_sbsa installs one; kernels are launched through it")
    else:
        plan.decide(
            "compiler",
            "works",
            f"{compiler['path']} compiled a module for Python {compiler['python']}",
        )
