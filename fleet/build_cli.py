"""`./runner.py build`: builds that hosts have begun, said or cancelled."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet import running, summary
from fleet.errors import FleetError
from fleet.options import AsJson, Inventory, Limit, Reach, Yes, end, errors, standing
from fleet.progress import plain, terminal
from fleet.requests import Request, Transport
from fleet.view import how_far

app = typer.Typer(no_args_is_help=True, help="Builds that hosts have begun.")


@app.command()
def status(
    inventory: Inventory = None,
    limit: Limit = None,
    transport: Reach = Transport.RUN_COMMAND,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Say which builds hosts have begun and how far they are; changes nothing."""
    del yes
    _run("build status", inventory, limit, {}, transport, as_json=as_json)


@app.command()
def cancel(
    release: Annotated[str, typer.Argument(help="Name or build id; all that are at work if none.")] = "",
    inventory: Inventory = None,
    limit: Limit = None,
    transport: Reach = Transport.RUN_COMMAND,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """End builds with all their processes; what is compiled stays, and the next converge goes on with it."""
    del yes
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    asked = {"build_cancel": True, "build_release": release, "build_who": who}
    _run("build cancel", inventory, limit, asked, transport, as_json=as_json)


def _run(
    command: str,
    inventory: list[Path] | None,
    limit: str | None,
    asked: dict[str, Any],
    transport: Transport,
    *,
    as_json: bool,
) -> None:
    console = terminal(stderr=as_json)
    with errors(as_json=as_json):
        request = Request(
            playbook="playbooks/build.yml",
            inventories=standing(inventory),
            extra_vars=asked,
            limit=limit,
            command=command,
            stall_s=120,
            transport=transport,
        )
        ran = running.shown(request, console)
        _show(console, ran)
        if asked.get("build_release") and not ran.finished.code and not any(ran.collected.builds.values()):
            raise FleetError(
                f"no host has begun a build of {asked['build_release']}, and one at least is wanted",
                where=", ".join(map(str, request.inventories)),
                mend="./runner.py build status",
            )
        end(ran, as_json=as_json)


def _show(console: Console, ran: running.Ran) -> None:
    table = Table(title="Builds", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("host", "release", "build", "state", "how far"):
        table.add_column(column, overflow="fold")
    for host, builds in ran.collected.builds.items():
        for build in builds:
            words = (host, build["release"], build["build_id"], build["state"], build.get("what") or how_far(build))
            table.add_row(*(Text(plain(str(word))) for word in words))
    console.print(table)
    summary.show_end(console, ran)
