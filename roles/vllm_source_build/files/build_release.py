#!/usr/bin/env python3
"""Builds one release on the host, detached from whoever asked: `build_release.py SPEC.json`.

Progress goes to `status.json` beside the spec, output to `build.log`; the release's record is written last, so a
folder without one is an unfinished build that the next run does again. Standard library alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import host_pip_config

LIB = Path(__file__).resolve().parent
# What the AMI's own environment provides; a resolver that never sees these cannot replace them.
AMI_OWNED = ("torch", "torchvision", "torchaudio", "torchcodec", "triton")
_PIP_TO_UV = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
_EXPECTED_TORCH = re.compile(r"Pytorch version \S+ expected for \w+ build, saw \S+ instead")
_PROBE = """
import importlib.metadata as m, json, torch
wanted = json.loads(%r)
print(json.dumps({"torch": torch.__version__, "cuda": torch.version.cuda, "file": torch.__file__,
    "version": m.version(wanted["distribution"])}))
"""


class BuildError(Exception):
    """A build that cannot go on: what is wrong, where, and how to mend it."""

    def __init__(self, what: str, where: str, mend: str) -> None:
        super().__init__(what)
        self.what, self.where, self.mend = what, where, mend


class Build:
    """One release, from its spec to its record."""

    def __init__(self, spec_path: Path) -> None:
        self.home = spec_path.parent
        self.spec: dict[str, Any] = json.loads(spec_path.read_text())
        self.release = Path(self.spec["path"])
        self.tools = Path(self.spec["tools"])
        self.python = self.release / "bin" / "python"
        self.log = (self.home / "build.log").open("a")
        (self.home / "tmp").mkdir(exist_ok=True)
        self.began = time.time()
        self.warnings: list[str] = []
        self.stage_seconds: dict[str, float] = {}

    def run(self) -> None:
        """Runs all stages; the status file tells the outcome."""
        stages = [self.make_tools, self.make_environment]
        stages += [self.fetch, self.build_wheel] if self.spec["method"] == "source" else []
        stages += [self.install, self.check]
        try:
            for number, stage in enumerate(stages, 1):
                began = time.time()
                self.status("running", stage=stage.__name__, number=number, of=len(stages))
                stage()
                self.stage_seconds[stage.__name__] = round(time.time() - began, 1)
            self.record()
            self.status("done", stage="done", number=len(stages), of=len(stages))
        except BuildError as error:
            self.status("failed", what=error.what, where=error.where, mend=error.mend)
            raise SystemExit(1) from error
        except Exception as error:
            where = str(self.home / "build.log")
            self.status("failed", what=f"unexpected: {error!r}", where=where, mend=f"tail -50 {where}")
            raise

    def status(self, state: str, **more: Any) -> None:
        """Writes the status file whole."""
        part = self.home / "status.part"
        part.write_text(
            json.dumps({"state": state, "began": self.began, "updated": time.time(), "pid": os.getpid(), **more})
        )
        part.replace(self.home / "status.json")

    def make_tools(self) -> None:
        """uv and the index client, in an environment of their own, by hash."""
        wanted = (LIB / "tools-requirements.txt").read_text()
        stamp = self.tools / "requirements.stamp"
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        shutil.rmtree(self.tools, ignore_errors=True)
        self.command([sys.executable, "-m", "venv", str(self.tools)])
        self.command(
            [
                str(self.tools / "bin/pip"),
                "install",
                "-q",
                "--no-cache-dir",
                "--require-hashes",
                "-r",
                str(LIB / "tools-requirements.txt"),
            ],
            mend="check the package index that pip is configured with (pip config list), then converge again",
        )
        stamp.write_text(wanted)

    def make_environment(self) -> None:
        """The release's own environment, on the interpreter of the AMI's torch, which a path file makes visible."""
        shutil.rmtree(self.release, ignore_errors=True)
        self.release.parent.mkdir(parents=True, exist_ok=True)
        self.uv("venv", "-q", "--python", self.spec["torch"]["python"], str(self.release))
        self.site_packages().joinpath("ami_torch.pth").write_text(self.spec["torch"]["site_packages"] + "\n")

    def fetch(self) -> None:
        """The source: a digest-checked sdist, or a tag of a git repository."""
        source = self.source()
        shutil.rmtree(source, ignore_errors=True)
        if self.spec.get("git_url"):
            argv = [
                "git",
                "clone",
                "-q",
                "--depth",
                "1",
                "--branch",
                f"v{self.spec['version']}",
                self.spec["git_url"],
            ]
            self.command([*argv, str(source)], mend="check vllm_source_build_git_url and the version's tag")
            return
        archive = self.home / "sdist.tar.gz"
        self.command(
            [
                str(self.tools / "bin/python"), str(LIB / "fetch_sdist.py"), self.spec["distribution"],
                self.spec["version"], self.spec.get("sha256") or "", str(archive),
            ],
            mend="check the version, its sha256 and the package index (pip config list)",
        )  # fmt: skip
        source.mkdir()
        self.command(["tar", "-xzf", str(archive), "-C", str(source), "--strip-components=1", "--no-same-owner"])

    def build_wheel(self) -> None:
        """Builds the wheel in the source tree, against the AMI's torch, without build isolation."""
        source = self.source()
        script = next(
            p for p in (source / "tools/use_existing_torch.py", source / "use_existing_torch.py") if p.is_file()
        )
        self.command([str(self.python), str(script), "--prefix"], cwd=source)
        requires = tomllib.loads((source / "pyproject.toml").read_text())["build-system"]["requires"]
        self.pip_install(*requires)
        shutil.rmtree(self.home / "dist", ignore_errors=True)
        self.uv(
            "build", "--wheel", "--no-build-isolation", "--python", str(self.python),
            "--out-dir", str(self.home / "dist"), str(source), env=self.build_environment(),
        )  # fmt: skip

    def build_environment(self) -> dict[str, str]:
        """What the source's build reads, beside the caller's own variables."""
        jobs = max(1, min(os.cpu_count() or 1, _available_mib() // self.spec["mib_per_job"]))
        return {
            "VLLM_VERSION_OVERRIDE": self.spec["version"],
            "VLLM_TARGET_DEVICE": self.spec["target_device"],
            "MAX_JOBS": str(jobs),
            **self.spec["environment"],
        }

    def install(self) -> None:
        """Installs the wheel and what it needs, torch and its kin left to the AMI."""
        if self.spec["method"] == "source":
            wheel = next((self.home / "dist").glob("*.whl"))
            self.pip_install(str(wheel))
        else:
            self.pip_install(f"{self.spec['distribution']}=={self.spec['version']}")

    def check(self) -> None:
        """The version asked for is there, and torch still is the AMI's, to the version and CUDA."""
        probe = _PROBE % json.dumps({"distribution": self.spec["distribution"]})
        self.found = json.loads(self.command([str(self.python), "-c", probe], capture=True).splitlines()[-1])
        wanted = self.spec["torch"]
        if not self.found["file"].startswith(wanted["site_packages"]) or self.found["torch"] != wanted["version"]:
            raise BuildError(
                f"TORCH_REPLACED: torch {self.found['torch']} from {self.found['file']} is seen, and the AMI's "
                f"{wanted['version']} is wanted",
                str(self.release),
                f"remove {self.release} and converge again; name the package that brought torch in a bug report",
            )
        self.check_libraries()
        if self.found["version"].split("+")[0] != self.spec["version"]:
            raise BuildError(
                f"version {self.found['version']} was built and {self.spec['version']} is wanted",
                str(self.release),
                "set VLLM_VERSION_OVERRIDE's source: vllm_source_build_releases[].version",
            )

    def check_libraries(self) -> None:
        """Every library that vLLM's compiled modules name is found; the driver's own is the GPU host's matter."""
        ami = Path(self.spec["torch"]["site_packages"])
        folders = [
            ami / "torch" / "lib",
            *ami.glob("nvidia/*/lib"),
            *self.site_packages().glob("nvidia/*/lib"),
        ]
        # Libraries that wheels bundle lie beside the modules that name them.
        folders += self.site_packages().glob("*.libs")
        for module in sorted((self.site_packages() / "vllm").glob("*.so")):
            search = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
            listing = self.command(["ldd", str(module)], env=search, capture=True)
            missing = [line.split()[0] for line in listing.splitlines() if line.endswith("not found")]
            missing = [name for name in missing if not name.startswith("libcuda.so")]
            if missing:
                raise BuildError(
                    f"{module.name} wants {', '.join(missing)}, and the system has none",
                    str(module),
                    f"apt-file search {missing[0]}; install what carries it, then converge again",
                )

    def record(self) -> None:
        """The release's record, last of all: with it the release exists."""
        self.warnings += sorted(set(_EXPECTED_TORCH.findall((self.home / "build.log").read_text())))
        built = [p.name for p in (self.home / "dist").glob("*.whl")] if self.spec["method"] == "source" else []
        record = {
            **{
                key: self.spec[key] for key in ("name", "build_id", "method", "distribution", "target_device", "inputs")
            },
            "path": str(self.release),
            "python": str(self.python),
            "site_packages": str(self.site_packages()),
            "version": self.found["version"],
            "torch": self.found["torch"],
            "cuda": self.found["cuda"],
            "wheel": built[0] if built else None,
            "warnings": self.warnings,
            "seconds": {**self.stage_seconds, "total": round(time.time() - self.began, 1)},
        }
        part = self.release / "release.part"
        part.write_text(json.dumps(record, indent=1, sort_keys=True))
        part.replace(self.release / "release.json")
        # uv links from its cache: a file edited in the release would be edited in the cache as well.
        for folder in ("uv-cache", "tmp"):
            shutil.rmtree(self.home / folder, ignore_errors=True)

    def source(self) -> Path:
        """Fixed folder of the source, so that a compiler cache sees the same paths again."""
        return self.home / "source"

    def site_packages(self) -> Path:
        """The release's own package folder."""
        return next(self.release.glob("lib/python3.*/site-packages"))

    def pip_install(self, *requirements: str) -> None:
        """Installs into the release; the AMI's packages are overridden away from the resolution."""
        overrides = self.home / "ami-owned.txt"
        overrides.write_text("".join(f'{name}; sys_platform == "never"\n' for name in AMI_OWNED))
        self.uv(
            "pip",
            "install",
            "-q",
            "--python",
            str(self.python),
            "--override",
            str(overrides),
            *self.index(),
            *requirements,
        )

    def index(self) -> list[str]:
        """pip's own configuration of this host, in uv's words; the newest of all indexes is taken, as pip does."""
        args = ["--index-strategy", "unsafe-best-match"]
        for name, values in host_pip_config.read(str(self.tools / "bin/pip")).items():
            if name in _PIP_TO_UV:
                args += [word for value in values for word in (_PIP_TO_UV[name], value)]
        return args

    def uv(self, *args: str, env: dict[str, str] | None = None) -> None:
        """Runs uv with the system's certificates."""
        own = {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "UV_HTTP_TIMEOUT": "180"}
        own["UV_CACHE_DIR"] = str(self.home / "uv-cache")
        mend = "check the package index that pip is configured with (pip config list), then converge again"
        self.command([str(self.tools / "bin/uv"), *args], env={**own, **(env or {})}, mend=mend)

    def command(
        self,
        argv: list[str],
        *,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        capture: bool = False,
        mend: str = "",
    ) -> str:
        """Runs one command with its output in the log; a failure names the log and its last words."""
        self.log.write(f"$ {' '.join(argv)}\n")
        self.log.flush()
        done = subprocess.run(
            argv,
            cwd=cwd or "/",
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "HOME": str(self.home),
                # /tmp is small or a tmpfs on many hosts; the build's own folder is where room was checked.
                "TMPDIR": str(self.home / "tmp"),
                **(env or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else self.log,
            stderr=self.log,
            text=True,
            check=False,
        )
        if done.returncode:
            tail = (self.home / "build.log").read_text().strip().splitlines()[-1][-300:]
            log = str(self.home / "build.log")
            raise BuildError(
                f"{Path(argv[0]).name} {argv[1]} ended with {done.returncode}: {tail}",
                log,
                mend or f"tail -50 {log}",
            )
        return done.stdout or ""


def _available_mib() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


if __name__ == "__main__":
    Build(Path(sys.argv[1])).run()
