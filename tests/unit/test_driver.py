"""What is read of the driver, the kernels and the compiler, and what is decided from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import driver_probe
from ansible.module_utils.host_decisions import make_plan
from ansible.module_utils.host_plan import Plan

from tests.unit.examples import WISHES, driver, host, model, torch

# As an H200's host said it on 2026-12-01, driver 580.159.04.
PROC = """NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)
GCC version:  gcc version 15.3.0 (GCC)
"""


def planned(**changes: Any) -> Plan:
    """The plan of a host with another driver or compiler."""
    return make_plan(host(**changes), model(), WISHES)


def said(plan: Plan, topic: str) -> list[str]:
    """The decisions of a topic with their reasons."""
    return [f"{d['decision']}: {d['why']}" for d in plan.decisions if d["topic"] == topic]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes kernels: name to the lines of its list of modules."""
    monkeypatch.setattr(driver_probe, "_MODULES", tmp_path / "modules")
    monkeypatch.setattr(driver_probe, "_BOOT", tmp_path / "boot")

    def make(**listed: str) -> None:
        for name, lines in listed.items():
            kernel = name.replace("_", ".").replace("X", "-")
            (tmp_path / "modules" / kernel).mkdir(parents=True)
            (tmp_path / "modules" / kernel / "modules.dep").write_text(lines)
            (tmp_path / "boot").mkdir(exist_ok=True)
            (tmp_path / "boot" / f"vmlinuz-{kernel}").touch()

    return make


def test_a_library_that_refuses_still_tells_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # 803 is CUDA_ERROR_SYSTEM_DRIVER_MISMATCH.
    source, real = tmp_path / "cuda.c", tmp_path / "libcuda.so.595.71.05"
    source.write_text("int cuInit(unsigned flags) { return 803; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", real, source], check=True)
    (tmp_path / "libcuda.so.1").symlink_to(real.name)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    told = driver_probe.read_gpus()
    assert (told["gpus"], told["error"]) == ([], "cuInit answered 803")
    (tmp_path / "version").write_text(PROC)
    monkeypatch.setattr(driver_probe, "_MODULE", tmp_path / "version")
    found = driver_probe.read_driver(told["library"])
    assert (found["module"], found["version"], found["library"]) == ("580.159.04", "580.159.04", "595.71.05")


def test_a_driver_library_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout: float = 0, **__: object) -> None:
        assert timeout
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "did not answer within 60 s" in driver_probe.read_gpus()["error"]


def test_two_versions_want_a_reboot_unless_the_gpu_answers() -> None:
    # CASES D10.
    apart = driver(module="580.159.04", library="595.71.05")
    plan = planned(driver=apart, gpus=[], gpu_error="cuInit answered 803")
    assert any("the loaded kernel module is 580.159.04, the driver library 595.71.05" in r.what for r in plan.refusals)
    assert any(r.mend == "reboot the host, then converge again" for r in plan.refusals)
    answered = planned(driver=apart)
    assert answered.refusals == []
    assert "a compatibility package" in said(answered, "driver")[0]
    assert planned(driver=driver(module="", library="595.71.05")).refusals == []


def test_the_newest_kernel_is_one_that_can_boot(kernels: Any, tmp_path: Path) -> None:
    kernels(**{"6_8_0X1021Xaws": "", "6_14_0X1005Xaws": "", "6_9_0X1Xaws": ""})
    assert driver_probe.newest_kernel() == "6.14.0-1005-aws"
    # What a removed kernel left behind has no image.
    (tmp_path / "modules" / "7.0.0-1-aws").mkdir()
    assert driver_probe.newest_kernel() == "6.14.0-1005-aws"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("updates/dkms/nvidia.ko.zst: kernel/drivers/video/video.ko\n", True),
        ("kernel/a.ko:\nkernel/drivers/video/nvidia.ko: kernel/x.ko\n", True),
        ("kernel/drivers/usb/nvidia-uvm.ko: updates/dkms/nvidia.ko\n", False),
        ("kernel/drivers/net/forcedeth_nvidia.ko:\n", False),
    ],
)
def test_a_module_is_there_where_modprobe_would_find_it(kernels: Any, lines: str, expected: bool) -> None:
    kernels(**{"6_8_0X1Xaws": lines})
    assert driver_probe.has_module("6.8.0-1-aws") is expected
    assert driver_probe.has_module("5.0.0-none")


def test_both_kernels_are_looked_at(kernels: Any) -> None:
    running = os.uname().release
    assert driver_probe.read_driver("")["without_module"] == []
    kernels(**{"99_0_0X1Xaws": "kernel/a.ko:\n"})
    found = driver_probe.read_driver("")
    assert (found["kernel"], found["newest_kernel"]) == (running, "99.0.0-1-aws")
    assert found["without_module"] == ["99.0.0-1-aws"]


