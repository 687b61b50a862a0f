#!/usr/bin/python
"""Ansible module: the releases a host should have are built, by detached units that outlive the connection."""

from __future__ import annotations

import json
import platform
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.patch_foresight import conflict
from ansible.module_utils.patch_registry import patches
from ansible.module_utils.records import read_json
from ansible.module_utils.release_plan import Folders, Host, PlanError, Release, Torch, plan_release, resolved
from ansible.module_utils.transient_unit import at_work

DOCUMENTATION = r"""
module: vllm_release
short_description: Plan, fetch, build and wait for vLLM releases on a host
description:
  - C(planned) says which releases are there and which are missing. C(fetched) gets the sources of the missing ones,
    C(built) builds them too. Both work through transient systemd units, one at a time, and return after
    O(wait_seconds) at most; ask again until RV(finished).
options:
  releases: {type: list, elements: dict, required: true, description: The wanted releases.}
  torch: {type: dict, required: true, description: The torch that preflight found.}
  arch_list: {type: str, required: true, description: CUDA capabilities to compile for.}
  folders:
    type: dict
    required: true
    description: Where things live on the host.
    suboptions:
      root: {type: path, required: true, description: The releases.}
      builds: {type: path, required: true, description: "The builds' progress and logs."}
      sources: {type: path, required: true, description: The sources as they came.}
      tools: {type: path, required: true, description: "Environment of the build's own tools."}
      lib: {type: path, required: true, description: The builder's programs.}
  build:
    type: dict
    required: true
    description: >-
      What builds work with: cuda_home, host_compiler, rust_home, rust_toolchain, cache, cache_environment, jobs,
      mib_per_job, memory, need, store, only_source (leave wheels to other hosts); and method and versions (by name),
      which hold where an entry leaves them open.
  wait_seconds: {type: int, default: 15, description: "Longest wait of one call, seconds."}
  since:
    type: float
    default: 0
    description: "When the run began, in the host's seconds: a build cancelled since stays so. 0 for now."
  state: {type: str, choices: [planned, fetched, built], default: planned, description: What to reach.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_release: {state: planned, releases: [], torch: {}, arch_list: '7.5'}
"""
RETURN = """
---
missing: {type: list, returned: always, description: Names of releases not built yet, or not whole any more.}
damaged: {type: dict, returned: always, description: 'Of those that were whole once, what is wrong, by name.'}
unpublished: {type: list, returned: always, description: Names of releases whose wheels the store still lacks.}
published: {type: list, returned: always, description: Names of those that this call saw published.}
unfetched: {type: list, returned: always, description: Those of them whose source is not there yet.}
finished: {type: bool, returned: always, description: Whether nothing is left to do for the state asked for.}
now: {type: float, returned: always, description: "The host's time, seconds, for O(since)."}
progress:
  type: list
  returned: always
  description: "Of what is at work: release and its status (stage, units, eta_s, memory_mib)."
"""

# What of `build` a build's spec holds as it is.
_FOR_BUILDS = (
    "cuda_home", "host_compiler", "rust_home", "cache", "cache_environment", "jobs", "mib_per_job", "memory",
    "store",
)  # fmt: skip
# A builder that is asked to end ends its compilers itself; one compiler killed for want of memory is its to tell.
_PROPERTIES = ("Type=exec", "KillMode=mixed", "TimeoutStopSec=30", "OOMPolicy=continue", "Nice=5")
_BOOT = Path("/etc/systemd/system/vllm-fleet-builds.service")
_BOOT_UNIT = """[Unit]
Description=vLLM builds that went down with the host are taken up again
Wants=network-online.target
After=network-online.target

[Service]
Type=oneshot
ExecStart={command}

[Install]
WantedBy=multi-user.target
"""
# Nothing secret among them: what may be told to a host by its variables.
_CACHE_VARIABLE = re.compile(r"S?CCACHE_[A-Z0-9_]+|AWS_(DEFAULT_)?REGION|AWS_ENDPOINT_URL")
_SECRET = re.compile(r"KEY_ID|SECRET|TOKEN|PASSWORD")


