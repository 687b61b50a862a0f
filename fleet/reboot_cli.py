"""`./runner.py reboot`: instances rebooted by EC2, one after the other, each until it echoes again."""

from __future__ import annotations

import json
import shlex
import sys
import threading
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet.errors import ExitCode, worst
from fleet.options import AsJson, Inventory, Limit, Yes, agree, errors, standing
from fleet.progress import Progress, Row, spell, terminal
from fleet.reboots import UNTOUCHED, Outcome, Patience, Rebooted, Target, rolling
from fleet.requests import Request
from fleet.run_command import hosts as ec2_hosts
from fleet.steps import Durations

_WAIT_S = 600


def reboot(
    inventory: Inventory = None,
    limit: Limit = None,
    at_once: Annotated[int, typer.Option("--at-once", min=1, help="Hosts at a time.")] = 1,
    wait_s: Annotated[int, typer.Option("--wait", min=1, help="Longest reboot, seconds.")] = _WAIT_S,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Reboot instances one after the other; a reboot is over when an echo comes from a new boot.

    The first host that stays down ends it. Whether the servers answer again is `status` to say.
    """
    with errors(as_json=as_json):
        request = Request(playbook="", inventories=standing(inventory), limit=limit, command="reboot")
        targets = _targets(request)
        if not yes:
            names = ", ".join(target.instance_id for target in targets)
            agree(f"Reboot {len(targets)} hosts, {at_once} at a time: {names}?", str(limit or "every host"))
        console = terminal(stderr=as_json)
        options = _options(at_once, wait_s, as_json=as_json, yes=yes)
        ends: list[Rebooted] = []
        try:
            _watch(console, targets, Patience(reboot_s=wait_s), at_once, ends)
        finally:
            code = _end(console, request, targets, ends, options, as_json=as_json)
    raise typer.Exit(int(code))


def _targets(request: Request) -> list[Target]:
    return [Target(host.instance_id, host.region) for host in ec2_hosts.resolved(request).hosts]


def _options(at_once: int, wait_s: int, *, as_json: bool, yes: bool) -> list[str]:
    words = ["--at-once", str(at_once)] if at_once != 1 else []
    words += ["--wait", str(wait_s)] if wait_s != _WAIT_S else []
    return [*words, *(["--json"] if as_json else []), *(["--yes"] if yes else [])]


def _watch(console: Console, targets: list[Target], patience: Patience, at_once: int, ends: list[Rebooted]) -> None:
    durations, lock = Durations(), threading.Lock()
    usual, begun = durations.usual("reboot: a host"), set[str]()
    with Progress(console, "reboot") as progress:

        def say(target: Target, words: str) -> None:
            with lock:
                if target.instance_id not in begun:
                    begun.add(target.instance_id)
                    progress.begin(Row(target.instance_id, "reboot", usual))
            progress.doing(target.instance_id, words)

        def ended(end: Rebooted) -> None:
            ends.append(end)
            progress.end(end.target.instance_id)
            style = "red" if end.code else "green"
            progress.say(f"{end.target.instance_id}: ", (f"{end.outcome} ({spell(end.seconds)})", style))
            if not end.code:
                durations.record("reboot: a host", end.seconds)

        rolling(targets, patience, at_once, say, ended)


def _end(
    console: Console,
    request: Request,
    targets: list[Target],
    ends: list[Rebooted],
    options: list[str],
    *,
    as_json: bool,
) -> ExitCode:
    """Prints what became of each host, who is left, and the command that goes on with these."""
    failed = {end.target.instance_id: end for end in ends if end.code}
    touched = {end.target.instance_id for end in ends if end.outcome not in UNTOUCHED}
    left = [target.instance_id for target in targets if target.instance_id not in touched]
    code = worst(end.code for end in ends)
    go_on = shlex.join([*shlex.split(replace(request, limit=",".join(left)).again()), *options]) if left else ""
    if as_json:
        print(json.dumps({"code": int(code), "hosts": _as_json(ends), "left": left, "go_on": go_on}, indent=1))
    else:
        _show(console, ends)
    for end in failed.values():
        print(end.error or _explained(end), file=sys.stderr)
    if left:
        print(f"reboot: {len(left)} of {len(targets)} hosts left: {', '.join(left)}", file=sys.stderr)
        print(f"  go on: {go_on}", file=sys.stderr)
    if not left and not code:
        status = replace(request, command="status").again()
        console.print(f"whether the servers answer again: {status}", markup=False, highlight=False, soft_wrap=True)
    return code


def _as_json(ends: list[Rebooted]) -> dict[str, dict[str, Any]]:
    return {
        end.target.instance_id: {
            "outcome": end.outcome,
            "boot_before": end.before,
            "boot_after": end.after,
            "seconds": end.seconds,
            "error": end.error.as_dict() if end.error else None,
        }
        for end in ends
    }


def _show(console: Console, ends: list[Rebooted]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("instance", "outcome", "boot before", "boot after", "took"):
        table.add_column(name)
    for end in ends:
        boots = (end.before[:8], end.after[:8])
        table.add_row(end.target.instance_id, Text(end.outcome), *boots, spell(end.seconds))
    console.print(table)


def _explained(end: Rebooted) -> str:
    """A host's end that is no error of AWS's, in the house form."""
    what, mend = {
        Outcome.DOWN: ("it was rebooted, and no echo comes from it", "aws ec2 get-console-output --latest"),
        Outcome.UNCHANGED: ("it was told to reboot, and the boot of before still echoes", "reboot it again"),
        Outcome.UNREACHABLE: ("no echo comes from it, so it was not rebooted", "aws ssm describe-instance-information"),
        Outcome.AT_WORK: (
            "a command is under way there, so it was not rebooted",
            "wait for its end, then reboot again",
        ),
    }[end.outcome]
    return f"reboot: {end.outcome}: {what}\n  where: {end.target.instance_id}\n  mend:  {mend}"
