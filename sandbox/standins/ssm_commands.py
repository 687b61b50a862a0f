"""Run Command of the local AWS: documents are moto's, here they are really run on the machines.

By AWS's API reference and its user guide's page on command statuses; output limits and the fifty ids are AWS's.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from typing import Any

from moto.ec2.models import ec2_backends
from moto.ssm.models import ssm_backends

from sandbox.standins.agents import Agents
from sandbox.standins.cloud import Call, Cloud
from sandbox.standins.invocations import Invocation, carry_out, execution_s
from sandbox.standins.local_aws import LocalAws, Refusal

_ACCOUNT = "123456789012"
_MOST_IDS = 50
_PAGE, _PAGE_INFORMATION, _MOST = 50, 10, 50


class Command:
    """One SendCommand with its invocations."""

    def __init__(self, call: Call, document: dict[str, Any], instance_ids: list[str]) -> None:
        asked = call.parameters
        self.id = str(uuid.uuid4())
        self.region = call.region
        self.document = document
        self.name = str(asked["DocumentName"])
        self.parameters = _parameters(document, asked.get("Parameters") or {})
        self.requested_at = time.time()
        self.delivery_s = float(asked.get("TimeoutSeconds", 3600))
        self.execution_s = execution_s(document, self.parameters)
        self.comment = str(asked.get("Comment", ""))
        self.at_once = _share(str(asked.get("MaxConcurrency", "50")), len(instance_ids))
        # As many errors may come; the next one stops the sending.
        self.errors_allowed = _share(str(asked.get("MaxErrors", "0")), len(instance_ids), least=0)
        self.invocations = {instance_id: Invocation(self.id, instance_id) for instance_id in instance_ids}

    def late(self) -> bool:
        """Whether it is too late to begin it."""
        return time.time() >= self.requested_at + self.delivery_s

    @property
    def expires(self) -> float:
        """When AWS waits no longer for those that it has not heard of, in seconds since the epoch."""
        return self.requested_at + self.delivery_s + self.execution_s

    def expired(self) -> bool:
        """Whether that is over."""
        return time.time() >= self.expires

    @property
    def status(self) -> str:
        """The command's own status, from its invocations'."""
        statuses = {invocation.status for invocation in self.invocations.values()}
        if statuses & {"InProgress", "Cancelling"}:
            return "InProgress"
        if "Pending" in statuses:
            return "Pending" if statuses == {"Pending"} else "InProgress"
        for status in ("TimedOut", "Failed", "Cancelled"):
            if status in statuses:
                return status
        return "Success"

    def described(self) -> dict[str, Any]:
        """As ListCommands shows it."""
        over = [found for found in self.invocations.values() if found.over]
        return {
            "CommandId": self.id,
            "DocumentName": self.name,
            "Comment": self.comment,
            "Parameters": self.parameters,
            "InstanceIds": list(self.invocations),
            "RequestedDateTime": self.requested_at,
            "ExpiresAfter": self.expires,
            "Status": self.status,
            "StatusDetails": self.status,
            "MaxConcurrency": str(self.at_once),
            "MaxErrors": str(self.errors_allowed),
            "TargetCount": len(self.invocations),
            "CompletedCount": len(over),
            "ErrorCount": sum(found.failed for found in over),
            "DeliveryTimedOutCount": sum(found.details == "DeliveryTimedOut" for found in over),
        }


class RunCommand:
    """Answers Run Command's calls, and the agents' page of the instances that Systems Manager manages."""

    def __init__(self, aws: LocalAws, agents: Agents) -> None:
        self._cloud: Cloud = aws.cloud
        self._agents = agents
        self.commands: dict[str, Command] = {}
        aws.stand_ins.update(
            {
                "SendCommand": self._send,
                "ListCommands": self._list,
                "ListCommandInvocations": self._invocations,
                "GetCommandInvocation": self._invocation,
                "CancelCommand": self._cancel,
                "DescribeInstanceInformation": self._information,
                "ListDocumentVersions": _versions,
            }
        )

    def _send(self, call: Call) -> dict[str, Any]:
        asked = call.parameters
        if len(asked.get("InstanceIds", [])) > _MOST_IDS:
            raise Refusal(
                "ValidationException",
                f"1 validation error detected: Value at 'instanceIds' failed to satisfy constraint: "
                f"Member must have length less than or equal to {_MOST_IDS}",
            )
        document = _document(call)
        if asked.get("InstanceIds"):
            ids = list(dict.fromkeys(asked["InstanceIds"]))
            if not all(self._agents.takes(found, call.region) for found in ids):
                raise Refusal("InvalidInstanceId", f"Instances {ids} not in a valid state for account {_ACCOUNT}")
        else:
            ids = [found for found in _targeted(call) if self._agents.takes(found, call.region)]
        command = Command(call, document, ids)
        self.commands[command.id] = command
        threading.Thread(target=self._carry_out, args=[command], daemon=True).start()
        return {"Command": command.described()}

    def _carry_out(self, command: Command) -> None:
        """Sends to as many machines at once as was asked, and to no further one after too many errors."""
        turns = threading.Semaphore(command.at_once)

        def one(invocation: Invocation) -> None:
            try:
                agent = self._agents[invocation.instance_id]
                carry_out(invocation, agent, command.document, command.parameters, command.late, command.expired)
            finally:
                turns.release()

        for invocation in command.invocations.values():
            turns.acquire()
            if sum(found.failed for found in command.invocations.values()) > command.errors_allowed:
                invocation.end("Cancelled", "Terminated")
                turns.release()
            else:
                threading.Thread(target=one, args=[invocation], daemon=True).start()

    def stop(self) -> None:
        """Ends all that is under way: nobody waits any longer, neither for a machine nor for its agent."""
        for command in list(self.commands.values()):
            for invocation in command.invocations.values():
                invocation.end("Cancelled", "Cancelled")
        for agent in list(self._agents.values()):
            agent.go_down()

    def _visible(self, call: Call) -> list[Command]:
        seen = time.time() - self._cloud.lag_s
        wanted = call.parameters.get("CommandId")
        found = [self.commands[wanted]] if wanted in self.commands else []
        if wanted and not found:
            raise Refusal("InvalidCommandId", "")
        return [
            command
            for command in (found if wanted else list(self.commands.values()))
            if command.requested_at <= seen and command.region == call.region
        ]

    def _list(self, call: Call) -> dict[str, Any]:
        return _page(call, "Commands", [command.described() for command in self._visible(call)])

    def _invocations(self, call: Call) -> dict[str, Any]:
        wanted = call.parameters.get("InstanceId")
        statuses = {f["value"] for f in call.parameters.get("Filters", []) if f["key"] == "Status"}
        details = bool(call.parameters.get("Details"))
        found = [
            invocation.listed(command.name, command.requested_at, details=details)
            for command in self._visible(call)
            for invocation in command.invocations.values()
            if wanted in (None, invocation.instance_id) and (not statuses or invocation.status in statuses)
        ]
        return _page(call, "CommandInvocations", found)

    def _invocation(self, call: Call) -> dict[str, Any]:
        command = self.commands.get(call.parameters["CommandId"])
        invocation = command.invocations.get(call.parameters["InstanceId"]) if command else None
        if command is None or invocation is None or command.requested_at > time.time() - self._cloud.lag_s:
            raise Refusal("InvocationDoesNotExist", "")
        return invocation.described(command.name)

    def _cancel(self, call: Call) -> dict[str, Any]:
        command = self.commands.get(call.parameters["CommandId"])
        if command is None:
            raise Refusal("InvalidCommandId", "")
        wanted = call.parameters.get("InstanceIds") or list(command.invocations)
        if not set(wanted) <= set(command.invocations):
            raise Refusal("InvalidInstanceId", "")
        for instance_id in wanted:
            command.invocations[instance_id].cancel()
        return {}

    def _information(self, call: Call) -> dict[str, Any]:
        wanted: dict[str, list[str]] = {f["Key"]: f["Values"] for f in call.parameters.get("Filters", [])}
        found = [
            shown
            for agent in self._agents.values()
            if agent.region == call.region
            and (shown := agent.described())
            and shown["InstanceId"] in wanted.get("InstanceIds", [shown["InstanceId"]])
            and shown["PingStatus"] in wanted.get("PingStatus", [shown["PingStatus"]])
        ]
        return _page(call, "InstanceInformationList", found, _PAGE_INFORMATION)


def _versions(call: Call) -> dict[str, Any]:
    """A document's versions, which moto keeps and does not list."""
    found = ssm_backends[_ACCOUNT][call.region]._documents.get(call.parameters["Name"])
    if found is None:
        raise Refusal("InvalidDocument", f"Document with name {call.parameters['Name']} does not exist.")
    shown = [
        {
            "Name": call.parameters["Name"],
            "DocumentVersion": version,
            "IsDefaultVersion": version == found.default_version,
        }
        for version in found.versions
    ]
    return _page(call, "DocumentVersions", shown)


