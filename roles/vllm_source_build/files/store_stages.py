"""The stages by which a build is made once per fleet: look in the store, take or lock, gather, publish, install.

Nothing of them is done without a bucket. boto3 and packaging are in the tools environment, which exists only once
`make_tools` ran: what needs them is imported then.
"""

from __future__ import annotations

import contextlib
import json
import platform
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import host_pip_config
import release_lock
from job import Job, JobError, write_whole
from torch_guard import AMI_OWNED

_COMPILING = (
    "unpack", "check_source", "check_toolchain", "make_environment", "build_wheel", "check_architectures",
    "gather",
)  # fmt: skip
# Answers that a waiting host does without before it takes the store for gone.
_PATIENCE = 5
NOT_PUBLISHED = "not published"
# What of a status file is nothing to those that wait, and what it says of this job's own waiting.
_OWN = ("pid", "where", "mend", "builder", "progress", "renewed_s_ago", "waited_s")
_NO_STORE = {"bucket": "", "builds": True}


class StoreStages(Job):
    """A release's job with the part that the store has in it."""

    def __init__(self, spec_path: Path) -> None:
        super().__init__(spec_path)
        self.release = Path(self.spec["path"])
        self.python = self.release / "bin" / "python"
        self.warnings: list[str] = []
        self.judged: dict[str, Any] = {}
        self.settings: dict[str, Any] = self.spec.get("store") or _NO_STORE
        self.wheelhouse = self.home / "wheelhouse"
        self.store: Any = None
        self.lock: Any = None
        self.manifest: dict[str, Any] | None = None

    def look_in_store(self) -> None:
        """Takes the build where the fleet has it; else locks it to build it here, or waits for whoever does.

        Raises JobError, refused, where the bucket is not there or denies what will be needed.
        """
        if not self.settings["bucket"]:
            return
        self.open_store()
        rounds = _Rounds(self.settings["poll_s"])
        while True:
            try:
                manifest = self.found_or_locked()
                if manifest is not None:
                    self.take(manifest)
                    return
                if self.lock.etag is not None:
                    self.store.probe_writing()
                    return
                self.wait_for(rounds)
            except _store_error() as error:
                # Refused on the first round; later the store went away, and a host that may build goes on alone.
                if not rounds.silent():
                    raise
                if rounds.silence > _PATIENCE:
                    if not self.settings["builds"]:
                        raise
                    self.left_alone(error)
                    return
            rounds.sleep()

    def open_store(self) -> None:
        """The store and this build's lock in it."""
        folder = self.tools / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        from build_lock import BuildLock, read
        from wheel_store import open_store

        self.store = open_store(self.settings)
        owner = {"host": platform.node(), "machine": read("/etc/machine-id"), "job": str(self.home)}
        self.lock = BuildLock(
            self.store, self.spec["build_id"], self.spec["inputs"], owner, self.settings["expires_s"], self.progress
        )

    def found_or_locked(self) -> dict[str, Any] | None:
        """The manifest; None where there is none, with the lock taken where this host builds and it was free."""
        identity = self.spec["build_id"]
        manifest: dict[str, Any] | None = self.store.manifest(identity)
        if manifest is None and self.settings["builds"] and self.lock.take():
            # Published and released since the look above.
            manifest = self.store.manifest(identity)
        return manifest

    def wait_for(self, rounds: _Rounds) -> None:
        """Tells who builds and how far it is; raises JobError where this host may not build and nobody does."""
        holder = self.lock.holder()
        rounds.answered(alive=holder is not None and holder.alive)
        told: dict[str, Any] = {"build_id": self.spec["build_id"], "waited_s": round(rounds.waited())}
        if holder is not None and holder.alive:
            told |= {"builder": holder.host, "renewed_s_ago": holder.age_s, "progress": holder.body.get("progress")}
        self.status("waiting", stage="look_in_store", **told)
        if not self.settings["builds"] and rounds.idle() > self.settings["wait_s"]:
            from build_lock import others

            last = f"; the last one, {holder.host}, {holder.body.get('outcome') or 'went silent'}" if holder else ""
            unlike = others(self.store, self.spec["build_id"], self.spec["inputs"])
            beside = f"; beside it: {', '.join(unlike)}" if unlike else ""
            raise JobError(
                f"no builder took {self.spec['build_id']} within {self.settings['wait_s']:.0f} s{last}{beside}",
                f"{self.store.where}builds/{self.spec['build_id']}/",
                "./runner.py converge --limit builder, on hosts with this torch; or take all hosts out of that group",
            )

    def take(self, manifest: dict[str, Any]) -> None:
        """The wheels of a manifest, checked; what is refused leaves nothing behind."""
        from wheelhouse import check_room, judge, keep_only

        self.release_lock("was published by another")
        try:
            wheels = judge(manifest, self.spec)
            self.wheelhouse.mkdir(exist_ok=True)
            keep_only(wheels, self.wheelhouse)
            check_room(wheels, self.wheelhouse)
            self.store.fetch(wheels, self.wheelhouse)
        except _store_error():
            raise
        except JobError:
            shutil.rmtree(self.wheelhouse, ignore_errors=True)
            raise
        self.manifest = manifest
        self.skipped.update(_COMPILING)
        self.judged["store"] = {**self.place(), "state": "fetched", "built_by": manifest["host"]}

    def gather(self) -> None:
        """The wheel and all that it depends on as the index gives it today, in one folder, with its manifest."""
        if self.store is None and not self.settings["bucket"]:
            return
        from wheel_store import SCHEMA
        from wheelhouse import described

        tools = self.tool_versions()
        shutil.rmtree(self.wheelhouse, ignore_errors=True)
        self.wheelhouse.mkdir()
        wheel = next((self.home / "dist").glob("*.whl"))
        locked = self.locked(f"{self.spec['distribution']} @ {wheel.as_uri()}")
        own = f"{self.spec['distribution']} @ "
        entries = locked.read_text().replace("\\\n", " ").splitlines()
        needed = [line for line in entries if not line.startswith(own)]
        locked.write_text("\n".join(needed) + "\n")
        # pip reads its own configuration, and makes wheels of what there is as a source alone.
        pip = [str(self.tools / "bin/pip"), "--python", str(self.python), "wheel", "-q", "--no-cache-dir", "--no-deps"]
        if needed:
            self.command(
                [*pip, "--require-hashes", "-r", str(locked), "-w", str(self.wheelhouse)],
                mend="check the package index that pip is configured with (pip config list), then converge again",
            )
        shutil.copy2(wheel, self.wheelhouse)
        wheels = described(self.wheelhouse)
        self.manifest = {
            "schema": SCHEMA,
            **{key: self.spec[key] for key in ("build_id", "distribution", "version", "target_device", "inputs")},
            "architecture": platform.machine(),
            "host": platform.node(),
            "patches": ["tools/use_existing_torch.py --prefix"],
            "tools": tools,
            "judged": self.judged,
            "duration_s": round(time.time() - self.began, 1),
            "bytes": sum(found.bytes for found in wheels),
            "wheels": [{key: getattr(found, key) for key in found.__slots__} for found in wheels],
        }
        write_whole(self.wheelhouse / "manifest.json", self.manifest)

    def locked(self, *requirements: str) -> Path:
        """All that the requirements come to, with digests: of the release's lock where it has one, else the index's."""
        wanted, locked = self.home / "tmp" / "wanted.txt", self.home / "tmp" / "locked.txt"
        wanted.write_text("".join(f"{requirement}\n" for requirement in requirements))
        indexes = host_pip_config.for_uv(host_pip_config.read(str(self.tools / "bin/python")))
        lock = release_lock.path_of(self.spec["lock"]) if self.spec.get("lock") else None
        self.uv(
            "pip", "compile", "-q", "--python", str(self.python), "--override", str(self.overrides()), *indexes,
            *(["--constraint", str(lock)] if lock else []), "--generate-hashes", "--no-header", "--no-annotate",
            str(wanted), "-o", str(locked),
        )  # fmt: skip
        if lock:
            locked.write_text(release_lock.held(locked.read_text(), lock))
        return locked

    def tool_versions(self) -> dict[str, str]:
        """What compiled, in its own words; empty where a tool is not there."""
        cuda, rust = self.spec["cuda_home"], self.spec["rust_home"]
        asked = {
            "python": [str(self.python), "--version"],
            "uv": [str(self.tools / "bin/uv"), "--version"],
            "g++": [self.spec["host_compiler"], "--version"],
            "nvcc": [f"{cuda}/bin/nvcc", "--version"],
            "cmake": [str(self.release / "bin/cmake"), "--version"],
            "rustc": [f"{rust}/cargo/bin/rustc", "--version"],
        }
        found = dict.fromkeys(asked, "")
        more = {"RUSTUP_HOME": f"{rust}/rustup", "RUSTUP_AUTO_INSTALL": "0"}
        if self.spec["rust_toolchain"]:
            more["RUSTUP_TOOLCHAIN"] = self.spec["rust_toolchain"]
        for name, argv in asked.items():
            with contextlib.suppress(JobError):
                lines = self.command(argv, env=more, capture=True).strip().splitlines()
                found[name] = next((line for line in lines if "release" in line), lines[0]) if lines else ""
        return found

    def install_wheelhouse(self) -> None:
        """Installs exactly the wheelhouse's files, without an index, into an environment that has nothing else."""
        from wheel_store import wheels_of
        from wheelhouse import lock_text

        self.make_environment()
        locked = self.home / "tmp" / "locked.txt"
        locked.write_text(lock_text(wheels_of(self.manifest or {})))
        self.uv(
            "pip", "install", "-q", "--python", str(self.python), "--no-index", "--offline", "--no-deps",
            "--require-hashes", "--find-links", str(self.wheelhouse), "-r", str(locked),
            mend=f"tail -50 {self.log_path}",
        )  # fmt: skip

    def publish(self) -> None:
        """Puts a checked build into the store; where another was first, its wheels take this build's place."""
        if self.manifest is None or self.judged.get("store", {}).get("state") == "fetched":
            return
        try:
            winner = self.store.publish(self.manifest, self.wheelhouse)
        except _store_error() as error:
            self.left_alone(error)
            return
        # The store may have been away for a while.
        self.warnings = [line for line in self.warnings if not line.startswith(NOT_PUBLISHED)]
        if winner is self.manifest:
            self.judged["store"] = {**self.place(), "state": "published", "built_by": winner["host"]}
            self.release_lock("published")
            return
        self.take(winner)
        self.install()
        self.check()

    def left_alone(self, error: JobError) -> None:
        """Goes on without the store; what is built here is kept for the next converge to publish."""
        self.release_lock("lost the store")
        self.judged["store"] = {**self.place(), "state": "unpublished", "built_by": platform.node()}
        self.warnings = [line for line in self.warnings if not line.startswith(NOT_PUBLISHED)]
        self.warnings.append(f"{NOT_PUBLISHED}: {error.what}; the next converge publishes it")

    def clear_wheelhouse(self) -> None:
        """The wheels are in the release and in the store; only what is not published yet stays."""
        if self.judged.get("store", {}).get("state") != "unpublished":
            shutil.rmtree(self.wheelhouse, ignore_errors=True)

    def release_lock(self, outcome: str = "was ended") -> None:
        """Gives the build's lock up where this job has it; for a job's end, whichever way it comes."""
        if self.lock is not None:
            with contextlib.suppress(JobError):
                self.lock.release(outcome)

    def place(self) -> dict[str, str]:
        """Where the release's manifest is or will be."""
        return {"manifest": f"{self.store.where}builds/{self.spec['build_id']}/manifest.json"}

    def progress(self) -> dict[str, Any]:
        """What this job's status file says, for those that wait."""
        try:
            found: dict[str, Any] = json.loads((self.home / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return {key: value for key, value in found.items() if key not in _OWN}

    def overrides(self) -> Path:
        """A file that keeps the AMI's packages out of a resolution."""
        path = self.home / "ami-owned.txt"
        path.write_text("".join(f'{name}; sys_platform == "never"\n' for name in AMI_OWNED))
        return path

    def make_environment(self) -> None:
        """The release's environment, empty."""
        raise NotImplementedError

    def install(self) -> None:
        """Installs the release."""
        raise NotImplementedError

    def check(self) -> None:
        """Checks what was installed."""
        raise NotImplementedError

    def uv(self, *args: str, env: dict[str, str] | None = None, mend: str = "") -> None:
        """Runs uv with the system's certificates."""
        own = {"SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt", "UV_HTTP_TIMEOUT": "180"}
        own["UV_CACHE_DIR"] = str(self.home / "uv-cache")
        mend = mend or "check the package index that pip is configured with (pip config list), then converge again"
        self.command([str(self.tools / "bin/uv"), *args], env={**own, **(env or {})}, mend=mend)


class _Rounds:
    """A waiting host's looks into the store; all times are this process's own, from a clock that nobody sets."""

    def __init__(self, poll_s: float) -> None:
        self.poll_s = poll_s
        self.began = self.alive = time.monotonic()
        self.silence = 0
        self.first = True

    def answered(self, *, alive: bool) -> None:
        """The store answered, and somebody builds or nobody does."""
        self.first, self.silence = False, 0
        if alive:
            self.alive = time.monotonic()

    def silent(self) -> bool:
        """The store did not answer; False where it never did."""
        self.silence += 1
        return not self.first

    def waited(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self.began

    def idle(self) -> float:
        """Seconds in which nobody was building."""
        return time.monotonic() - self.alive

    def sleep(self) -> None:
        """Until the next look, spread so that a fleet does not look all at once."""
        time.sleep(self.poll_s * random.uniform(0.5, 1.5))  # noqa: S311


def _store_error() -> type[JobError]:
    from wheel_store import StoreError

    return StoreError
