#!/usr/bin/env python3
"""Builds vLLM's extensions with the role's own choices and reports what it took: `whole_extensions.py --help`.

Needs nvcc, CMake 3.26, ninja and a host compiler; no network, and of torch nothing but headers, `share/cmake` and
`lib`. Sources that vLLM would fetch and that compile nothing below 8.0 are empty folders here.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = Path(__file__).resolve().parents[1] / "roles" / "vllm_source_build" / "files"
sys.path.insert(0, str(FILES))

import architectures  # noqa: E402  (these lie where the role keeps them)
import loadable_kernels  # noqa: E402

# What vLLM 0.26.0 to 0.33.0 fetches besides cutlass and flash-attention, by FetchContent's names; the last two it takes
# from a variable.
_FETCHED = ("TRITON_KERNELS", "DEEPSELECT", "FMHA_SM100", "FLASHMLA", "FLASHKDA", "TML_FA4")
_FETCHED_BY_VARIABLE = ("DEEPGEMM_SRC_DIR", "QUTLASS_SRC_DIR")
# What a trimmed toolkit lacks and CMake links by name: empty libraries of these names do, since a module may leave
# symbols open. It must name them all the same, or it does not load beside a real driver: hence --no-as-needed.
_LINKED = {"CUDA_cuda_driver_LIBRARY": "libcuda.so.1", "CUDA_nvrtc_LIBRARY": "libnvrtc.so.13"}


@dataclass(frozen=True, slots=True)
class Site:
    """What a build is made of.

    Attributes:
        tree: vLLM's source.
        torch: torch's package folder; of it `include`, `share/cmake`, `lib` and `utils/cpp_extension.py`.
        cutlass: cutlass's source; an empty folder where nothing is compiled.
        build: folder to build in.
        cuda_home: the toolkit.
        host_compiler: C++ compiler.
        include: headers of cuBLAS and its like, where the toolkit has none.
        programs: the PATH's beginning, where CMake and ninja are not on it.
    """

    tree: Path
    torch: Path
    cutlass: Path
    build: Path
    cuda_home: Path
    host_compiler: str
    include: Path | None = None
    programs: str = ""

    def environment(self) -> dict[str, str]:
        """What CMake and ninja see."""
        path = [*filter(None, [self.programs]), f"{self.cuda_home}/bin", os.environ["PATH"]]
        own = {"PATH": ":".join(path), "CUDA_HOME": str(self.cuda_home), "CXX": self.host_compiler}
        return os.environ | own | ({"CPATH": str(self.include)} if self.include else {})


def configure(site: Site, arch_list: str, arguments: list[str], jobs: int = 1) -> None:
    """Runs vLLM's own CMake with these words; its output is in `configure.log` of the build folder."""
    site.build.mkdir(parents=True)
    empty = site.build / "empty"
    (empty / "flash_mla").mkdir(parents=True)
    (empty / "flash_mla" / "flash_mla_interface.py").touch()  # CMake reads it, whatever is compiled
    python = _python_torch(site)
    linked = []
    for variable, name in _LINKED.items():
        library = site.build / name
        argv = [site.host_compiler, "-shared", f"-Wl,-soname,{name}", "-o", str(library), "-x", "c++", os.devnull]
        subprocess.run(argv, check=True)
        linked.append(f"-D{variable}={library}")
    linked.append("-DCMAKE_MODULE_LINKER_FLAGS=-Wl,--no-as-needed")
    fetched = [f"-DFETCHCONTENT_SOURCE_DIR_{name}={empty}" for name in _FETCHED]
    argv = [
        "cmake", str(site.tree), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DVLLM_TARGET_DEVICE=cuda",
        "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DVLLM_PYTHON_EXECUTABLE={sys.executable}",
        f"-DVLLM_PYTHON_PATH={':'.join(sys.path)}", "-DNVCC_THREADS=1", "-DCMAKE_JOB_POOL_COMPILE:STRING=compile",
        f"-DCMAKE_JOB_POOLS:STRING=compile={jobs}", f"-DCMAKE_CUDA_COMPILER={site.cuda_home}/bin/nvcc", *fetched,
        *linked, *arguments,
    ]  # fmt: skip
    own = {
        "PYTHONPATH": ":".join([str(python), *sys.path[1:]]), "TORCH_CUDA_ARCH_LIST": arch_list,
        "CUDAHOSTCXX": site.host_compiler, "VLLM_CUTLASS_SRC_DIR": str(site.cutlass),
        **dict.fromkeys(_FETCHED_BY_VARIABLE, str(empty)),
    }  # fmt: skip
    with (site.build / "configure.log").open("w") as log:
        subprocess.run(argv, cwd=site.build, env=site.environment() | own, stdout=log, stderr=log, check=True)


