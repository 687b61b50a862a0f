#!/usr/bin/python
"""Ansible module: the unit that fetches the token is in place and has run; no value passes through here."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.patch_files import write_whole
from ansible.module_utils.service_state import UNIT as SERVER
from ansible.module_utils.service_state import read_text
from ansible.module_utils.systemd_unit import Unit, daemon_reload

DOCUMENTATION = r"""
module: vllm_secret
short_description: Install and run the unit that fetches a secret, or remove it with the secret
description:
  - Compares environment, program, request and unit with what is wanted, mends them, and runs the unit. Where all is as
    wanted the unit fetches again, so that a rotated secret arrives; RV(changed) says whether its version is another.
    The service reads the token when it starts, so it is not restarted for a new one.
options:
  state: {type: str, choices: [present, absent], default: present, description: Whether it is wanted.}
  home: {type: path, required: true, description: Environment of the fetcher.}
  folder: {type: path, required: true, description: Memory-backed folder of the fetched file.}
  file: {type: str, required: true, description: Name of the fetched file.}
  requirements: {type: str, default: '', description: Hashed requirements of the fetcher.}
  program: {type: str, default: '', description: Text of the fetcher.}
  unit_text: {type: str, default: '', description: Text of the systemd unit.}
  request: {type: dict, default: {}, description: "What to fetch: secret_id, key, region. No value."}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_secret: {home: /opt/vllm-fleet/secrets, folder: /run/vllm-secrets, file: hf_token}
"""
RETURN = "version: {type: str, returned: success, description: Version id of the secret that lies there, or empty.}"


class Secret:
    """The fetcher of one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.home = Path(self.p["home"])
        self.unit = Unit("vllm-secrets.service")

    def remove(self) -> None:
        """Unit, fetcher and token go; where neither unit nor fetcher is there, the folder is somebody else's."""
        found = self.unit.path.exists() or self.home.exists()
        if found and not self.module.check_mode:
            self.refuse_while_taken()
            # The token's folder goes with the unit.
            self.unit.call("disable")
            self.unit.call("stop")
            self.unit.path.unlink(missing_ok=True)
            daemon_reload()
            self.unit.call("reset-failed")
            for folder in (self.home, Path(self.p["folder"])):
                shutil.rmtree(folder, ignore_errors=True)
        self.module.exit_json(changed=found, version="")

    def refuse_while_taken(self) -> None:
        """A server whose unit takes the token would not start again without it."""
        token = str(Path(self.p["folder"]) / self.p["file"])
        if f"LoadCredential=hf_token:{token}\n" in Unit(SERVER).text():
            self.module.fail_json(
                msg=(
                    f"secrets_fetch: {SERVER} still takes {token}, and a token is removed once nothing does\n"
                    f"  where: {Unit(SERVER).path}\n"
                    "  mend:  set vllm_service_token_file to '', then ./runner.py converge (all roles)"
                ),
                refused=True,
            )

    def run(self) -> None:
        """Probe, decide, act, verify."""
        if not self.p["request"].get("secret_id"):
            self.module.fail_json(
                msg=(
                    "secrets_fetch: no secret is named, and one is wanted\n"
                    "  where: secrets_fetch_secret_id\n  mend:  set it to the secret's name"
                ),
                argument_errors=["secrets_fetch_secret_id is empty, and a secret's name is wanted"],
            )
        request = {**self.p["request"], "folder": self.p["folder"], "file": self.p["file"]}
        files = {
            self.home / "fetch_secret.py": self.p["program"],
            self.home / "request.json": json.dumps(request, indent=1, sort_keys=True) + "\n",
            self.unit.path: self.p["unit_text"],
        }
        stamp = self.home / "requirements.stamp"
        stale_environment = not stamp.is_file() or stamp.read_text() != self.p["requirements"]
        different = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
        ran = self.unit.is_on() and self.is_right()
        before = self.version()
        diff = [
            {"before_header": str(p), "after_header": str(p), "before": read_text(p), "after": files[p].strip()}
            for p in different
        ]
        drifted = bool(stale_environment or different or not ran)
        if self.module.check_mode:
            self.module.exit_json(changed=drifted, version=before, diff=diff)
        if drifted:
            self.install(files, different, stamp if stale_environment else None)
        elif self.unit.call("reload") or not self.is_right():
            self.tell_failure()
        self.module.exit_json(changed=drifted or self.version() != before, version=self.version(), diff=diff)

    def install(self, files: dict[Path, str], different: list[Path], stamp: Path | None) -> None:
        """Puts in place what differs, and fetches."""
        if stamp is not None:
            self.make_environment(stamp)
            # The program and its request lie in the environment's folder.
            different = list(files)
        for path in different:
            write_whole(path, files[path].encode())
        daemon_reload()
        self.unit.call("reset-failed")
        self.unit.call("enable")
        if self.unit.call("restart") or not self.is_right():
            self.tell_failure()

    def make_environment(self, stamp: Path) -> None:
        """The environment, by hash; a half-made one is made anew."""
        shutil.rmtree(self.home, ignore_errors=True)
        requirements = self.home / "requirements.txt"
        self.command([sys.executable, "-m", "venv", str(self.home)])
        requirements.write_text(self.p["requirements"])
        self.command(
            [
                str(self.home / "bin/pip"),
                "install",
                "-q",
                "--no-cache-dir",
                "--require-hashes",
                "-r",
                str(requirements),
            ]
        )
        stamp.write_text(self.p["requirements"])

    def is_right(self) -> bool:
        """A token lies there, for its owner alone, in memory; its content is not read."""
        path = Path(self.p["folder"]) / self.p["file"]
        try:
            found = path.stat()
        except OSError:
            return False
        mount = subprocess.run(
            ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=False
        ).stdout
        return stat.S_IMODE(found.st_mode) == 0o400 and found.st_uid == 0 and mount.strip() in ("tmpfs", "ramfs")

    def version(self) -> str:
        """The version id that lies beside the token."""
        path = Path(self.p["folder"]) / "version"
        return path.read_text() if path.is_file() else ""

    def tell_failure(self) -> None:
        """The fetcher's own words, which hold no value."""
        words = "\n".join(self.unit.journal(20))
        at = words.rfind("secrets_fetch:")
        told = words[at:].split("\n")[:3] if at >= 0 else []
        if len(told) == 3:
            self.module.fail_json(msg="\n".join(told))
        self.fail("the fetcher failed without a word", f"systemctl status {self.unit.name}")

    def command(self, argv: list[str]) -> None:
        """Runs a command that must succeed."""
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode:
            tail = (done.stderr.strip().splitlines() or [""])[-1]
            self.fail(
                f"{' '.join(argv[:3])} ended with {done.returncode}: {tail}",
                "check the package index: pip config list",
            )

    def fail(self, what: str, mend: str) -> None:
        """Ends in the house form."""
        self.module.fail_json(msg=f"secrets_fetch: {what}\n  where: {self.home}\n  mend:  {mend}")


def main() -> None:
    """Runs the module."""
    text = {"type": "str", "default": ""}
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
            "home": {"type": "path", "required": True},
            "folder": {"type": "path", "required": True},
            "file": {"type": "str", "required": True},
            "requirements": text,
            "program": text,
            "unit_text": text,
            "request": {"type": "dict", "default": {}},
        },
        required_if=[("state", "present", ("requirements", "program", "unit_text", "request"))],
        supports_check_mode=True,
    )
    secret = Secret(module)
    if module.params["state"] == "absent":
        secret.remove()
    secret.run()


if __name__ == "__main__":
    main()
