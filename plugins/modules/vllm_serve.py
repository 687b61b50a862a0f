#!/usr/bin/python
"""Ansible module: the wanted release serves, proven by its answer; else what served before serves again."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from ansible.module_utils import service_checks
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.patch_files import write_whole
from ansible.module_utils.service_state import UNIT, Service, read_text, short_digest
from ansible.module_utils.systemd_unit import objection

DOCUMENTATION = r"""
module: vllm_serve
short_description: Switch a host to a release and prove that it answers
description:
  - Compares what runs with what should run. Where they are the same and a short question is answered rightly, nothing
    is done. Otherwise the unit is switched, and the service started and questioned; one that passes gets the current
    link and the record, one that does not is switched back to what served before.
options:
  release: {type: dict, required: true, description: "The release: build_id, path, python."}
  unit_text: {type: str, required: true, description: "Text of the systemd unit, with @KEY@ where its key goes."}
  arguments: {type: list, elements: str, required: true, description: Arguments of the server.}
  environment: {type: dict, required: true, description: Environment of the server.}
  own_environment: {type: list, elements: str, default: [], description: "Names in it that the role sets itself."}
  cache: {type: path, required: true, description: "Compile cache of this release with these arguments."}
  gate: {type: dict, required: true, description: What the gate asks and expects.}
  load: {type: dict, required: true, description: "What the start has to load: bytes, mb_per_second, swap_mib."}
  programs: {type: dict, required: true, description: "Texts of the programs: gate, arguments, prestart."}
  anew: {type: bool, default: false, description: "Start it anew and prove it, also where it serves as wanted."}
  model: {type: str, required: true, description: Model, a folder on the host or a name on the hub.}
  listen: {type: dict, required: true, description: "host and port."}
  user: {type: str, default: vllm, description: User of the service.}
  home: {type: path, default: /var/lib/vllm, description: Folder of the service.}
  library: {type: path, default: /opt/vllm-fleet/service, description: Folder of the unit's own programs.}
  root: {type: path, default: /opt/vllm, description: Folder of the current link.}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_serve: {release: {}, unit_text: '', arguments: [], environment: {}, gate: {}}
"""
RETURN = """
answer: {type: str, returned: success, description: What the server answered.}
deadline_seconds: {type: int, returned: success, description: "Longest wait after a start, for this model and host."}
restarted: {type: bool, returned: success, description: Whether the service was (in check mode, would be) started anew.}
"""
_ERROR = re.compile(r"\b\w+(Error|Exception)\b[:(]")
# A short question to a server that is up: one engine step on a cold kernel compiles for up to 20 s (FACTS).
_QUICK_SECONDS = 60
# Weights that do not fit into memory go out to swap and come back: read, written, read again.
_PASSES_WITH_SWAP = 3


class Serve:
    """One host's service."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.state = Path(self.p["state"])
        self.release = Path(self.p["release"]["path"])
        self.service = Service(Path(self.p["root"]), self.state)
        self.key = short_digest(self.p["unit_text"])
        self.unit_text: str = self.p["unit_text"].replace("@KEY@", self.key)
        self.prestart = Path(self.p["library"]) / "prestart.py"
        self.deadline = start_deadline(int(self.p["gate"]["deadline_seconds"]), self.p["load"])
        self.orphans: list[str] = []

    def run(self) -> None:
        """Brings the service to what is wanted, or back to what was."""
        if self.module.check_mode:
            self.settle()
        try:
            with self.service.held(self.deadline):
                self.settle()
        except TimeoutError:
            self.fail(
                f"another run has been switching the service for {self.deadline} s, and one at a time is wanted",
                UNIT,
                "wait for that run to end, or ./runner.py stop it",
            )

    def settle(self) -> None:
        """Under the lock: compare, check, switch, ask, and keep or go back."""
        before = {"unit": self.service.unit.text(), "link": self.linked()}
        stale = read_text(self.prestart) != self.p["programs"]["prestart"].strip()
        if not self.p["anew"] and self.is_serving():
            verdict = self.ask_quickly()
            if verdict["ok"]:
                if stale and not self.module.check_mode:
                    self.install_prestart()
                self.end(changed=stale, verdict=verdict, before=before)
        if self.module.check_mode:
            self.end(changed=True, verdict={"text": ""}, before=before, restarted=True)
        self.make_user()
        self.check()
        self.install_prestart()
        verdict = self.switch_and_ask()
        if not verdict["ok"]:
            self.give_up(verdict)
        self.keep(verdict)
        self.prune_caches()
        self.end(changed=True, verdict=verdict, before=before, restarted=True)

    def switch_and_ask(self) -> dict[str, Any]:
        """Switches the unit, starts it and questions it; the verdict."""
        try:
            self.service.begin(self.p["release"]["build_id"], self.unit_text)
            started = self.service.start() == 0
        except (OSError, subprocess.CalledProcessError) as error:
            return {"ok": False, "code": "NOT_SWITCHED", "detail": str(error), "text": ""}
        if not started:
            return {"ok": False, "code": "NOT_STARTED", "detail": f"systemctl start {UNIT} failed", "text": ""}
        return self.ask(self.p["gate"], self.deadline)

    def keep(self, verdict: dict[str, Any]) -> None:
        """What passed is what the link and the record say from now on."""
        gate = self.p["gate"]
        record = {
            "build_id": self.p["release"]["build_id"],
            "path": str(self.release),
            "key": self.key,
            "patch": self.service.patch(self.release),
            "arguments": self.p["arguments"],
            "gate": gate,
            "url": gate["url"],
            "model": gate["model"],
            "question": gate["question"],
            "answer": verdict["text"],
            "gate_seconds": verdict["seconds"],
            "deadline_seconds": self.deadline,
            "unit_text": self.unit_text,
        }
        self.service.finish(record)

    def end(self, *, changed: bool, verdict: dict[str, Any], before: dict[str, str], restarted: bool = False) -> None:
        """Ends the module well, with the unit's and the link's text before and after."""
        after = {"unit": self.unit_text, "link": str(self.release)} if changed else before
        for orphan in self.orphans:
            self.module.warn(orphan)
        self.module.exit_json(
            changed=changed,
            answer=verdict["text"],
            seconds=verdict.get("seconds", 0),
            deadline_seconds=self.deadline,
            restarted=restarted,
            diff=[
                {
                    "before_header": str(self.service.unit.path),
                    "after_header": str(self.service.unit.path),
                    "before": before["unit"],
                    "after": after["unit"],
                },
                {
                    "before_header": str(self.service.current),
                    "after_header": str(self.service.current),
                    "before": before["link"] + "\n",
                    "after": after["link"] + "\n",
                },
            ],
        )

    def linked(self) -> str:
        """Where the current link points; `none` for nowhere."""
        return str(self.service.current.readlink()) if self.service.current.is_symlink() else "none"

    def is_serving(self) -> bool:
        """Whether what is wanted is what was proven, and what was proven is what runs."""
        record = self.service.record()
        wanted = {"path": str(self.release), "key": self.key, "patch": self.service.patch(self.release)}
        return bool(record and {name: record.get(name) for name in wanted} == wanted and not self.service.drift(record))

    def make_user(self) -> None:
        """The service's own user, without a login."""
        try:
            pwd.getpwnam(self.p["user"])
        except KeyError:
            self.command(
                [
                    "useradd",
                    "--system",
                    "--home-dir",
                    "/var/lib/vllm",
                    "--shell",
                    "/usr/sbin/nologin",
                    self.p["user"],
                ]
            )

    def check(self) -> None:
        """Everything that can be known before what serves is stopped."""
        words = objection(UNIT, self.unit_text.replace(str(self.prestart), "/dev/null"))
        if words:
            self.fail(
                f"the unit is not valid: {words}",
                str(self.service.unit.path),
                "mend vllm_service_environment or vllm_service_arguments",
            )
        overrides = self.service.unit.show("DropInPaths").get("DropInPaths", "")
        if overrides:
            self.fail(
                f"{overrides} changes the unit, and only what has passed the gate may serve",
                str(self.service.unit.path),
                f"systemctl revert {UNIT}; its settings belong into vllm_service_environment and _arguments",
            )
        self.check_arguments()
        model, user, listen = Path(self.p["model"]), self.p["user"], self.p["listen"]
        self.orphans = self.find_orphans()
        for problem in (
            service_checks.check_model(model, user) if model.is_absolute() else None,
            service_checks.check_port(listen["host"], int(listen["port"]), UNIT),
            service_checks.check_gpu(self.orphans, user),
            service_checks.check_cache(Path(self.p["home"]), user),
        ):
            if problem:
                self.fail(problem.what, problem.where, problem.mend)

    def find_orphans(self) -> list[str]:
        """Processes on the GPU that are not the unit's, as the start program tells them."""
        return self.program("prestart", [UNIT]).stdout.splitlines()

    def install_prestart(self) -> None:
        """The unit's start program, where the unit looks for it."""
        self.prestart.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.prestart, self.p["programs"]["prestart"].encode(), mode=0o755)

    def check_arguments(self) -> None:
        """The installed vLLM takes every argument and reads every VLLM_ variable; asked once per set."""
        asked = {
            "arguments": self.p["arguments"],
            "variables": sorted(self.p["environment"]),
            "own": sorted(self.p["own_environment"]),
            "program": short_digest(self.p["programs"]["arguments"]),
        }
        digest = hashlib.sha256(json.dumps([str(self.release), asked], sort_keys=True).encode()).hexdigest()
        stamp = self.state / "arguments.checked"
        if stamp.is_file() and stamp.read_text() == digest:
            return
        done = self.program("arguments", asked, python=self.p["release"]["python"])
        if done.returncode:
            self.fail(
                f"the release does not start far enough to name its arguments: {done.stderr.strip()[-300:]}",
                str(self.release),
                f"rm -r {self.release} && ./runner.py converge (builds the release again)",
            )
        found = json.loads(done.stdout.splitlines()[-1])
        if found["unknown_variables"]:
            names = ", ".join(found["unknown_variables"])
            self.fail(
                f"{names}: read by nothing in this release, so it would have no effect",
                "vllm_service_environment",
                "remove it",
            )
        if found["arguments"]:
            self.fail(
                f"this vLLM does not take its arguments: {found['arguments']}",
                "vllm_service_arguments",
                "remove or rename it",
            )
        write_whole(stamp, digest.encode())

    def program(
        self, name: str, request: dict[str, Any] | list[str], python: str = "/usr/bin/python3"
    ) -> subprocess.CompletedProcess[str]:
        """Runs one of the role's programs on its words, or on a request that it reads from a file."""
        with tempfile.TemporaryDirectory() as folder:
            text, asked = Path(folder) / f"{name}.py", Path(folder) / "request.json"
            text.write_text(self.p["programs"][name])
            asked.write_text(json.dumps(request))
            words = request if isinstance(request, list) else [str(asked)]
            environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": folder}
            environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
            return subprocess.run(
                [python, str(text), *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )

    def ask_quickly(self) -> dict[str, Any]:
        """A short question to what should be up; a start that is still loading gets what is left of its time."""
        left = self.deadline - self.age_seconds()
        return self.ask({**self.p["gate"], "quick": True, "answer_seconds": _QUICK_SECONDS}, max(left, _QUICK_SECONDS))

    def ask(self, gate: dict[str, Any], deadline_seconds: float) -> dict[str, Any]:
        """Runs the gate program; the verdict."""
        done = self.program("gate", {**gate, "unit": UNIT, "deadline_seconds": deadline_seconds})
        if not done.stdout:
            return {"ok": False, "code": "GATE_BROKEN", "detail": done.stderr[-300:], "text": ""}
        verdict: dict[str, Any] = json.loads(done.stdout)
        return verdict

    def age_seconds(self) -> float:
        """How long the unit has been active."""
        entered = self.service.unit.show("ActiveEnterTimestampMonotonic").get("ActiveEnterTimestampMonotonic") or 0
        return time.clock_gettime(time.CLOCK_MONOTONIC) - int(entered) / 1e6

    def give_up(self, verdict: dict[str, Any]) -> None:
        """Back to what served before; the failure holds the journal's tail."""
        journal = _telling_lines(self.service.unit.journal(400))
        earlier = self.service.undo()
        if earlier is None:
            back = "nothing served here before, so no service is left"
        else:
            again = self.ask(earlier["gate"], earlier.get("deadline_seconds", self.deadline))
            name = earlier["build_id"]
            back = (
                f"{name} serves again as before"
                if again["ok"]
                else f"{name}, which served before, fails too: {again['code']}"
            )
        others = "".join(f"; {line}" for line in self.orphans)
        self.module.fail_json(
            changed=True,
            msg=(
                f"vllm_service: {self.p['release']['build_id']} failed its gate with {verdict['code']}: "
                f"{verdict['detail']}; {back}{others}\n"
                f"  where: {self.p['gate']['url']} ({UNIT})\n"
                f"  mend:  journalctl -u {UNIT} -n 200; then ./runner.py converge\n"
                f"  journal:\n{journal}"
            ),
            verdict=verdict,
        )

    def prune_caches(self) -> None:
        """Compile caches of releases that are gone, and of other arguments of the release that serves."""
        cache = Path(self.p["cache"])
        for folder in cache.parent.parent.glob("*"):
            if not (Path(self.p["root"]) / "releases" / folder.name).exists():
                shutil.rmtree(folder, ignore_errors=True)
        for folder in cache.parent.glob("*"):
            if folder != cache:
                shutil.rmtree(folder, ignore_errors=True)

    def command(self, argv: list[str]) -> None:
        """Runs a command that must succeed."""
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            self.fail(
                f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()[-200:]}",
                "useradd",
                "mend what it names, then converge again",
            )

    def fail(self, what: str, where: str, mend: str) -> None:
        """Ends the module in the house form; the service is untouched."""
        self.module.fail_json(msg=f"vllm_service: {what}\n  where: {where}\n  mend:  {mend}", refused=True)


