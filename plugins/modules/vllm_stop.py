#!/usr/bin/python
"""Ansible module: ends what an interrupted run left running on the host, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.marked_processes import end, mark_of, running
from ansible.module_utils.service_state import Service

DOCUMENTATION = r"""
module: vllm_stop
short_description: End the processes of an interrupted run
description:
  - Processes of a run carry its id in their environment. They are asked to end and then made to; a package manager in
    the middle of its work is waited for. Builds are units of their own and go on. A switch of the service that the run
    has not finished is undone, so that what is recorded as serving is what runs.
options:
  run: {type: str, required: true, description: Id of the run.}
  root: {type: path, default: /opt/vllm, description: Folder of the releases and of the current link.}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
  wait_seconds: {type: int, default: 60, description: "Longest wait for a package manager, seconds."}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_stop: {run: 0123abcd}
"""
RETURN = """
ended: {type: list, returned: always, description: Names of the processes that were ended.}
undone: {type: str, returned: always, description: "The switch that was undone, and to what; empty for none."}
"""


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "run": {"type": "str", "required": True},
            "root": {"type": "path", "default": "/opt/vllm"},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
            "wait_seconds": {"type": "int", "default": 60},
        },
        supports_check_mode=True,
    )
    mark = mark_of(module.params["run"])
    ended = sorted({name for _, name in running(mark)})
    if ended and not module.check_mode:
        end(mark, module.params["wait_seconds"])
    left = [name for _, name in running(mark)] if not module.check_mode else []
    if left:
        module.fail_json(
            msg=f"vllm_stop: {', '.join(left)} would not end\n  where: {os.uname().nodename}\n"
            "  mend:  look at them with ps on the host, then converge again"
        )
    service = Service(Path(module.params["root"]), Path(module.params["state"]))
    try:
        undone = _undo(service, module.params["run"], check_mode=module.check_mode)
    except TimeoutError:
        module.fail_json(
            msg=f"vllm_stop: another run is switching the service, so this run's switch stays as it is\n"
            f"  where: {os.uname().nodename} vllm.service\n  mend:  wait for that run to end"
        )
    module.exit_json(changed=bool(ended or undone), ended=ended, undone=undone)


def _undo(service: Service, run: str, *, check_mode: bool) -> str:
    """Puts back what served before a switch that this run has left unfinished; the words for it."""
    cut_off = service.unfinished()
    if cut_off.get("run") != run:
        return ""
    if check_mode:
        return f"the switch to {cut_off['build_id']}"
    # Free by now: whoever held it was of this run, or the switch would not be unfinished.
    with service.held(wait_seconds=10):
        earlier = service.undo()
    return f"the switch to {cut_off['build_id']}: {earlier['build_id'] + ' serves' if earlier else 'nothing serves'}"


if __name__ == "__main__":
    main()
