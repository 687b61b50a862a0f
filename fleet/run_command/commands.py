"""SendCommand and what comes of it: one command for up to fifty hosts, each host's invocation followed by polling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fleet import aws
from fleet.aws_errors import told
from fleet.run_command import document

# AWS's own limit of explicit ids, and of what one page of invocations holds.
MOST_IDS = 50
_OVER = frozenset({"Success", "Failed", "TimedOut", "Cancelled"})


@dataclass(frozen=True, slots=True)
class Rate:
    """How many hosts begin at once, after how many failures no further one is begun, and the times in seconds."""

    at_once: int
    errors: str
    delivery_s: int
    execution_s: int


@dataclass(frozen=True, slots=True)
class Invocation:
    """A host's part of a command as AWS tells it; `said` are the JSON lines of its output."""

    instance_id: str
    status: str
    details: str
    said: tuple[dict[str, Any], ...]
    output: str

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return self.status in _OVER


@dataclass(frozen=True, slots=True)
class Command:
    """A command that was sent."""

    id: str
    region: str
    instance_ids: tuple[str, ...]


def send(region: str, ids: Sequence[str], version: str, parameters: dict[str, str], rate: Rate) -> Command:
    """Sends the document's version to at most fifty instances; asked for once, whatever becomes of the answer."""
    with told(f"{region} {', '.join(ids)}"):
        sent = aws.client("ssm", region, once=True).send_command(
            DocumentName=document.NAME,
            DocumentVersion=version,
            InstanceIds=list(ids),
            Parameters={name: [value] for name, value in parameters.items()},
            MaxConcurrency=str(rate.at_once),
            MaxErrors=rate.errors,
            TimeoutSeconds=rate.delivery_s,
            Comment="vllm-fleet",
        )
    return Command(sent["Command"]["CommandId"], region, tuple(ids))


def invocations(ssm: Any, command: Command) -> Iterator[Invocation]:
    """What AWS tells by now; an invocation that it does not list yet is left out."""
    pages = ssm.get_paginator("list_command_invocations").paginate(
        CommandId=command.id, Details=True, PaginationConfig={"PageSize": MOST_IDS}
    )
    with told(f"{command.region} command {command.id}"):
        for page in pages:
            for found in page["CommandInvocations"]:
                output = "".join(plugin.get("Output", "") for plugin in found.get("CommandPlugins", []))
                yield Invocation(found["InstanceId"], found["Status"], found["StatusDetails"], _said(output), output)


def cancel(ssm: Any, command: Command, ids: Sequence[str] = ()) -> None:
    """Asks AWS to end it on these of its hosts, on all where none is named."""
    with told(f"{command.region} command {command.id}"):
        ssm.cancel_command(CommandId=command.id, InstanceIds=list(ids))


def _said(output: str) -> tuple[dict[str, Any], ...]:
    found = []
    for line in output.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return tuple(found)
