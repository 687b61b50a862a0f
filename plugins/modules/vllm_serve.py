#!/usr/bin/python
"""Ansible module: the wanted release serves, proven by its answer; else what served before serves again."""

from __future__ import annotations

import hashlib
import json
import pwd
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: vllm_serve
short_description: Switch a host to a release and prove that it answers
description:
  - Compares what runs with what should run. Where they are the same and a short question is answered rightly, nothing
    is done. Otherwise the unit and the current link are switched, the service is started and questioned; a service
    that does not pass is switched back to what served before.
options:
  release: {type: dict, required: true, description: "The release: build_id, path, python."}
  unit_text: {type: str, required: true, description: Text of the systemd unit.}
  arguments: {type: list, elements: str, required: true, description: Arguments of the server.}
  environment: {type: dict, required: true, description: Environment of the server.}
  gate: {type: dict, required: true, description: What the gate asks and expects.}
  gate_program: {type: str, required: true, description: Text of the gate program.}
  model: {type: str, required: true, description: Model, a folder on the host or a name on the hub.}
  argument_program: {type: str, required: true, description: Text of the argument check.}
  user: {type: str, default: vllm, description: User of the service.}
  root: {type: path, default: /opt/vllm, description: Folder of the current link.}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_serve: {release: {}, unit_text: '', arguments: [], environment: {}, gate: {}}
