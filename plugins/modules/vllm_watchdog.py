#!/usr/bin/python
"""Ansible module: the timer that looks for a hung engine is there, or is not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.patch_files import write_whole
from ansible.module_utils.systemd_unit import Unit, daemon_reload, objection

DOCUMENTATION = r"""
module: vllm_watchdog
short_description: Install or remove the watchdog of vLLM's engine
description: [Compares program, request, unit and timer with what is wanted, mends them, and starts the timer.]
options:
  enabled: {type: bool, required: true, description: Whether the watchdog is wanted.}
  folder: {type: path, required: true, description: Folder of the program and its request.}
  program: {type: str, required: true, description: Text of the program.}
  request: {type: dict, required: true, description: "What the program looks at: url, model, unit, limits."}
  service_text: {type: str, required: true, description: Text of the systemd unit.}
  timer_text: {type: str, required: true, description: Text of its timer.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_watchdog: {enabled: false, folder: /opt/vllm-fleet/service/watchdog}
"""
RETURN = "enabled: {type: bool, returned: success, description: Whether the watchdog is there.}"
_SERVICE, _TIMER = "vllm-watchdog.service", "vllm-watchdog.timer"


class Watchdog:
    """The watchdog of one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.folder = Path(self.p["folder"])
        self.service, self.timer = Unit(_SERVICE), Unit(_TIMER)

    def run(self) -> None:
        """Probe, decide, act, verify."""
        wanted = {
            self.folder / "watchdog.py": self.p["program"],
            self.folder / "request.json": json.dumps(self.p["request"], indent=1, sort_keys=True) + "\n",
            self.service.path: self.p["service_text"],
            self.timer.path: self.p["timer_text"],
        }
        found = {path: path.read_text() if path.is_file() else "" for path in wanted}
        if self.p["enabled"]:
            different = {path: text for path, text in wanted.items() if found[path] != text}
            changed = bool(different) or not self.timer.is_on()
        else:
            different = dict.fromkeys((path for path in wanted if found[path]), "")
            changed = bool(different)
        if changed and not self.module.check_mode:
            if self.p["enabled"]:
                self.install(different)
            else:
                self.remove()
        headers = [(path, {"before_header": str(path), "after_header": str(path)}) for path in different]
        diff = [{**names, "before": found[path], "after": different[path]} for path, names in headers]
        self.module.exit_json(changed=changed, enabled=self.p["enabled"], diff=diff)

    def install(self, different: dict[Path, str]) -> None:
        """Puts in place what differs and starts the timer anew."""
        self.folder.mkdir(parents=True, exist_ok=True)
        program = self.folder / "watchdog.py"
        for path in sorted(different, key=lambda path: path != program):
            if path == self.service.path and (words := objection(_SERVICE, different[path])):
                self.fail(f"the unit is not valid: {words}", "set vllm_service_watchdog_enabled: false")
            write_whole(path, different[path].encode())
        daemon_reload()
        self.timer.call("enable")
        if self.timer.call("restart") or not self.timer.is_on():
            self.fail("the timer is not on after its start", f"systemctl status {_TIMER}")

    def remove(self) -> None:
        """Stops the timer and takes everything away."""
        self.timer.call("stop")
        self.timer.call("disable")
        self.service.call("stop")
        self.service.call("clean")
        for path in (self.timer.path, self.service.path):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        daemon_reload()

    def fail(self, what: str, mend: str) -> None:
        """Ends in the house form."""
        self.module.fail_json(msg=f"vllm_service: watchdog: {what}\n  where: {self.timer.path}\n  mend:  {mend}")


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "enabled": {"type": "bool", "required": True},
            "folder": {"type": "path", "required": True},
            "program": {"type": "str", "required": True},
            "request": {"type": "dict", "required": True},
            "service_text": {"type": "str", "required": True},
            "timer_text": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    Watchdog(module).run()


if __name__ == "__main__":
    main()