class Releases:
    """The wanted releases of one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.folders = {name: Path(path) for name, path in self.p["folders"].items()}
        self.deadline = time.monotonic() + self.p["wait_seconds"]

    def run(self) -> None:
        """Does the next piece of what is missing, and says where all stand."""
        releases = self.planned()
        act = {"planned": None, "fetched": self.fetch, "built": self.build}[self.p["state"]]
        progress: list[dict[str, Any]] = []
        owed: list[str] = []
        if act is not None and not self.module.check_mode:
            for release in [release for release in releases if release.record is None]:
                # Two releases may share a source: what the one fetched is there for the other.
                progress.append(act(self.again(release)))
                if time.monotonic() >= self.deadline:
                    break
            if self.p["state"] == "built":
                owed = [release.name for release in releases if self.unpublished(release)]
                progress += [self.publish(release) for release in releases if release.name in owed]
            releases = self.planned()
        missing = [release for release in releases if release.record is None]
        unfetched = [release for release in missing if release.spec["source"] and not release.source]
        described = [_describe(release) for release in releases]
        unpublished = [release.name for release in releases if self.unpublished(release)]
        publishing = any(entry.get("publishing") for entry in progress)
        self.module.exit_json(
            changed=False,
            ansible_facts={"vllm_releases": described},
            finished=not (unfetched if self.p["state"] == "fetched" else missing) and not publishing,
            missing=[release.name for release in missing],
            damaged={release.name: release.damage for release in releases if release.damage},
            unfetched=[release.name for release in unfetched],
            now=time.time(),
            unpublished=unpublished,
            published=[name for name in owed if name not in unpublished],
            progress=progress,
            releases=described,
        )

    def planned(self) -> list[Release]:
        """All wanted releases, as the host stands now."""
        found = self.p["torch"]
        arches = tuple(found.get("arch_list") or ())
        torch = Torch(found["python"], found["site_packages"], found["version"], found.get("cuda"), arches)
        python = Path(found["site_packages"]).parent.name.removeprefix("python")
        host = Host(platform.machine(), ".".join(python.split(".")[:2]), self.p["arch_list"])
        folders = Folders(self.folders["root"], self.folders["sources"], self.p["build"]["rust_toolchain"])
        try:
            _check_cache(self.p["build"].get("cache_environment") or {})
            decided = (self.p["build"].get("method", ""), self.p["build"].get("versions") or {})
            wishes = [resolved(wanted, *decided) for wanted in self.p["releases"]]
            if self.p["build"].get("only_source"):
                wishes = [wanted for wanted in wishes if wanted["method"] == "source"]
            releases = [plan_release(wanted, torch, host, folders) for wanted in wishes]
            names = [release.name for release in releases]
            for name in names:
                if names.count(name) > 1:
                    what = f"{names.count(name)} releases are named {name}"
                    raise PlanError(what, "vllm_source_build_releases", "give each entry a name of its own")
            return releases
        except PlanError as error:
            self.module.fail_json(
                msg=f"vllm_source_build: {error.what}\n  where: {platform.node()} {error.where}\n  mend:  {error.mend}",
                refused=True,
            )
            raise

    def fetch(self, release: Release) -> dict[str, Any]:
        """The release's source, where it has one that is not there."""
        if not release.spec["source"] or release.source:
            return {"release": release.name}
        home = Path(release.spec["source"]["path"])
        unit = f"vllm-fetch-{home.name}"
        return self.advance(
            release,
            home,
            unit,
            "fetch_source.py",
            lambda: bool(self.again(release).source),
            "its source was not fetched",
        )

    def build(self, release: Release) -> dict[str, Any]:
        """The release itself, after its source."""
        if release.spec["source"] and not release.source:
            progress = self.fetch(release)
            release = self.again(release)
            if not release.source:
                return progress
        home = self.folders["builds"] / release.build_id
        unit = f"vllm-build-{release.build_id}"
        if not at_work(_unit_name(unit)):
            self.refuse_unpatchable(release)
        return self.advance(
            release, home, unit, "build_release.py", lambda: release.record is not None, "it was not built"
        )

    def refuse_unpatchable(self, release: Release) -> None:
        """A release that the kernel patch will not fit is not worth its hour of compiling."""
        found = conflict(release.spec, patches(()))
        if found:
            self.module.fail_json(
                msg=f"vllm_source_build: {release.name}: {found}\n"
                f"  where: {platform.node()} {release.spec['source']['path']}\n"
                f"  mend:  set its version to one that the patch is known to fit: {', '.join(patches(())[0].shown_on)}",
                refused=True,
            )

    def unpublished(self, release: Release) -> bool:
        """Whether the release was built here while the store was away, and its wheels still wait for it."""
        stored = (release.record or {}).get("store") or {}
        kept = self.folders["builds"] / release.build_id / "wheelhouse" / "manifest.json"
        return bool(self.p["build"]["store"]["bucket"]) and stored.get("state") == "unpublished" and kept.is_file()

    def publish(self, release: Release) -> dict[str, Any]:
        """Puts what waits for the store; the release is whole and serves, so a store still away fails nothing."""
        home = self.folders["builds"] / release.build_id
        unit = _unit_name(f"vllm-publish-{release.build_id}")
        if not at_work(unit):
            self.start(release, home, unit, "publish_release.py")
        while time.monotonic() < self.deadline and at_work(unit):
            time.sleep(0.5)
        return {"release": release.name, **read_json(home / "status.json"), "publishing": at_work(unit)}

    def again(self, release: Release) -> Release:
        """The same release as the host stands now."""
        return next(found for found in self.planned() if found.name == release.name)

    def advance(
        self, release: Release, home: Path, unit: str, program: str, there: Callable[[], bool], failure: str
    ) -> dict[str, Any]:
        """Starts the unit where it is not running and waits for its end, until the deadline.

        One that this run has begun, and that came to its end between two looks, is told of and not begun again.
        """
        unit = _unit_name(unit)
        if not at_work(unit):
            self.refuse_cancelled(release, home)
            if not self.begun_by_this_run(home):
                self.start(release, home, unit, program)
        while time.monotonic() < self.deadline and at_work(unit):
            time.sleep(0.5)
        status = read_json(home / "status.json")
        if not at_work(unit) and not there():
            what = status.get("what") or release.damage or "the unit ended without saying why (killed?)"
            where = status.get("where") or str(home / "build.log")
            mend = status.get("mend") or "converge again; it goes on with what is there"
            if status.get("refused"):
                _take_back(home)
            self.module.fail_json(
                msg=f"vllm_source_build: {release.name}: {failure}: {what}\n"
                f"  where: {platform.node()} {where}\n  mend:  {mend}",
                status=status,
                refused=bool(status.get("refused")),
            )
        return {"release": release.name, **status}

    def begun_by_this_run(self, home: Path) -> bool:
        """Whether this run, in an earlier call, has started what is done in this folder."""
        spec = home / "spec.json"
        return bool(self.p.get("since")) and spec.is_file() and spec.stat().st_mtime >= self.p["since"]

    def refuse_cancelled(self, release: Release, home: Path) -> None:
        """What somebody cancelled since this run began is not started again by it; by a later one it is."""
        mark = read_json(home / "cancelled.json")
        if mark and mark["at"] > (self.p.get("since") or time.time()):
            self.module.fail_json(
                msg=f"vllm_source_build: {release.name}: the build was cancelled by {mark['who']} at {mark['when']}\n"
                f"  where: {platform.node()} {home / 'build.log'}\n"
                "  mend:  converge again: it goes on with what is compiled",
            )

    def start(self, release: Release, home: Path, unit: str, program: str) -> None:
        """Writes the spec and starts the unit."""
        home.mkdir(parents=True, exist_ok=True)
        build = self.p["build"]
        spec = {
            **release.spec,
            **{key: build[key] for key in _FOR_BUILDS},
            "need": build["need"][release.spec["method"]][release.spec["target_device"]],
            "tools": str(self.folders["tools"]),
        }
        (home / "spec.json").write_text(json.dumps(spec, indent=1, sort_keys=True))
        for name in ("status.json", "cancelled.json", "boots.json"):
            (home / name).unlink(missing_ok=True)
        self.systemd_run(
            unit, ["/usr/bin/python3", "-EsB", str(self.folders["lib"] / program), str(home / "spec.json")], home
        )

    def systemd_run(self, unit: str, argv: list[str], home: Path) -> None:
        """Starts a transient unit, which no end of this connection ends; builds are taken up again at boot.

        A build that has ended, by whatever way, takes the boot unit away before its own unit counts as ended.
        """
        properties, build = list(_PROPERTIES), home.parent == self.folders["builds"]
        boot = f"/usr/bin/python3 -EsB {self.folders['lib'] / 'resume_builds.py'} {self.folders['builds']}"
        if build:
            properties.append(f"ExecStopPost={boot} --ended")
        start = ["systemd-run", f"--unit={unit}", "--collect", *[f"--property={word}" for word in properties], *argv]
        self.module.run_command(["systemctl", "reset-failed", unit])
        if build:
            (home / "start.json").write_text(json.dumps({"unit": unit, "argv": start}))
            self.install_boot_unit(boot)
        self.module.run_command(start, check_rc=True)

    def install_boot_unit(self, command: str) -> None:
        """The unit that takes builds up at boot; the last of them takes it away."""
        text = _BOOT_UNIT.format(command=command)
        if not _BOOT.is_file() or _BOOT.read_text() != text:
            _BOOT.write_text(text)
            self.module.run_command(["systemctl", "daemon-reload"], check_rc=True)
        self.module.run_command(["systemctl", "enable", "-q", _BOOT.name], check_rc=True)