def test_a_kernel_without_the_module_is_refused_or_warned_of() -> None:
    # CASES D11: the running one explains why no GPU answers, the newest one takes it away at the next boot.
    gone = driver(without_module=["6.14.0-1018-aws"])
    plan = planned(driver=gone, gpus=[], gpu_error="cuInit answered 100")
    assert any(r.mend == "dkms autoinstall -k 6.14.0-1018-aws" for r in plan.refusals)
    coming = planned(driver=driver(newest_kernel="6.17.0-1-aws", without_module=["6.17.0-1-aws"]))
    assert coming.refusals == []
    assert "kernel 6.17.0-1-aws is installed and has no NVIDIA module" in said(coming, "kernel")[0]
    assert said(planned(), "kernel") == []


@pytest.mark.parametrize(
    ("speaks", "asked", "refused", "expected"),
    [
        # CASES A21; the oldest branches from NVIDIA's compatibility guide.
        ("12.2", "", True, "580 or newer for CUDA 13"),
        ("11.4", "12.8", True, "525 or newer for CUDA 12"),
        ("13.0", "13.2", True, "install a driver for CUDA 13.2"),
        ("13.0", "", False, "its cubins run and its PTX does not"),
        ("13.2", "13.2", False, "preflight_cuda_wanted wants 13.2"),
    ],
)
def test_the_driver_speaks_the_cuda_that_is_wanted(speaks: str, asked: str, refused: bool, expected: str) -> None:
    plan = make_plan(host(driver=driver(cuda=speaks)), model(), replace(WISHES, cuda=asked))
    assert len(plan.refusals) == refused
    assert expected in (plan.refusals[0].mend if refused else said(plan, "driver")[0])


def test_without_a_torch_of_its_own_an_image_needs_a_driver_for_the_published_one() -> None:
    # CASES A21: torch for CUDA 13 on driver 535 falls back to the CPU in silence, while nvidia-smi lists the GPU.
    bare = {"architecture": "x86_64", "torch": torch(version="", cuda="", prefix="", arch_list=[])}
    old = planned(**bare, driver=driver(version="535.183.01", cuda="12.2"))
    assert "older than the CUDA 13.0 asked for by the published torch 2.14.0" in old.refusals[0].what
    assert planned(**bare).refusals == []


def test_packages_that_an_upgrade_may_replace_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        "installed install bash\ninstalled hold nvidia-driver-595-open\ninstalled install libnvidia-compute-595\n"
        "config-files deinstall nvidia-old\ninstalled install nvidia-cuda-samples\n"
    )
    query = tmp_path / "dpkg-query"
    query.write_text(f"#!/bin/sh\nprintf '%s' '{rows}'\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = driver_probe.read_driver("")
    assert found["hold"] == ["nvidia-driver-595-open"]
    assert found["packages"] == ["libnvidia-compute-595", "nvidia-cuda-samples", "nvidia-driver-595-open"]
    loose = planned(driver=driver(packages=found["packages"], hold=found["hold"]))
    assert said(loose, "driver packages")[0].startswith("not held: an unattended upgrade can replace libnvidia-comp")
    held = planned(driver=driver(packages=["nvidia-driver-595"], hold=["nvidia-driver-595"]))
    assert said(held, "driver packages")[0].startswith("held")
    assert said(planned(), "driver packages") == []


def test_a_module_really_compiles_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = driver_probe.read_compiler(sys.executable)
    assert found["error"] == ""
    assert found["path"] == shutil.which("gcc")
    assert found["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert list(tmp_path.iterdir()) == []


def test_a_compiler_that_fails_and_headers_that_lack_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # CASES A28.
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\necho 'stub.c:1: fatal error: cc1: not found' >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert driver_probe.read_compiler(sys.executable)["error"] == "stub.c:1: fatal error: cc1: not found"
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {tmp_path}/include 3.12\n")
    python.chmod(0o755)
    found = driver_probe.read_compiler(str(python))
    assert found["error"] == f"{tmp_path}/include/Python.h is not there"
    assert "does not start" in driver_probe.read_compiler(str(tmp_path / "none"))["error"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert driver_probe.read_compiler(sys.executable)["path"] == ""


def test_a_compiler_is_wanted_where_kernels_are_launched_or_built() -> None:
    known = host()["compiler"]
    lacking = {**known, "error": "/usr/include/python3.12/Python.h is not there"}
    plan = planned(compiler=lacking)
    assert plan.refusals[0].mend == "apt-get install -y gcc python3.12-dev"
    # None at all is no fault yet: the toolkit's role installs one.
    assert said(planned(compiler={**known, "path": ""}), "compiler")[0].startswith("none yet")
    builder = make_plan(host(gpus=[], compiler=lacking), model(), replace(WISHES, capability="8.9", method="wheel"))
    assert builder.refusals == []


def test_a_proc_file_of_the_closed_module_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15\n"
    )
    monkeypatch.setattr(driver_probe, "_MODULE", tmp_path / "version")
    assert driver_probe.read_driver("")["module"] == "535.183.01"
    assert driver_probe.read_driver("/usr/lib/libcuda.so.1")["library"] == ""
