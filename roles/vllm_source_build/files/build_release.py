#!/usr/bin/env python3
"""Builds one release on the host, detached from whoever asked: `build_release.py SPEC.json`.

The release's record is written last, so a folder without one is an unfinished build that the next run does again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuda_build
import host_pip_config
from job import Job, JobError, write_whole
from torch_guard import AMI_OWNED, TorchGuard

# The Rust front end as setuptools-rust installs it (vLLM's tools/build_rust.py, target vllm.vllm-rs).
RUST_FRONTEND = "vllm/vllm-rs"
_MIB = 1024 * 1024
_EXPECTED_TORCH = re.compile(r"Pytorch version \S+ expected for \w+ build, saw \S+ instead")


class Build(Job):
    """One release, from its spec to its record."""

    def __init__(self, spec_path: Path) -> None:
        super().__init__(spec_path)
        self.release = Path(self.spec["path"])
        self.python = self.release / "bin" / "python"
        self.from_source = self.spec["method"] == "source"
        self.compiles_cuda = self.from_source and self.spec["target_device"] == "cuda"
        self.warnings: list[str] = []
        self.judged: dict[str, Any] = {}
        self.unpacked = False
        self.torch = TorchGuard(self.spec["torch"], self.ask)

    def run(self) -> None:
        """Runs all stages, with the source held where there is one."""
        if not self.from_source:
            return super().run()
        with self.source_lock():
            return super().run()

    def stages(self) -> list[Callable[[], None]]:
        """What is done, in order: all that can be refused comes before all that takes long."""
        before = [self.check_room, self.make_tools]
        source = [self.unpack, self.check_source, self.check_toolchain, self.make_environment, self.build_wheel]
        return [
            *before,
            *(source if self.from_source else [self.make_environment]),
            self.install,
            self.check,
            self.record,
        ]

    def check_room(self) -> None:
        """Free bytes and inodes where this build writes, against its measured need."""
        places = {"builds": self.home, "root": self.release.parent}
        if self.from_source:
            places["sources"] = self.tree.parent
        need: dict[int, list[Any]] = {}
        for name, place in sorted(places.items()):
            place.mkdir(parents=True, exist_ok=True)
            entry = need.setdefault(place.stat().st_dev, [0, 0, []])
            entry[0] += self.spec["need"][name]["mib"]
            entry[1] += self.spec["need"][name]["inodes"]
            entry[2].append(place)
        for mib, inodes, together in need.values():
            found = os.statvfs(together[0])
            free = found.f_bavail * found.f_frsize // _MIB
            short = [f"{free:,} MiB free, and {mib:,} are wanted"] if free < mib else []
            # Filesystems without a fixed inode table (btrfs) report none at all.
            if found.f_files and found.f_favail < inodes:
                short.append(f"{found.f_favail:,} inodes free, and {inodes:,} are wanted")
            if short:
                where = ", ".join(map(str, together))
                raise JobError(" and ".join(short), where, f"free room or grow the volume: df -h {where}", refused=True)

    def take_back(self) -> None:
        """A refusal leaves no source behind that this run unpacked."""
        if self.unpacked:
            shutil.rmtree(self.tree, ignore_errors=True)

    def unpack(self) -> None:
        """A copy of the source to build in, always at the same place, so that a compiler cache sees the same paths."""
        source = Path(self.spec["source"]["path"])
        digest = self.spec["source"]["digest"]
        shutil.rmtree(self.tree, ignore_errors=True)
        self.unpacked = True
        if self.spec["source"]["kind"] == "git":
            git = ["git", "-C", str(source / "checkout")]
            self.command([*git, "reset", "-q", "--hard", digest], mend=f"rm -r {source}, then converge again")
            self.command([*git, "clean", "-q", "-ffdx"])
            self.command(["cp", "-a", str(source / "checkout"), str(self.tree)])
            return
        archive = source / "sdist.tar.gz"
        if hashlib.sha256(archive.read_bytes()).hexdigest() != digest:
            raise JobError(
                f"{archive.name} is not the file any more that was fetched, sha256 {digest}",
                str(archive),
                f"rm -r {source}, then converge again",
            )
        self.tree.mkdir()
        self.command(["tar", "-xzf", str(archive), "-C", str(self.tree), "--strip-components=1", "--no-same-owner"])

    def check_source(self) -> None:
        """Every variable of vLLM's that the release sets is read somewhere in the source's build."""
        files = [self.tree / "setup.py", self.tree / "CMakeLists.txt", self.tree / "vllm/envs.py"]
        files += [*self.tree.glob("cmake/**/*.cmake"), *self.tree.glob("tools/*.py")]
        texts = [file.read_text(errors="replace") for file in files if file.is_file()]
        for name in sorted(self.spec["environment"]):
            if name.startswith("VLLM_") and not any(re.search(rf"\b{name}\b", text) for text in texts):
                raise JobError(
                    f"{name} is set, and nothing in the build of {self.spec['version']} reads it",
                    f"vllm_source_build_releases: {self.spec['name']}",
                    f"remove {name} from that entry's environment",
                    refused=True,
                )

    def check_toolchain(self) -> None:
        """Compilers that go together and with torch, and a Rust toolchain that runs, where the build needs them."""
        if self.compiles_cuda:
            self.warnings += cuda_build.judge_toolchain(
                Path(self.spec["cuda_home"]),
                self.spec["host_compiler"],
                self.spec["torch"]["cuda"],
                (self.tree / "CMakeLists.txt").read_text(),
            )
        if self.spec["rust_frontend"]:
            cargo = Path(self.spec["rust_home"]) / "cargo" / "bin" / "cargo"
            try:
                self.command([str(cargo), "--version"], cwd=self.tree, env=self.rust_environment())
            except JobError as error:
                raise JobError(
                    f"no cargo {self.spec['rust_toolchain']} runs, and the Rust front end needs it: {error.what}",
                    str(cargo),
                    "./runner.py converge --tags rust",
                    refused=True,
                ) from error
            # The front end builds its own OpenSSL, whose Configure wants perl's core modules.
            for argv in (["make", "--version"], ["perl", "-MIPC::Cmd", "-e1"]):
                self.command(argv, mend="apt-get install make perl")

    def make_environment(self) -> None:
        """The release's own environment, on the interpreter of the AMI's torch, which a path file makes visible."""
        shutil.rmtree(self.release, ignore_errors=True)
        self.release.parent.mkdir(parents=True, exist_ok=True)
        self.uv("venv", "-q", "--python", self.spec["torch"]["python"], str(self.release))
        self.site_packages.joinpath("ami_torch.pth").write_text(self.spec["torch"]["site_packages"] + "\n")
        self.torch.judge("make_environment", self.site_packages)

    def build_wheel(self) -> None:
        """Builds the wheel in the copy of the source, against the AMI's torch, without build isolation."""
        scripts = [self.tree / "tools/use_existing_torch.py", self.tree / "use_existing_torch.py"]
        script = next((path for path in scripts if path.is_file()), None)
        if script is None:
            raise JobError(
                "the source has no use_existing_torch.py, without which its build replaces the AMI's torch",
                str(self.tree),
                "set version in vllm_source_build_releases to 0.26.0 or newer",
            )
        self.command([str(self.python), str(script), "--prefix"], cwd=self.tree)
        requires = tomllib.loads((self.tree / "pyproject.toml").read_text())["build-system"]["requires"]
        if requires:
            self.pip_install(*requires)
            self.torch.judge("build_requirements", self.site_packages)
        shutil.rmtree(self.home / "dist", ignore_errors=True)
        self.uv(
            "build", "--wheel", "--no-build-isolation", "--python", str(self.python),
            "--out-dir", str(self.home / "dist"), str(self.tree), env=self.build_environment(),
            mend=f"tail -50 {self.log_path}",
        )  # fmt: skip
        self.torch.judge("build_wheel", self.site_packages)

    def build_environment(self) -> dict[str, str]:
        """What the source's build reads; the release's own variables win over MAX_JOBS and its like."""
        version = self.spec["version"]
        path = [f"{self.release}/bin", self.environment()["PATH"]]
        found = {
            # The tree is changed (torch's pins) or has no .git: either way setuptools-scm cannot tell the version.
            "VLLM_VERSION_OVERRIDE": version,
            "SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VLLM": version,
            "VLLM_TARGET_DEVICE": self.spec["target_device"],
            "VLLM_REQUIRE_RUST_FRONTEND": "1" if self.spec["rust_frontend"] else "0",
        }
        if self.compiles_cuda:
            jobs = cuda_build.compile_jobs(_available_mib(), os.cpu_count() or 1, self.spec["mib_per_job"])
            path.insert(1, f"{self.spec['cuda_home']}/bin")
            found |= {
                "CUDA_HOME": self.spec["cuda_home"],
                "CXX": self.spec["host_compiler"],
                "CUDAHOSTCXX": self.spec["host_compiler"],
                "TORCH_CUDA_ARCH_LIST": self.spec["arch_list"],
                "MAX_JOBS": str(jobs),
                # Threads of nvcc share a unit's architectures out and divide MAX_JOBS: with few of them only a loss.
                "NVCC_THREADS": "1",
            }
        if self.spec["rust_frontend"]:
            path.insert(1, f"{self.spec['rust_home']}/cargo/bin")
            found |= self.rust_environment()
        return {**found, "PATH": ":".join(path), **self.spec["environment"]}

    def rust_environment(self) -> dict[str, str]:
        """The toolchain by name, so that rustup neither guesses nor downloads another."""
        home = self.spec["rust_home"]
        found = {"RUSTUP_HOME": f"{home}/rustup", "CARGO_HOME": f"{home}/cargo", "RUSTUP_AUTO_INSTALL": "0"}
        return {**found, "RUSTUP_TOOLCHAIN": self.spec["rust_toolchain"]} if self.spec["rust_toolchain"] else found

    def install(self) -> None:
        """Installs the wheel and what it needs, torch and its kin left to the AMI."""
        if self.from_source:
            self.pip_install(str(next((self.home / "dist").glob("*.whl"))))
        else:
            self.pip_install(f"{self.spec['distribution']}=={self.spec['version']}")
        self.torch.judge("install", self.site_packages)

    def check(self) -> None:
        """What was asked for is there: torch still the AMI's, the version, libraries, device code, the front end."""
        name = self.spec["distribution"]
        version = self.ask(f"import importlib.metadata; print(importlib.metadata.version({name!r}))").split()[-1]
        self.found = {**self.torch.judge("check", self.site_packages), "version": version}
        if self.found["version"].split("+")[0] != self.spec["version"]:
            raise JobError(
                f"version {self.found['version']} was built and {self.spec['version']} is wanted",
                str(self.release),
                "set vllm_source_build_releases[].version to what the source builds",
            )
        self.check_libraries()
        self.check_architectures()
        self.check_rust_frontend()

    def check_libraries(self) -> None:
        """Every library that vLLM's compiled modules name is found; the driver's own is the GPU host's matter."""
        ami = Path(self.spec["torch"]["site_packages"])
        folders = [ami / "torch" / "lib", *ami.glob("nvidia/*/lib"), *self.site_packages.glob("nvidia/*/lib")]
        # Libraries that wheels bundle lie beside the modules that name them.
        folders += self.site_packages.glob("*.libs")
        for module in sorted((self.site_packages / "vllm").glob("*.so")):
            search = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
            listing = self.command(["ldd", str(module)], env=search, capture=True)
            missing = [line.split()[0] for line in listing.splitlines() if line.endswith("not found")]
            missing = [name for name in missing if not name.startswith("libcuda.so")]
            if missing:
                raise JobError(
                    f"{module.name} wants {', '.join(missing)}, and the system has none",
                    str(module),
                    f"apt-file search {missing[0]}; install what carries it, then converge again",
                )

    def check_architectures(self) -> None:
        """The device code inside vLLM's compiled modules runs on the capabilities that were asked for."""
        if not self.compiles_cuda:
            return
        folder = self.site_packages / "vllm"
        found = cuda_build.architectures(sorted(folder.rglob("*.so")))
        cuda_build.judge_architectures(found, self.spec["arch_list"], folder)
        self.judged["architectures"] = found

    def check_rust_frontend(self) -> None:
        """The front end's program is there where it is required; else the record says that it is not, and why."""
        program = self.site_packages / RUST_FRONTEND
        runs = program.is_file() and os.access(program, os.X_OK) and program.read_bytes()[:4] == b"\x7fELF"
        required = self.spec["rust_frontend"]
        if required and not runs:
            found = "no program" if program.exists() else "not there"
            raise JobError(
                f"{RUST_FRONTEND} is {found}, and the Rust front end is wanted",
                str(program),
                f"grep -i rust {self.log_path}",
            )
        if self.from_source:
            off = f"off: rust_frontend is false, or not set with target_device {self.spec['target_device']}"
            self.judged["rust_frontend"] = f"required, and {RUST_FRONTEND} is there" if required else off

    def record(self) -> None:
        """The release's record, last of all: with it the release exists."""
        with self.log_path.open() as log:
            log.seek(self.log_began)
            judged = self.spec.get("torch_judgement") or "no judgement is known"
            self.warnings += [f"{line}: {judged}" for line in sorted(set(_EXPECTED_TORCH.findall(log.read())))]
        keys = ("name", "build_id", "method", "distribution", "target_device", "inputs")
        wheel = next((self.home / "dist").glob("*.whl")).name if self.from_source else None
        record = {
            **{key: self.spec[key] for key in keys},
            **self.judged,
            "path": str(self.release),
            "python": str(self.python),
            "site_packages": str(self.site_packages),
            "version": self.found["version"],
            "torch": self.found["torch"],
            "cuda": self.found["cuda"],
            "source": {key: value for key, value in self.spec["source"].items() if key in ("kind", "digest", "tag")},
            "rust_toolchain": self.spec["source"].get("rust_toolchain", ""),
            "wheel": wheel,
            "warnings": self.warnings,
            "seconds": {**self.stage_seconds, "total": round(time.time() - self.began, 1)},
        }
        write_whole(self.release / "release.json", record)
        # uv links from its cache: a file edited in the release would be edited in the cache as well.
        for folder in (self.home / "uv-cache", self.home / "tmp"):
            shutil.rmtree(folder, ignore_errors=True)
        if self.from_source:
            shutil.rmtree(self.tree, ignore_errors=True)

    def ask(self, program: str) -> str:
        """What a program text prints, run by the release's Python."""
        return self.command([str(self.python), "-c", program], capture=True)

    @property
    def tree(self) -> Path:
        """The copy of the source that is built in."""
        return Path(self.spec["source"]["path"]) / "tree"

    @property
    def site_packages(self) -> Path:
        """The release's own package folder."""
        return next(self.release.glob("lib/python3.*/site-packages"))

    def pip_install(self, *requirements: str) -> None:
        """Installs into the release; the AMI's packages are overridden away from the resolution."""
        overrides = self.home / "ami-owned.txt"
        overrides.write_text("".join(f'{name}; sys_platform == "never"\n' for name in AMI_OWNED))
        indexes = host_pip_config.for_uv(host_pip_config.read(str(self.tools / "bin/python")))
        self.uv(
            "pip", "install", "-q", "--python", str(self.python), "--override", str(overrides),
            *indexes, *requirements,
        )  # fmt: skip

    def uv(self, *args: str, env: dict[str, str] | None = None, mend: str = "") -> None:
        """Runs uv with the system's certificates."""
        own = {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "UV_HTTP_TIMEOUT": "180"}
        own["UV_CACHE_DIR"] = str(self.home / "uv-cache")
        mend = mend or "check the package index that pip is configured with (pip config list), then converge again"
        self.command([str(self.tools / "bin/uv"), *args], env={**own, **(env or {})}, mend=mend)


def _available_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


if __name__ == "__main__":
    Build(Path(sys.argv[1])).run()