def _document(call: Call) -> dict[str, Any]:
    """The document's content, from moto; by name, version and hash as asked."""
    asked = call.parameters
    documents = ssm_backends[_ACCOUNT][call.region]._documents
    found = documents.get(asked["DocumentName"])
    if found is None:
        raise Refusal("InvalidDocument", f"Document with name {asked['DocumentName']} does not exist.")
    version = str(asked.get("DocumentVersion", "$DEFAULT"))
    named = {"$DEFAULT": found.default_version, "$LATEST": found.latest_version}.get(version, version)
    if named not in found.versions:
        raise Refusal("InvalidDocumentVersion", f"The document version {named} does not exist.")
    document = found.versions[named]
    if asked.get("DocumentHash") and asked["DocumentHash"] != found.describe(document_version=named)["Hash"]:
        raise Refusal("InvalidDocument", "The provided document hash does not match the document's.")
    content = document.content
    return content if isinstance(content, dict) else json.loads(content)


def _parameters(document: dict[str, Any], given: dict[str, list[str]]) -> dict[str, list[str]]:
    """The parameters with the document's defaults; what the document does not take is refused."""
    known = document.get("parameters", {})
    if unknown := sorted(set(given) - set(known)):
        raise Refusal("InvalidParameters", f"Parameters {unknown} are not defined in the document.")
    values = {}
    for name, option in known.items():
        value = given.get(name, [option["default"]] if "default" in option else None)
        if value is None:
            raise Refusal("InvalidParameters", f"Parameter {name} is required.")
        for word in value:
            if word not in option.get("allowedValues", [word]):
                raise Refusal("InvalidParameters", f"Value {word} of {name} is not allowed.")
            if not re.search(option.get("allowedPattern", ""), word):
                raise Refusal("InvalidParameters", f"Value {word} of {name} does not match its pattern.")
        values[name] = [str(word) for word in value]
    return values


