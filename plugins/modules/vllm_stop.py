#!/usr/bin/python
"""Ansible module: ends what an interrupted run left running on the host, and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: vllm_stop
short_description: End the processes of an interrupted run
description:
  - Processes of a run carry its id in their environment. They are asked to end and then made to; a package manager in
    the middle of its work is waited for. Builds and services are units of their own and go on.
options:
  run: {type: str, required: true, description: Id of the run.}
  wait_seconds: {type: int, default: 60, description: "Longest wait for a package manager, seconds."}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_stop: {run: 0123abcd}
"""
RETURN = "ended: {type: list, returned: always, description: Names of the processes that were ended.}"
_PATIENT = ("dpkg", "apt-get", "dpkg-deb")


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={"run": {"type": "str", "required": True}, "wait_seconds": {"type": "int", "default": 60}},
        supports_check_mode=True,
    )
    mark = f"VLLM_FLEET_RUN={module.params['run']}".encode()
    ended = sorted({name for _, name in _running(mark)})
    if ended and not module.check_mode:
        _end(mark, module.params["wait_seconds"])
    left = [name for _, name in _running(mark)] if not module.check_mode else []
    if left:
        module.fail_json(
            msg=f"vllm_stop: {', '.join(left)} would not end\n  where: {os.uname().nodename}\n"
            "  mend:  look at them with ps on the host, then converge again"
        )
    module.exit_json(changed=bool(ended), ended=ended)


def _end(mark: bytes, wait_seconds: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        busy = time.monotonic() + wait_seconds
        while any(name in _PATIENT for _, name in _running(mark)) and time.monotonic() < busy:
            time.sleep(0.5)
        for pid, _ in _running(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        quiet = time.monotonic() + 10
        while _running(mark) and time.monotonic() < quiet:
            time.sleep(0.2)


def _running(mark: bytes) -> list[tuple[int, str]]:
    """Processes that carry the mark: id and name."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append((int(folder.name), (folder / "comm").read_text().strip()))
    return found


if __name__ == "__main__":
    main()
