"""`./runner.py audit`: what is open, outdated or allowed too much, on the hosts and in the account they are of."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet import aws_inventory, running, summary
from fleet.audits import Check, account, instances
from fleet.errors import ExitCode, FleetError
from fleet.options import AsJson, Inventory, Limit, Reach, Yes, end, errors, standing
from fleet.progress import plain, terminal
from fleet.requests import Request, Transport
from fleet.run_command import hosts as ec2_hosts
from fleet.run_command.hosts import Host
from fleet.run_command.transport import setting


def audit(
    inventory: Inventory = None,
    limit: Limit = None,
    transport: Reach = Transport.RUN_COMMAND,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Say what is open, outdated or allowed too much; changes nothing, and ends with 4 on findings.

    Of each host its security updates, its services' sandboxing, what listens, and who reaches the server. On EC2
    inbound rules, key pairs, instance metadata, user data, volumes, the role's policies, the agent; the bucket and the
    document.
    """
    del yes
    console = terminal(stderr=as_json)
    with errors(as_json=as_json):
        request = Request(
            playbook="playbooks/audit.yml", inventories=standing(inventory), limit=limit, command="audit", stall_s=120,
            transport=transport,
        )  # fmt: skip
        checks = _of_account(request)
    ran, refusal = _looked(request, console)
    if ran:
        checks += _of_hosts(ran)
    if as_json:
        print(json.dumps(_as_json(checks, ran, refusal), indent=1))
    else:
        _show(console, checks)
        if ran:
            summary.show_end(console, ran)
    if refusal:
        raise refusal
    if ran and ran.finished.code is not ExitCode.OK:
        # What is not known of a host weighs more than what was found.
        end(ran, as_json=False)
    raise typer.Exit(int(ExitCode.OK if all(check.ok for check in checks) else ExitCode.DRIFT))


def _of_account(request: Request) -> list[Check]:
    """What AWS itself tells of the hosts that are EC2's."""
    if not any(map(aws_inventory.is_ec2, request.inventories)):
        return []
    found = ec2_hosts.resolved(request).hosts
    checks = []
    for region, there in groupby(sorted(found, key=lambda host: host.region), key=lambda host: host.region):
        checks += instances.checked(region, [host.instance_id for host in there])
        checks.append(account.documents(region))
    return checks + _of_buckets(request, found)


def _of_buckets(request: Request, found: tuple[Host, ...]) -> list[Check]:
    named = sorted({(setting(request, host, "vllm_fleet_bucket"), found[0].region) for host in found})
    return [account.bucket(name, near) for name, near in named if name]


def _looked(request: Request, console: Console) -> tuple[running.Ran | None, FleetError | None]:
    """The hosts' own side, or why it is not known: what the account tells stands in either case."""
    try:
        ran = running.shown(request, console)
        running.check(ran)
    except FleetError as error:
        return None, error
    return ran, None


def _of_hosts(ran: running.Ran) -> list[Check]:
    return [Check(host, **check) for host, checks in ran.collected.host_checks.items() for check in checks]


def _as_json(checks: list[Check], ran: running.Ran | None, refusal: FleetError | None) -> dict[str, Any]:
    """`{checks}`, besides `failed`, what each host that failed or was not reached said, and the `error` of the run."""
    tallies = ran.finished.hosts if ran else {}
    failed = {host: tally.message for host, tally in tallies.items() if tally.failed or tally.unreachable}
    return {
        "checks": [check.as_dict() for check in checks],
        "failed": failed,
        **({"error": refusal.as_dict()} if refusal else {}),
    }


def _show(console: Console, checks: list[Check]) -> None:
    """The findings, each with its mend; what is right is counted."""
    findings = [check for check in checks if not check.ok]
    if findings:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("what", "check", "found", "mend"):
            table.add_column(name, overflow="fold")
        for check in findings:
            table.add_row(*(Text(plain(word)) for word in (check.subject, check.name, check.found, check.mend)))
        console.print(table)
    subjects = len({check.subject for check in checks})
    console.print(f"audit     {len(checks)} checks of {subjects} things, {len(findings)} to mend")
