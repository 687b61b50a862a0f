"""What the NVIDIA driver, the kernels and the C compiler of a host say of themselves. Changes nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_MODULE = Path("/proc/driver/nvidia/version")
_MODULES = Path("/lib/modules")
_BOOT = Path("/boot")
# Asked in a child process: a driver library that crashes must not take the probe with it. Numbers are the CUDA
# driver API's CUdevice_attribute: 8 shared memory per block, 97 the same with opt-in, 75 and 76 the capability.
# The library's file carries its version, also where it refuses to speak with another version's module.
_CUDA = """
import ctypes, json, os
told = {"library": "", "cuda": "", "gpus": [], "error": ""}
def ask(name, *args):
    code = getattr(cuda, name)(*args)
    if code:
        raise OSError(f"{name} answered {code}")
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    with open("/proc/self/maps") as maps:
        told["library"] = next((os.path.realpath(line.split()[-1]) for line in maps if "/libcuda.so" in line), "")
    ask("cuInit", 0)
    version, count, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    ask("cuDriverGetVersion", ctypes.byref(version))
    ask("cuDeviceGetCount", ctypes.byref(count))
    told["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    for index in range(count.value):
        device, size, name = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(128)
        ask("cuDeviceGet", ctypes.byref(device), index)
        ask("cuDeviceGetName", name, 128, device)
        ask("cuDeviceTotalMem_v2", ctypes.byref(size), device)
        def attribute(number):
            ask("cuDeviceGetAttribute", ctypes.byref(value), number, device)
            return value.value
        told["gpus"].append({"name": name.value.decode(), "capability": f"{attribute(75)}.{attribute(76)}",
            "memory_bytes": size.value, "shared_memory_per_block_bytes": attribute(8),
            "shared_memory_per_block_optin_bytes": attribute(97)})
except OSError as error:
    told["error"] = str(error)
    told["gpus"] = []
print(json.dumps(told))
"""
# What Triton does at run time: a module of C for this Python, compiled and linked.
_STUB = """#include <Python.h>
static struct PyModuleDef def = {PyModuleDef_HEAD_INIT, "stub", 0, -1, 0};
PyMODINIT_FUNC PyInit_stub(void) { return PyModule_Create(&def); }
"""


def read_gpus() -> dict[str, Any]:
    """The GPUs, the CUDA that the driver speaks, the library's file, and why there is no GPU where there is none."""
    command = [sys.executable, "-c", _CUDA]
    silent = {"library": "", "cuda": "", "gpus": []}
    try:
        done = subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return {**silent, "error": "the driver library did not answer within 60 s"}
    if done.returncode:
        words = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return {**silent, "error": words}
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def read_driver(library: str) -> dict[str, Any]:
    """Versions of the driver's two halves, and whether the kernels that may run have its module.

    Args:
        library: file of the CUDA driver library, its name ending in the version where it is NVIDIA's own.

    Returns:
        `version` (of the loaded module, else as nvidia-smi tells), `module`, `library`, `kernel` (the running one),
        `newest_kernel`, `without_module` (of these two), `packages` and those of them on `hold`.
    """
    module = _found(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", _MODULE.read_text() if _MODULE.exists() else "")
    running = os.uname().release
    newest = newest_kernel()
    packages = _packages()
    return {
        "version": module or _smi_version(),
        "module": module,
        "library": _found(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)?)$", library),
        "kernel": running,
        "newest_kernel": newest,
        "without_module": [name for name in dict.fromkeys((running, newest)) if name and not has_module(name)],
        "packages": sorted(packages),
        "hold": sorted(name for name, wanted in packages.items() if wanted == "hold"),
    }


def newest_kernel() -> str:
    """The newest kernel that a reboot could start; empty where none is installed (a container)."""
    installed = [path.name for path in _MODULES.glob("*") if (_BOOT / f"vmlinuz-{path.name}").exists()]
    return max(installed, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], default="")


def has_module(kernel: str) -> bool:
    """Whether modprobe would find the NVIDIA module for a kernel; one without any list of modules is not judged."""
    try:
        listed = (_MODULES / kernel / "modules.dep").read_text()
    except OSError:
        return True
    return bool(re.search(r"(^|/)nvidia\.ko(\.\w+)?:", listed, re.M))


def read_compiler(python: str) -> dict[str, str]:
    """Whether a C module for a Python compiles here, tried in a folder that is gone afterwards.

    Returns:
        `path` of the compiler, the folder of the `headers`, `version` of that Python, and the `error` of the trial.
    """
    ask = "import sys, sysconfig; print(sysconfig.get_path('include'), '%d.%d' % sys.version_info[:2])"
    path = next((found for name in ("gcc", "clang") if (found := shutil.which(name))), "")
    try:
        told = subprocess.run([python, "-Ic", ask], cwd="/", capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return {"path": path, "headers": "", "python": "", "error": f"{python} does not start: {error}"}
    headers, version = told.stdout.split()
    if not (Path(headers) / "Python.h").is_file():
        error_words = f"{headers}/Python.h is not there"
    else:
        error_words = _compile_error(path, headers) if path else ""
    return {"path": path, "headers": headers, "python": version, "error": error_words}


def _compile_error(compiler: str, headers: str) -> str:
    """What the compiler has against the stub; empty where it made the module."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "stub.c"
            source.write_text(_STUB)
            argv = [compiler, "-shared", "-fPIC", f"-I{headers}", "-o", str(source.with_suffix(".so")), str(source)]
            done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    lines = done.stderr.strip().splitlines()
    return next((line for line in lines if "error" in line), (lines or [f"status {done.returncode}"])[-1])


def _packages() -> dict[str, str]:
    """Driver packages and what dpkg is to do with them (`install`, `hold`); none where the driver has none."""
    query = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${db:Status-Want} ${Package}\\n"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False)
    except OSError:
        return {}
    rows = (line.split() for line in done.stdout.splitlines())
    driver = re.compile(r"(lib)?nvidia-|linux-modules-nvidia-|cuda-drivers")
    return {name: wanted for status, wanted, name in rows if status == "installed" and driver.match(name)}


def _smi_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def _found(expression: str, text: str) -> str:
    match = re.search(expression, text)
    return match[1] if match else ""
