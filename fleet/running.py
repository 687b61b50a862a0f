"""One run, shown and logged: joins the request's execution with the view, the log and the summary's collector."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fleet import aws_inventory, execution
from fleet.collector import Collector
from fleet.errors import ExitCode, FleetError
from fleet.events import Event
from fleet.execution import Finished
from fleet.requests import Request, Transport
from fleet.run_command import transport
from fleet.runlog import RunLog
from fleet.steps import Durations
from fleet.view import RunView


@dataclass(frozen=True, slots=True)
class Ran:
    """A run that came to its end; `seconds` is its whole duration."""

    request: Request
    finished: Finished
    collected: Collector
    log: Path
    seconds: float


def shown(request: Request, console: Console) -> Ran:
    """Runs the request under the view. A run that is broken off ends what it left on its hosts."""
    collected = Collector()
    began = time.monotonic()
    view = RunView(
        console,
        Durations(),
        request.command,
        verbose=bool(request.verbosity),
        rehearsal="--check" in request.flags,
        diff="--diff" in request.flags,
    )
    with RunLog(request.command) as log, view:

        def on_event(event: Event) -> None:
            log(event)
            collected(event)
            view(event)

        try:
            finished = executed(request, on_event)
        except BaseException:
            # Whatever broke it off, Ctrl-C, the watchdog or a full disk: the tasks on the hosts know nothing of it.
            with contextlib.suppress(OSError):
                view.stopping()
            executed(request.stopping(), lambda _: None)
            raise
    return Ran(request, finished, collected, log.path, time.monotonic() - began)


def executed(request: Request, on_event: Callable[[Event], None]) -> Finished:
    """Runs the request the way its hosts are reached: those on EC2 by one command each, unless it says otherwise."""
    if _by_run_command(request):
        return transport.execute(request, on_event)
    return execution.execute(request, on_event)


def check_reach(request: Request) -> None:
    """Raises FleetError where the request asks for what only Run Command does, and goes another way."""
    if request.max_errors != Request.__dataclass_fields__["max_errors"].default and not _by_run_command(request):
        raise FleetError(
            "only Run Command stops after a number of failures",
            where="--max-errors", mend="leave it out, or -i inventory/aws_ec2.yml without --transport session",
        )  # fmt: skip


def _by_run_command(request: Request) -> bool:
    on_ec2 = any(aws_inventory.is_ec2(path) for path in request.inventories)
    return on_ec2 and request.transport is Transport.RUN_COMMAND


def check(ran: Ran) -> None:
    """A run that failed on no host has a reason of its own: what Ansible said.

    Raises:
        FleetError: with the run's code.
    """
    finished = ran.finished
    if finished.code is ExitCode.OK or any(tally.message for tally in finished.hosts.values()):
        return
    if not finished.hosts:
        aws_inventory.explain(ran.request.inventories, ran.request.limit)
    first = ran.request.inventories[0]
    raise FleetError(
        finished.said.strip() or "Ansible ran on no host",
        where=", ".join(str(path) for path in ran.request.inventories),
        mend=f".venv/bin/ansible-inventory -i {first} --graph",
        code=finished.code,
    )
