"""`./runner.py rotate`: the token fetched anew, on one host first, and what holds an older one started anew."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet import inventories, running, summary
from fleet.errors import ExitCode, worst
from fleet.options import AsJson, Inventory, Limit, Reach, Yes, errors, standing
from fleet.progress import plain, spell, terminal
from fleet.requests import Request, Transport
from fleet.running import Ran

_GROUP = "vllm"


def rotate(
    inventory: Inventory = None,
    limit: Limit = None,
    transport: Reach = Transport.RUN_COMMAND,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Fetch the secret anew; only a server that holds an older one is restarted, and proven.

    One host goes first. Where it fails, the others keep what they have.
    """
    del yes
    console = terminal(stderr=as_json)
    with errors(as_json=as_json):
        request = Request(
            playbook="playbooks/rotate.yml",
            inventories=standing(inventory),
            limit=limit,
            command="rotate",
            transport=transport,
        )
        names = inventories.hosts_of(request, _GROUP)
        rans: list[Ran] = []
        for part in (names[:1], names[1:]):
            if part and not any(ran.finished.code for ran in rans):
                rans.append(running.shown(replace(request, limit=",".join(part)), console))
                running.check(rans[-1])
        code = _end(console, request, rans, names, as_json=as_json)
    raise typer.Exit(int(code))


def _end(console: Console, request: Request, rans: list[Ran], names: list[str], *, as_json: bool) -> ExitCode:
    """Prints what became of each host, who is left, and the command that goes on with these."""
    code = worst(ran.finished.code for ran in rans)
    # One that kept what it has was not begun; one that failed may be tried again.
    good = {
        name for ran in rans for name, tally in ran.finished.hosts.items() if not (tally.failed or tally.unreachable)
    }
    left = [name for name in names if name not in good]
    if as_json:
        hosts = {name: found for ran in rans for name, found in summary.as_json(ran)["hosts"].items()}
        print(json.dumps({"code": int(code), "hosts": hosts, "left": left}, indent=1))
    else:
        _show(console, rans, names)
    if left:
        print(f"rotate: {len(left)} of {len(names)} hosts left: {', '.join(left)}", file=sys.stderr)
        print(f"  go on: {replace(request, limit=','.join(left)).again()}", file=sys.stderr)
    return code


def _show(console: Console, rans: list[Ran], names: list[str]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("host", "token", "server"):
        table.add_column(column, overflow="fold")
    told: dict[str, tuple[str, str]] = {}
    for ran in rans:
        for host, tally in ran.finished.hosts.items():
            serving = ran.collected.status.get(host, {}).get("serving") or {}
            bad = bool(tally.failed or tally.unreachable)
            server = "restarted, and answers" if host in ran.collected.restarted else "not restarted"
            told[host] = ("", "failed") if bad else (serving.get("token", ""), server)
    for host in names:
        words = (host, *told.get(host, ("", "not begun: keeps what it has")))
        table.add_row(*(Text(plain(word)) for word in words))
    console.print(table)
    for ran in rans:
        for tally in ran.finished.hosts.values():
            if tally.message:
                console.print(Text("\n" + plain(tally.message), "red"), soft_wrap=True)
    logs = ", ".join(str(ran.log) for ran in rans)
    console.print(f"took {spell(sum(ran.seconds for ran in rans))}, log {logs}", markup=False, soft_wrap=True)
