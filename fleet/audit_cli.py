"""`./runner.py audit`: who reaches the fleet's instances and what they may do, against what is documented."""

from __future__ import annotations

import json
from itertools import groupby

import typer
from rich.console import Console
from rich.table import Table

from fleet.audits import Check, account, instances
from fleet.errors import ExitCode
from fleet.options import AsJson, Inventory, Limit, Yes, errors, standing
from fleet.progress import terminal
from fleet.requests import Request
from fleet.run_command import hosts as ec2_hosts
from fleet.run_command.hosts import Host
from fleet.run_command.transport import setting


def audit(inventory: Inventory = None, limit: Limit = None, as_json: AsJson = False, yes: Yes = False) -> None:
    """Say who reaches the instances on EC2 and what they may do; changes nothing, and ends with 4 on findings.

    Inbound rules, key pairs, instance metadata, user data, volumes, the role's policies, the agent; the bucket and
    the document.
    """
    del yes
    with errors(as_json=as_json):
        request = Request(playbook="", inventories=standing(inventory), limit=limit, command="audit")
        checks = _checked(request, ec2_hosts.resolved(request).hosts)
    if as_json:
        print(json.dumps({"checks": [check.as_dict() for check in checks]}, indent=1))
    else:
        _show(terminal(stderr=False), checks)
    raise typer.Exit(int(ExitCode.OK if all(check.ok for check in checks) else ExitCode.DRIFT))


def _checked(request: Request, found: tuple[Host, ...]) -> list[Check]:
    checks = []
    for region, there in groupby(sorted(found, key=lambda host: host.region), key=lambda host: host.region):
        checks += instances.checked(region, [host.instance_id for host in there])
        checks.append(account.documents(region))
    for name, near in sorted({(setting(request, host, "vllm_fleet_bucket"), found[0].region) for host in found}):
        checks += [account.bucket(name, near)] if name else []
    return checks


def _show(console: Console, checks: list[Check]) -> None:
    """The findings, each with its mend; what is right is counted."""
    findings = [check for check in checks if not check.ok]
    if findings:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("what", "check", "found", "mend"):
            table.add_column(name, overflow="fold")
        for check in findings:
            table.add_row(check.subject, check.name, check.found, check.mend)
        console.print(table)
    subjects = len({check.subject for check in checks})
    console.print(f"audit     {len(checks)} checks of {subjects} things, {len(findings)} to mend")
