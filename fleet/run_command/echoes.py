"""An echo: the proof that a host carries commands out, and which boot of it does."""

from __future__ import annotations

import json
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from fleet.aws_errors import code_of
from fleet.run_command import document

_OVER = frozenset({"Success", "Failed", "TimedOut", "Cancelled"})
# The least that Systems Manager takes for a command's delivery, seconds.
_DELIVERY_S = 30


@dataclass(frozen=True, slots=True)
class Echo:
    """What a host said of itself: the boot's id by its kernel, and that boot's age in seconds."""

    boot_id: str
    uptime_s: float


def ask(ssm: Any, instance_id: str, *, wait_s: float, poll_s: float, stop: threading.Event) -> Echo | None:
    """Has the instance echo; None where it did not within `wait_s`, or has no agent that takes a command.

    A command that came too late for this wait is dropped by Systems Manager, or echoes unheard: it changes nothing.
    Raises botocore's errors, for all but an agent that is away.
    """
    run_id = uuid.uuid4().hex
    until = time.monotonic() + wait_s
    try:
        sent = ssm.send_command(
            DocumentName=document.NAME,
            InstanceIds=[instance_id],
            Parameters={"Job": ["echo"], "RunId": [run_id]},
            TimeoutSeconds=_DELIVERY_S,
        )
    except ClientError as error:
        if code_of(error) == "InvalidInstanceId":
            return None
        raise
    command_id = sent["Command"]["CommandId"]
    while time.monotonic() < until and not stop.wait(poll_s):
        # An invocation shows up some time after its command: none found is no answer yet.
        found = ssm.list_command_invocations(CommandId=command_id, InstanceId=instance_id, Details=True)
        for invocation in found["CommandInvocations"]:
            if invocation["Status"] in _OVER:
                return _said(invocation, run_id)
    return None


def _said(invocation: dict[str, Any], run_id: str) -> Echo | None:
    for plugin in invocation.get("CommandPlugins", []):
        for line in plugin.get("Output", "").splitlines():
            try:
                answer = json.loads(line)
            except ValueError:
                continue
            if isinstance(answer, dict) and answer.get("echo") == run_id:
                return Echo(str(answer["boot_id"]), float(answer["uptime_s"]))
    return None