def start_deadline(base_seconds: int, load: dict[str, Any]) -> int:
    """Longest wait for the answer after a start, seconds.

    Args:
        base_seconds: what a start takes beside loading.
        load: `bytes` of the model's weights, 0 where they are not known; `mb_per_second` (10^6 bytes) that the disk
            or the network surely gives; `swap_mib` that the host needs to hold the weights.
    """
    passes = _PASSES_WITH_SWAP if int(load["swap_mib"]) else 1
    return base_seconds + int(int(load["bytes"]) * passes / (int(load["mb_per_second"]) * 1e6))


def _telling_lines(journal: list[str]) -> str:
    """Of a journal the first lines that name an error (the root cause comes first), then the tail."""
    named = [
        re.sub(r"^.*?(\w+(?:Error|Exception)\b)", r"\1", line)
        for line in journal
        if _ERROR.search(line) and "WARNING" not in line
    ]
    return "\n".join(["    " + line[:300] for line in [*list(dict.fromkeys(named))[:6], "...", *journal[-8:]]])


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "release": {"type": "dict", "required": True},
            "unit_text": {"type": "str", "required": True},
            "arguments": {"type": "list", "elements": "str", "required": True},
            "environment": {"type": "dict", "required": True},
            "own_environment": {"type": "list", "elements": "str", "default": []},
            "cache": {"type": "path", "required": True},
            "gate": {"type": "dict", "required": True},
            "load": {"type": "dict", "required": True},
            "programs": {"type": "dict", "required": True},
            "anew": {"type": "bool", "default": False},
            "model": {"type": "str", "required": True},
            "listen": {"type": "dict", "required": True},
            "user": {"type": "str", "default": "vllm"},
            "home": {"type": "path", "default": "/var/lib/vllm"},
            "library": {"type": "path", "default": "/opt/vllm-fleet/service"},
            "root": {"type": "path", "default": "/opt/vllm"},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
        supports_check_mode=True,
    )
    Serve(module).run()


if __name__ == "__main__":
    main()
