"""What several commands share at the command line: options, errors for whoever asked for JSON, the end of a run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fleet import running, summary
from fleet.errors import ExitCode, FleetError
from fleet.requests import LOCAL_AWS, Transport, parse_inventories
from sandbox import local_fleet, world

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]
Inventory = Annotated[
    list[Path] | None,
    typer.Option("-i", "--inventory", help="Inventory; without one the local sandbox; `local-aws` is the local AWS."),
]
Reach = Annotated[Transport, typer.Option("--transport", help="How hosts on EC2 are reached.")]
Limit = Annotated[str | None, typer.Option("--limit", help="Hosts or groups to confine the run to.")]


@contextlib.contextmanager
def errors(*, as_json: bool) -> Iterator[None]:
    """Whoever asked for JSON gets an error as JSON too, besides its text."""
    try:
        yield
    except FleetError as error:
        if as_json:
            print(json.dumps({"error": error.as_dict()}))
        raise


def standing(given: list[Path] | None) -> tuple[Path, ...]:
    """Inventories of hosts that are there already: those given, else the sandbox that is up.

    Raises FleetError where none is given and none is up.
    """
    wants_sandbox = not given or given == [LOCAL_AWS]
    found = world.read() if wants_sandbox else None
    if wants_sandbox and found is None:
        raise FleetError(
            "no sandbox is up, and no inventory is given", where="command line", mend="./runner.py sandbox up"
        )
    if found is not None and given:
        local_fleet.use(found)
    return parse_inventories(given or [])


def agree(question: str, where: str) -> None:
    """Asks where somebody can answer; what cannot be undone is not done on silence. Raises FleetError, refused."""
    if not sys.stdin.isatty() or not typer.confirm(question, err=True):
        raise FleetError("not agreed to, nothing was done", where=where, mend="--yes", code=ExitCode.REFUSED)


def end(ran: running.Ran, *, as_json: bool) -> None:
    """Prints the JSON, says what is left, and exits with the run's code."""
    running.check(ran)
    if as_json:
        print(json.dumps(summary.as_json(ran), indent=1))
    left = [name for name, tally in ran.finished.hosts.items() if tally.failed or tally.unreachable]
    if left:
        print(f"runner: {len(left)} of {len(ran.finished.hosts)} hosts left: {', '.join(left)}", file=sys.stderr)
        print(f"  go on: {ran.request.again()}", file=sys.stderr)
    raise typer.Exit(int(ran.finished.code))