def _targeted(call: Call) -> list[str]:
    """Instances by their tags: a target's values are alternatives, targets add up."""
    backend = ec2_backends[_ACCOUNT][call.region]
    filters = {}
    for target in call.parameters.get("Targets", []):
        if not target["Key"].startswith("tag:"):
            raise Refusal("InvalidTarget", f"Target {target['Key']} is not valid.")
        filters[target["Key"]] = target["Values"]
    if not filters:
        raise Refusal("ValidationException", "InstanceIds or Targets must be given.")
    found = backend.describe_instances(filters={**filters, "instance-state-name": ["running"]})
    return [instance.id for reservation in found for instance in reservation.instances]


def _share(text: str, whole: int, least: int = 1) -> int:
    """A count or a percentage of the whole, as MaxConcurrency and MaxErrors are given."""
    count = whole * int(text[:-1]) // 100 if text.endswith("%") else int(text)
    return max(least, count)


def _page(call: Call, name: str, found: list[Any], usual: int = _PAGE) -> dict[str, Any]:
    begin, size = int(call.parameters.get("NextToken") or 0), int(call.parameters.get("MaxResults") or usual)
    if size > _MOST:
        raise Refusal(
            "ValidationException",
            f"1 validation error detected: Value '{size}' at 'maxResults' failed to satisfy constraint: "
            f"Member must have value less than or equal to {_MOST}",
        )
    end = begin + size
    more = {"NextToken": str(end)} if end < len(found) else {}
    return {name: found[begin:end], **more}