"""
RETURN = "answer: {type: str, returned: success, description: What the server answered.}"
_UNIT = "vllm.service"
_UNIT_PATH = Path("/etc/systemd/system") / _UNIT
_ERROR = re.compile(r"\b\w+(Error|Exception)\b[:(]")
_CACHE = Path("/var/lib/vllm/cache")


class Serve:
    """One host's service."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.state = Path(self.p["state"])
        self.current = Path(self.p["root"]) / "current"
        self.release = Path(self.p["release"]["path"])
        self.record_path = self.state / "service.json"

    def run(self) -> None:
        """Brings the service to what is wanted, or back to what was."""
        wanted = self.fingerprint(self.p["unit_text"])
        if self.is_serving(wanted):
            verdict = self.ask(self.p["gate"], quick=True)
            if verdict["ok"]:
                self.module.exit_json(changed=False, answer=verdict["text"], seconds=verdict["seconds"])
        if self.module.check_mode:
            self.module.exit_json(changed=True, answer="")
        self.make_user()
        self.check_unit()
        self.check_arguments()
        self.check_model()
        self.systemctl("stop", _UNIT)
        self.put(self.p["unit_text"], str(self.release))
        verdict = self.start_and_ask(self.p["gate"])
        if not verdict["ok"]:
            self.give_up(verdict)
        gate = self.p["gate"]
        record = {
            "fingerprint": wanted,
            "build_id": self.p["release"]["build_id"],
            "path": str(self.release),
            "gate": gate,
            "url": gate["url"],
            "model": gate["model"],
            "question": gate["question"],
            "answer": verdict["text"],
            "gate_seconds": verdict["seconds"],
            "unit_text": self.p["unit_text"],
        }
        self.write(self.record_path, json.dumps(record, indent=1, sort_keys=True) + "\n")
        self.prune_caches()
        self.module.exit_json(changed=True, answer=verdict["text"], seconds=verdict["seconds"])

    def fingerprint(self, unit_text: str) -> str:
        """What decides the running code: the unit, the release, and the patched files' digests."""
        patches = self.state / "patches" / f"{self.p['release']['build_id']}.json"
        files = json.loads(patches.read_text())["files"] if patches.is_file() else {}
        patch = json.dumps({target: known["sha256"] for target, known in files.items()}, sort_keys=True)
        return hashlib.sha256("\0".join([unit_text, str(self.release), patch]).encode()).hexdigest()

    def is_serving(self, wanted: str) -> bool:
        """Whether what runs is what is wanted, by the record, the link, the unit file and the process."""
        try:
            record = json.loads(self.record_path.read_text())
        except (OSError, ValueError):
            return False
        return bool(
            record.get("fingerprint") == wanted
            and _UNIT_PATH.is_file()
            and _UNIT_PATH.read_text() == self.p["unit_text"]
            and self.current.resolve() == self.release.resolve()
            and self.systemctl("is-active", _UNIT) == 0
            and self.systemctl("is-enabled", _UNIT) == 0
        )

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

    def check_unit(self) -> None:
        """systemd's own word on the unit, before it lands."""
        with tempfile.TemporaryDirectory() as folder:
            unit = Path(folder) / _UNIT
            # systemd looks for the program, which is behind the link that is switched later.
            unit.write_text(self.p["unit_text"].replace("/opt/vllm/current/", f"{self.release}/"))
            done = subprocess.run(
                ["systemd-analyze", "verify", "--man=no", str(unit)],
                capture_output=True,
                text=True,
                check=False,
            )
        words = [line for line in done.stderr.splitlines() if _UNIT in line]
        if done.returncode or words:
            self.fail(
                f"the unit is not valid: {' '.join(words)[-300:]}",
                str(_UNIT_PATH),
                "mend vllm_service_environment or _arguments",
            )

    def check_arguments(self) -> None:
        """The installed vLLM takes every argument and reads every VLLM_ variable; asked once per set."""
        asked = {"arguments": self.p["arguments"], "variables": sorted(self.p["environment"])}
        digest = hashlib.sha256(json.dumps([str(self.release), asked], sort_keys=True).encode()).hexdigest()
        stamp = self.state / "arguments.checked"
        if stamp.is_file() and stamp.read_text() == digest:
            return
        with tempfile.TemporaryDirectory() as folder:
            program, request = Path(folder) / "check_arguments.py", Path(folder) / "request.json"
            program.write_text(self.p["argument_program"])
            request.write_text(json.dumps(asked))
            done = subprocess.run(
                [self.p["release"]["python"], str(program), str(request)],
                cwd=folder,
                env={
                    "PATH": "/usr/bin:/bin",
                    "HOME": folder,
                    "VLLM_LOGGING_LEVEL": "ERROR",
                    "HF_HUB_OFFLINE": "1",
                },
                capture_output=True,
                text=True,
                check=False,
            )
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
                f"{names}: no variable of this vLLM, so it would have no effect",
                "vllm_service_environment",
                "remove it",
            )
        if found["arguments"]:
            self.fail(
                f"this vLLM does not take its arguments: {found['arguments']}",
                "vllm_service_arguments",
                "remove or rename it",
            )
        self.write(stamp, digest)

    def last_good(self) -> dict[str, Any] | None:
        """The record of what last passed its gate here, where its release is still there."""
        try:
            record: dict[str, Any] = json.loads(self.record_path.read_text())
        except (OSError, ValueError):
            return None
        return record if Path(record["path"]).is_dir() else None

    def put(self, unit_text: str, target: str) -> None:
        """One unit text and one link, both whole or not at all."""
        self.write(_UNIT_PATH, unit_text)
        part = self.current.with_name(".current.part")
        part.unlink(missing_ok=True)
        part.symlink_to(target)
        part.replace(self.current)
        self.command(["systemctl", "daemon-reload"])
        self.systemctl("reset-failed", _UNIT)

    def start_and_ask(self, gate: dict[str, Any]) -> dict[str, Any]:
        """Starts the service and questions it; the verdict."""
        self.command(["systemctl", "enable", "--quiet", _UNIT])
        self.command(["systemctl", "start", _UNIT])
        return self.ask(gate, quick=False)

    def ask(self, gate: dict[str, Any], *, quick: bool) -> dict[str, Any]:
        """Runs the gate program."""
        with tempfile.TemporaryDirectory() as folder:
            program, request = Path(folder) / "gate.py", Path(folder) / "request.json"
            program.write_text(self.p["gate_program"])
            deadline = min(60, gate["deadline_seconds"]) if quick else gate["deadline_seconds"]
            request.write_text(json.dumps({**gate, "unit": _UNIT, "quick": quick, "deadline_seconds": deadline}))
            argv = ["/usr/bin/python3", str(program), str(request)]
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if not done.stdout:
            return {"ok": False, "code": "GATE_BROKEN", "detail": done.stderr[-300:], "text": ""}
        verdict: dict[str, Any] = json.loads(done.stdout)
        return verdict

    def give_up(self, verdict: dict[str, Any]) -> None:
        """Back to what served before; the failure holds the journal's tail."""
        journal = _telling_lines(
            subprocess.run(
                ["journalctl", "-u", _UNIT, "-n", "400", "--no-pager", "-o", "cat"],
                capture_output=True,
                text=True,
                check=False,
            ).stdout.splitlines()
        )
        self.systemctl("stop", _UNIT)
        earlier = self.last_good()
        if earlier is None:
            self.systemctl("disable", _UNIT)
            back = "nothing served here before, so the service is stopped"
        else:
            self.put(earlier["unit_text"], earlier["path"])
            again = self.start_and_ask(earlier["gate"])
            name = earlier["build_id"]
            back = (
                f"{name} serves again as before"
                if again["ok"]
                else f"{name}, which served before, fails too: {again['code']}"
            )
        self.module.fail_json(
            changed=True,
            msg=(
                f"vllm_service: {self.p['release']['build_id']} failed its gate with {verdict['code']}: "
                f"{verdict['detail']}; {back}\n"
                f"  where: {self.p['gate']['url']} ({_UNIT})\n"
                f"  mend:  journalctl -u {_UNIT} -n 200; then ./runner.py converge\n"
                f"  journal:\n{journal}"
            ),
            verdict=verdict,
        )

    def check_model(self) -> None:
        """A local model can be read by the service's user, and can hold a chat."""
        model = Path(self.p["model"])
        if not model.is_absolute():
            return
        if not (model / "config.json").is_file():
            self.fail(
                "the model has no config.json",
                str(model),
                "copy the whole model there, or set vllm_service_model",
            )
        configured = model / "tokenizer_config.json"
        template = (model / "chat_template.jinja").is_file() or (model / "chat_template.json").is_file()
        if not template and not (configured.is_file() and "chat_template" in configured.read_text()):
            self.fail(
                "the model has no chat template, so no chat would be answered",
                str(model),
                "serve the instruction-tuned model",
            )
        find = [
            "runuser",
            "-u",
            self.p["user"],
            "--",
            "find",
            "-L",
            str(model),
            "-type",
            "f",
            "!",
            "-readable",
        ]
        done = subprocess.run(find, capture_output=True, text=True, check=False)
        if done.stdout or done.returncode:
            first = (done.stdout or done.stderr).strip().splitlines()[0]
            self.fail(f"user {self.p['user']} cannot read {first}", str(model), f"chmod -R a+rX {model}")

    def prune_caches(self) -> None:
        """Compile caches of releases that are gone."""
        for folder in _CACHE.glob("*"):
            if not (Path(self.p["root"]) / "releases" / folder.name).exists():
                shutil.rmtree(folder, ignore_errors=True)

    def systemctl(self, *words: str) -> int:
        """The exit status of `systemctl --quiet`."""
        return subprocess.run(["systemctl", "--quiet", *words], capture_output=True, check=False).returncode

    def command(self, argv: list[str]) -> None:
        """Runs a command that must succeed."""
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            self.fail(
                f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()[-200:]}",
                _UNIT,
                f"systemctl status {_UNIT}",
            )

    def write(self, path: Path, text: str) -> None:
        """Writes beside and renames."""
        part = path.with_name(f".{path.name}.part")
        part.write_text(text)
        part.chmod(0o644)
        part.replace(path)

    def fail(self, what: str, where: str, mend: str) -> None:
        """Ends the module in the house form; the service is untouched."""
        self.module.fail_json(msg=f"vllm_service: {what}\n  where: {where}\n  mend:  {mend}", refused=True)


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
            "gate": {"type": "dict", "required": True},
            "gate_program": {"type": "str", "required": True},
            "model": {"type": "str", "required": True},
            "argument_program": {"type": "str", "required": True},
            "user": {"type": "str", "default": "vllm"},
            "root": {"type": "path", "default": "/opt/vllm"},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
        supports_check_mode=True,
    )
    Serve(module).run()


if __name__ == "__main__":
    main()