def _python_torch(site: Site) -> Path:
    """A Python torch that answers what CMake asks of it: its CMake folder, and what it gives every nvcc."""
    told = ast.parse((site.torch / "utils" / "cpp_extension.py").read_text())
    [flags] = [
        ast.literal_eval(node.value)
        for node in told.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMON_NVCC_FLAGS"
    ]
    utils = site.build / "python" / "torch" / "utils"
    utils.mkdir(parents=True)
    (utils.parent / "__init__.py").write_text("from torch import utils\n")
    (utils / "__init__.py").write_text(f"cmake_prefix_path = {str(site.torch / 'share' / 'cmake')!r}\n")
    (utils / "cpp_extension.py").write_text(f"COMMON_NVCC_FLAGS = {flags!r}\n")
    return utils.parent.parent


def units(build: Path) -> list[dict[str, str]]:
    """nvcc's compile commands of a configured build: `target`, `file`, `command`, `directory`."""
    found = json.loads((build / "compile_commands.json").read_text())
    # The object's folder is named after the target.
    return [
        {**unit, "target": unit["output"].split("CMakeFiles/")[1].split(".dir/")[0]}
        for unit in found
        if Path(shlex.split(unit["command"])[0]).name == "nvcc"
    ]


def main() -> int:
    """Configures, builds and reports."""
    words = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    words.add_argument("--tree", type=Path, required=True, help="vLLM's source")
    words.add_argument("--torch", type=Path, required=True, help="torch's package folder")
    words.add_argument("--cutlass", type=Path, required=True, help="cutlass's source")
    words.add_argument("--out", type=Path, required=True, help="folder to make: build folder and report.json")
    words.add_argument("--include", type=Path, help="headers of cuBLAS and its like, where the toolkit has none")
    words.add_argument("--cuda-home", type=Path, default=Path("/usr/local/cuda"))
    words.add_argument("--host-compiler", default="/usr/bin/g++")
    words.add_argument("--arch-list", default="7.5")
    words.add_argument("--leave-out", nargs="*", default=[], help="kernels to leave out, by name")
    words.add_argument("--unordered", action="store_true", help="in vLLM's own order, to compare with")
    words.add_argument("--resume", action="store_true", help="go on with what is in --out")
    words.add_argument("--only", nargs="*", default=[], help="ends of the paths of the only units to compile")
    words.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = words.parse_args()
    out = given.out.resolve()
    site = Site(
        given.tree.resolve(), given.torch.resolve(), given.cutlass.resolve(), out / "build", given.cuda_home,
        given.host_compiler, given.include and given.include.resolve(),
    )  # fmt: skip
    decided = loadable_kernels.decide(site.tree, given.arch_list, given.leave_out)
    arguments = [word for word in decided.cmake_arguments if not (given.unordered and word.startswith("-DFLEET_FIRST"))]
    began = time.monotonic()
    if not given.resume:
        configure(site, given.arch_list, arguments, given.jobs)
    configured_s = time.monotonic() - began
    found = units(site.build)
    objects = [
        os.path.relpath(unit["output"], site.build)
        for unit in found
        if any(unit["file"].endswith(name) for name in given.only)
    ]
    report = {
        "decided": decided.words, "arguments": arguments, "jobs": given.jobs, "leave_out": given.leave_out,
        "configured_s": round(configured_s, 1), "units": len(found),
        "units_by_target": Counter(unit["target"] for unit in found),
        "warnings": [line for line in _lines(site.build / "configure.log") if "expected for CUDA build" in line],
        **built(site, given.jobs, objects),
    }  # fmt: skip
    (out / "report.json").write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    return 0 if report["ended"] == 0 else 1


def built(site: Site, jobs: int, targets: list[str]) -> dict[str, Any]:
    """Runs ninja, on all extensions where no target is named; seconds, core-minutes, memory, architectures."""
    build = site.build
    began, free_mib = time.monotonic(), [_available_mib()]
    with (build / "ninja.log").open("w") as log:
        ninja = subprocess.Popen(
            ["ninja", f"-j{jobs}", *targets], cwd=build, env=site.environment(), stdout=log, stderr=log
        )
        while ninja.poll() is None:
            time.sleep(0.2)
            free_mib.append(_available_mib())
    wall_s = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took: dict[str, tuple[float, float]] = {}
    for line in _lines(build / ".ninja_log")[1:]:
        start, end, _, name, _ = line.split("\t")
        took[name] = (int(start) / 1000, (int(end) - int(start)) / 1000)
    held = architectures.of_files(sorted(build.rglob("*.abi3.so")), site.cuda_home)
    longest = sorted(((seconds, start, name) for name, (start, seconds) in took.items()), reverse=True)
    return {
        "ended": ninja.returncode, "wall_s": round(wall_s, 1),
        "core_minutes": round((used.ru_utime + used.ru_stime) / 60, 1),
        "largest_process_mib": used.ru_maxrss // 1024, "most_memory_mib": free_mib[0] - min(free_mib),
        "longest": [
            {"unit": name.rpartition(".dir/")[2], "s": round(seconds, 1), "started_s": round(start, 1)}
            for seconds, start, name in longest[:15]
        ],
        "architectures": {name: code.cubins for name, code in held.items()},
        "last_words": _lines(build / "ninja.log")[-5:] if ninja.returncode else [],
    }  # fmt: skip


def _available_mib() -> int:
    [line] = [line for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    return int(line.split()[1]) // 1024


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.is_file() else []


if __name__ == "__main__":
    raise SystemExit(main())
