#!/usr/bin/env python3
"""Builds one release on the host, detached from whoever asked: `build_release.py SPEC.json`.

The release's record is written last, so a folder without one is an unfinished build that the next run does again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import architectures
import build_environment
import build_variables
import compiling
import cuda_build
import host_pip_config
import loadable_kernels
from job import JobError, started, write_whole
from store_stages import StoreStages
from torch_guard import TorchGuard

# The Rust front end as setuptools-rust installs it (vLLM's tools/build_rust.py, target vllm.vllm-rs).
RUST_FRONTEND = "vllm/vllm-rs"
_MIB = 1024 * 1024
_EXPECTED_TORCH = re.compile(r"Pytorch version \S+ expected for \w+ build, saw \S+ instead")


class Build(StoreStages):
    """One release, from its spec to its record."""

    def __init__(self, spec_path: Path) -> None:
        super().__init__(spec_path)
        self.from_source = self.spec["method"] == "source"
        self.compiles_cuda = self.from_source and self.spec["target_device"] == "cuda"
        self.kernels = loadable_kernels.Decided()
        self.unpacked = False
        self.torch = TorchGuard(self.spec["torch"], self.ask)

    def run(self) -> None:
        """Runs all stages, with the source held where there is one."""
        if not self.from_source:
            return super().run()
        try:
            with self.source_lock():
                return super().run()
        finally:
            told = self.progress()
            self.release_lock(f"failed: {told['what']}" if "what" in told else "was ended")

    def stages(self) -> list[Callable[[], None]]:
        """What is done, in order: all that can be refused comes before all that takes long."""
        before = [self.check_room, self.make_tools]
        if not self.from_source:
            return [*before, self.make_environment, self.install, self.check, self.record]
        prepare = [self.look_in_store, self.unpack, self.check_source, self.check_toolchain, self.make_environment]
        return [
            *before,
            *prepare,
            self.build_wheel,
            *([self.check_architectures] if self.compiles_cuda else []),
            self.gather,
            self.install,
            self.check,
            self.publish,
            self.record,
        ]

    def check_room(self) -> None:
        """Free bytes and inodes where this build writes (TMPDIR is below `builds`), against its measured need."""
        places = {"builds": self.home, "root": self.release.parent}
        if self.from_source:
            places["sources"] = self.tree.parent
        if self.compiles_cuda:
            places["cache"] = Path(self.spec["cache"])
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
            self.tree_stamp.unlink(missing_ok=True)
            shutil.rmtree(self.tree, ignore_errors=True)

    def unpack(self) -> None:
        """A copy of the source to build in, always at the same place, so that a compiler cache sees the same paths.

        One that this same build has begun in is kept, with all that is compiled in it.
        """
        source = Path(self.spec["source"]["path"])
        digest = self.spec["source"]["digest"]
        mine = {"build_id": self.spec["build_id"], "digest": digest}
        if self.tree.is_dir() and self.tree_stamp.is_file() and json.loads(self.tree_stamp.read_text()) == mine:
            return
        self.tree_stamp.unlink(missing_ok=True)
        shutil.rmtree(self.tree, ignore_errors=True)
        self.unpacked = True
        self.unpack_into_tree(source, digest)
        write_whole(self.tree_stamp, mine)

    def unpack_into_tree(self, source: Path, digest: str) -> None:
        """The source as it came, where it still is the one that was fetched."""
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
        """What to compile of the source, and that each of the release's variables is read somewhere in its build."""
        if self.compiles_cuda:
            self.kernels = loadable_kernels.decide(self.tree, self.spec["arch_list"], self.spec["leave_out"])
            self.judged["kernels"] = self.kernels.words
        where = f"vllm_source_build_releases: {self.spec['name']}"
        build_variables.judge(self.tree, self.spec["version"], self.spec["environment"], where, self.kernels.taken)

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
        jobs = build_environment.jobs_of(self.spec) if self.compiles_cuda else 1
        environment = build_environment.build_environment(
            self.spec, self.release, self.tree, self.environment()["PATH"], jobs,
            self.rust_environment() if self.spec["rust_frontend"] else {},
        )  # fmt: skip
        if self.compiles_cuda:
            self.judged["jobs"] = jobs
        compiling.followed(self, lambda: self.compile(self.kernels.told(environment)), self.tree, jobs)

    def compile(self, environment: dict[str, str]) -> None:
        """The wheel, into `dist`."""
        self.uv(
            "build", "--wheel", "--no-build-isolation", "--python", str(self.python),
            "--out-dir", str(self.home / "dist"), str(self.tree), env=environment,
            mend=f"tail -50 {self.log_path}",
        )  # fmt: skip
        self.torch.judge("build_wheel", self.site_packages)

    def rust_environment(self) -> dict[str, str]:
        """The toolchain by name, so that rustup neither guesses nor downloads another."""
        home = self.spec["rust_home"]
        found = {"RUSTUP_HOME": f"{home}/rustup", "CARGO_HOME": f"{home}/cargo", "RUSTUP_AUTO_INSTALL": "0"}
        return {**found, "RUSTUP_TOOLCHAIN": self.spec["rust_toolchain"]} if self.spec["rust_toolchain"] else found

    def check_architectures(self) -> None:
        """The device code in the wheel is for the capabilities that were asked for, before anybody has the wheel."""
        [wheel] = (self.home / "dist").glob("*.whl")
        found = architectures.of_wheel(wheel, Path(self.spec["cuda_home"]))
        architectures.judge(found, self.spec["arch_list"], wheel)
        self.judged["architectures"] = {name: held.cubins for name, held in found.items()}

    def install(self) -> None:
        """Installs the wheel and what it needs, torch and its kin left to the AMI."""
        if self.manifest is not None:
            self.install_wheelhouse()
        elif self.from_source:
            wheel = next((self.home / "dist").glob("*.whl"))
            self.pip_install(f"{self.spec['distribution']} @ {wheel.as_uri()}")
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
            "wheel": self.wheel_name(),
            "lock": self.spec.get("lock") or "none: what the index gave was held to the index's own digests",
            "warnings": self.warnings,
            "seconds": {**self.stage_seconds, "total": round(time.time() - self.began, 1)},
        }
        write_whole(self.release / "release.json", record)
        # uv links from its cache: a file edited in the release would be edited in the cache as well.
        for folder in (self.home / "uv-cache", self.home / "tmp"):
            shutil.rmtree(folder, ignore_errors=True)
        self.clear_wheelhouse()
        if self.from_source:
            self.tree_stamp.unlink(missing_ok=True)
            shutil.rmtree(self.tree, ignore_errors=True)

    def wheel_name(self) -> str | None:
        """The file of the wheel that was built, here or elsewhere; None where nothing was."""
        if self.manifest is not None:
            own = self.spec["distribution"]
            return next(str(wheel["file"]) for wheel in self.manifest["wheels"] if wheel["name"] == own)
        return next((self.home / "dist").glob("*.whl")).name if self.from_source else None

    @property
    def tree_stamp(self) -> Path:
        """Which build the tree is whole for, beside it."""
        return self.tree.with_name("tree.json")

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
        """Installs into the release, the lock's files alone where it has one; the AMI's packages are left out."""
        indexes = host_pip_config.for_uv(host_pip_config.read(str(self.tools / "bin/python")))
        words = ["--override", str(self.overrides()), *requirements]
        if self.spec.get("lock"):
            words = ["--no-deps", "--require-hashes", "-r", str(self.locked(*requirements))]
        self.uv("pip", "install", "-q", "--python", str(self.python), *indexes, *words)


if __name__ == "__main__":
    started(Build(Path(sys.argv[1])))
