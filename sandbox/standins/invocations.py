"""A command on one machine, as the agent carries it out: the document's scripts really run there."""

from __future__ import annotations

import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from typing import IO, Any

from sandbox.standins.agents import ManagedInstance

# What AWS keeps of an output: GetCommandInvocation's first characters, and ListCommandInvocations' of each plugin.
_OUTPUT, _ERROR, _LISTED = 24_000, 8_000, 2_500
# No process ends with it.
_OVERTIME = 1000
# The exit code that the agent tells of what it stopped.
_STOPPED = 137
_OVER = frozenset({"Success", "Failed", "TimedOut", "Cancelled"})


class Invocation:
    """One machine's part of a command."""

    def __init__(self, command_id: str, instance_id: str) -> None:
        self.command_id = command_id
        self.instance_id = instance_id
        self.status = self.details = "Pending"
        self.output = self.error = ""
        self.response_code = -1
        self.began = self.ended = 0.0
        self.pid_file = f"/tmp/ssm-{command_id}-{instance_id}.pid"  # noqa: S108
        self.lock = threading.Lock()

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self.status in _OVER

    @property
    def failed(self) -> bool:
        """Whether it counts as an error; what was never delivered does not."""
        return self.details in ("Failed", "ExecutionTimedOut")

    def end(self, status: str, details: str, code: int = -1) -> None:
        """Ends it, once."""
        with self.lock:
            if not self.over:
                self.status, self.details, self.response_code, self.ended = status, details, code, time.time()

    def cancel(self) -> None:
        """Takes the cancellation; what runs already is the agent's to end."""
        with self.lock:
            if self.status == "Pending":
                self.status = self.details = "Cancelled"
            elif self.status == "InProgress":
                self.status = self.details = "Cancelling"

    def begin(self) -> bool:
        """The machine takes it up, unless it was cancelled."""
        with self.lock:
            taken = self.status == "Pending"
            if taken:
                self.status, self.details, self.began = "InProgress", "InProgress", time.time()
            return taken

    def listed(self, document: str, requested_at: float, *, details: bool) -> dict[str, Any]:
        """As ListCommandInvocations shows it."""
        plugin = {
            "Name": "run",
            "Status": self.status,
            "StatusDetails": self.details,
            "ResponseCode": self.response_code,
            "ResponseStartDateTime": self.began,
            "ResponseFinishDateTime": self.ended,
            "Output": self.output[:_LISTED],
        }
        return {
            "CommandId": self.command_id,
            "InstanceId": self.instance_id,
            "DocumentName": document,
            "RequestedDateTime": requested_at,
            "Status": self.status,
            "StatusDetails": self.details,
            **({"CommandPlugins": [plugin]} if details else {}),
        }

    def described(self, document: str) -> dict[str, Any]:
        """As GetCommandInvocation shows it."""
        return {
            "CommandId": self.command_id,
            "InstanceId": self.instance_id,
            "DocumentName": document,
            "PluginName": "run",
            "ResponseCode": self.response_code,
            "Status": self.status,
            "StatusDetails": self.details,
            "StandardOutputContent": self.output[:_OUTPUT],
            "StandardErrorContent": self.error[:_ERROR],
        }


def carry_out(
    invocation: Invocation,
    agent: ManagedInstance,
    document: dict[str, Any],
    parameters: dict[str, list[str]],
    late: Callable[[], bool],
    expired: Callable[[], bool],
) -> None:
    """Waits for the agent, runs the steps, and ends the invocation as AWS would.

    Args:
        late: whether the time for its delivery is over.
        expired: whether its time as a whole is over: AWS then waits no longer for what an agent has to tell.
    """
    if not _heard(invocation, agent, late) or not invocation.begin():
        return
    for _ in range(agent.deliveries):
        # Of one that is carried out again the last output is told.
        invocation.output = invocation.error = ""
        for step in document["mainSteps"]:
            while (code := _step(invocation, agent, step["inputs"], parameters)) is None:
                # An agent takes up again what its machine's going down broke off: it runs the step anew.
                if not _heard(invocation, agent, expired):
                    return
            # What a lost agent knows, nobody else does before it is back.
            if not _heard(invocation, agent, expired):
                return
            if code == _OVERTIME:
                invocation.end("TimedOut", "ExecutionTimedOut", _STOPPED)
            elif invocation.status == "Cancelling":
                invocation.end("Cancelled", "Cancelled", code)
            elif code:
                invocation.end("Failed", "Failed", code)
            if invocation.over:
                return
    invocation.end("Success", "Success", 0)


def execution_s(document: dict[str, Any], parameters: dict[str, list[str]]) -> float:
    """How long the document's steps may take together."""
    return sum(_limit_s(step["inputs"], parameters) for step in document["mainSteps"])


def _limit_s(inputs: dict[str, Any], parameters: dict[str, list[str]]) -> float:
    return float(_filled(str(inputs.get("timeoutSeconds", 3600)), parameters))


def _heard(invocation: Invocation, agent: ManagedInstance, in_vain: Callable[[], bool]) -> bool:
    """Waits until the agent is heard of; False where the invocation has ended before."""
    while not agent.heard and not invocation.over:
        if in_vain():
            invocation.end("TimedOut", "DeliveryTimedOut")
        time.sleep(0.05)
    return not invocation.over


def _step(
    invocation: Invocation, agent: ManagedInstance, inputs: dict[str, Any], parameters: dict[str, list[str]]
) -> int | None:
    """One aws:runShellScript step: its exit code, _OVERTIME, or None where its machine went down under it."""
    script = "\n".join(_filled(line, parameters) for line in inputs["runCommand"])
    until = time.monotonic() + _limit_s(inputs, parameters)
    # The script is an argument, so that nothing in it can take its own text for input.
    wrapped = 'echo $$ >"$1"; sh -c "$2"; code=$?; rm -f "$1"; exit $code'
    argv = ["setsid", "--wait", "sh", "-c", wrapped, "sh", invocation.pid_file, script]
    boot, overtime, told = agent.boot, False, False
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as error:
        process = subprocess.Popen(
            agent.machine.command(argv), cwd=agent.machine.folder, env=agent.environment(),
            stdin=subprocess.DEVNULL, stdout=out, stderr=error, start_new_session=True,
        )  # fmt: skip
        agent.processes.append(process.pid)
        while (code := process.poll()) is None:
            time.sleep(0.05)
            overtime = overtime or time.monotonic() > until
            # Its time limit a lost agent keeps by itself; of a cancellation it does not hear.
            if not told and (overtime or (agent.heard and invocation.status == "Cancelling")):
                told = True
                agent.end(invocation.pid_file)
        agent.processes.remove(process.pid)
        if agent.boot != boot:
            return None
        invocation.output += _read(out)
        invocation.error += _read(error)
    return _OVERTIME if overtime else code


def _filled(text: str, parameters: dict[str, list[str]]) -> str:
    """The document's placeholders filled in; inserted text is not looked at again."""
    return re.sub(
        r"{{\s*([A-Za-z0-9]+)\s*}}",
        lambda found: parameters[found[1]][0] if found[1] in parameters else found[0],
        text,
    )


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