def _check_cache(environment: dict[str, Any]) -> None:
    for name in sorted(environment):
        if not _CACHE_VARIABLE.fullmatch(name) or _SECRET.search(name):
            raise PlanError(
                f"{name} is no variable of a compiler cache, and CCACHE_*, SCCACHE_* or a region of AWS's is wanted",
                "vllm_source_build_cache_environment",
                f"remove {name}; credentials come from the host's own role",
            )


def _describe(release: Release) -> dict[str, Any]:
    known = {
        "name": release.name,
        "build_id": release.build_id,
        "path": str(release.path),
        "serve": release.serve,
        "method": release.spec["method"],
        "rust_toolchain": release.rust_toolchain,
        "fetched": bool(release.source),
    }
    record = release.record
    if record is None:
        return {**known, "built": False}
    keys = ("python", "site_packages", "version", "distribution", "target_device", "warnings", "seconds")
    return {**known, "built": True, **{key: record[key] for key in keys}}


def _unit_name(wanted: str) -> str:
    """A version's + is no character for a unit."""
    return re.sub(r"[^A-Za-z0-9:_.-]", "_", wanted)


def _take_back(home: Path) -> None:
    """Removes the folder of a job that was refused, but for one in which an earlier one has made something."""
    if not any((home / name).exists() for name in ("dist", "tree", "wheelhouse", "source.json")):
        shutil.rmtree(home)


def main() -> None:
    """Runs the module."""
    path = {"type": "path", "required": True}
    module = AnsibleModule(
        argument_spec={
            "releases": {"type": "list", "elements": "dict", "required": True},
            "torch": {"type": "dict", "required": True},
            "arch_list": {"type": "str", "required": True},
            "folders": {
                "type": "dict",
                "required": True,
                "options": {"root": path, "builds": path, "sources": path, "tools": path, "lib": path},
            },
            "build": {"type": "dict", "required": True},
            "wait_seconds": {"type": "int", "default": 15},
            "since": {"type": "float", "default": 0},
            "state": {"type": "str", "choices": ["planned", "fetched", "built"], "default": "planned"},
        },
        supports_check_mode=True,
    )
    Releases(module).run()


if __name__ == "__main__":
    main()
