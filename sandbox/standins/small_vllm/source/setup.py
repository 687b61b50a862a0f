"""Builds the extension as vLLM's own setup.py does: CMake with Ninja, sized, cached and told by the same variables."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeExtension(Extension):
    """An extension that CMake builds; the target is the last part of its name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[], py_limited_api=True)


class CMakeBuild(build_ext):
    """Configures once and builds all targets."""

    def compute_num_jobs(self) -> tuple[int, int]:
        """Jobs at once and nvcc's threads in each."""
        jobs = int(os.environ.get("MAX_JOBS") or len(os.sched_getaffinity(0)))
        threads = int(os.environ.get("NVCC_THREADS") or 1)
        return max(1, jobs // threads), threads

    def configure(self) -> None:
        """CMake's first half."""
        jobs, threads = self.compute_num_jobs()
        args = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", f"-DVLLM_TARGET_DEVICE={os.environ['VLLM_TARGET_DEVICE']}"]
        launcher = next((name for name in ("sccache", "ccache") if shutil.which(name)), None)
        if launcher:
            args += [f"-DCMAKE_{language}_COMPILER_LAUNCHER={launcher}" for language in ("C", "CXX", "CUDA")]
        args += [f"-DVLLM_PYTHON_EXECUTABLE={sys.executable}", f"-DVLLM_PYTHON_PATH={':'.join(sys.path)}"]
        args += [f"-DFETCHCONTENT_BASE_DIR={os.environ.get('FETCHCONTENT_BASE_DIR') or ROOT / '.deps'}"]
        args += [f"-DNVCC_THREADS={threads}", "-DCMAKE_JOB_POOL_COMPILE:STRING=compile"]
        args += [f"-DCMAKE_JOB_POOLS:STRING=compile={jobs}", *os.environ.get("CMAKE_ARGS", "").split()]
        subprocess.check_call(["cmake", str(ROOT), "-G", "Ninja", *args], cwd=self.build_temp)

    def build_extensions(self) -> None:
        """All extensions, then each into its place."""
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        self.configure()
        jobs, _ = self.compute_num_jobs()
        targets = [extension.name.rpartition(".")[2] for extension in self.extensions]
        subprocess.check_call(
            ["cmake", "--build", ".", f"-j={jobs}", *[f"--target={name}" for name in targets]], cwd=self.build_temp
        )
        for extension, target in zip(self.extensions, targets, strict=True):
            out = Path(self.get_ext_fullpath(extension.name)).absolute()
            prefix = out.parents[extension.name.count(".")]
            subprocess.check_call(
                ["cmake", "--install", ".", "--prefix", str(prefix), "--component", target], cwd=self.build_temp
            )


CUDA = os.environ.get("VLLM_TARGET_DEVICE") == "cuda"
setup(
    version=os.environ["VLLM_VERSION_OVERRIDE"],
    ext_modules=[CMakeExtension("vllm._C_stable_libtorch")] if CUDA else [],
    cmdclass={"build_ext": CMakeBuild},
)
