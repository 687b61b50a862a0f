"""What a converge ended with, per role and per host, in words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleet.events import Event, HostResult, Outcome
from fleet.execution import Finished
from fleet.requests import ROLES
from fleet.steps import spell


@dataclass(slots=True)
class RoleDone:
    """What one role did on all hosts together; seconds are the sum of its tasks."""

    changed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    ran: bool = False
    seconds: float = 0.0


class Collector:
    """Gathers what the summary needs from the events."""

    def __init__(self) -> None:
        self.roles: dict[str, RoleDone] = {role: RoleDone() for role in ROLES}
        self.status: dict[str, dict[str, Any]] = {}

    def __call__(self, event: Event) -> None:
        """Takes one event."""
        if not isinstance(event, HostResult):
            return
        if "vllm_status" in event.result:
            self.status[event.host] = event.result["vllm_status"]
        role = self.roles.get(event.role)
        if role is None or event.outcome in (Outcome.SKIPPED, Outcome.RETRY):
            return
        role.ran = True
        role.seconds += event.seconds
        if event.outcome is Outcome.CHANGED:
            role.changed.append(event.task)
        elif event.outcome in (Outcome.FAILED, Outcome.UNREACHABLE):
            role.failed.append(event.task)


def show(
    console: Console, collected: Collector, finished: Finished, parts: dict[str, str], log: str, took: float
) -> None:
    """Prints the table of roles, then each host's state, then totals."""
    table = Table(title="Roles", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("role", "done", "took", "part"):
        table.add_column(column, overflow="fold")
    for name, role in collected.roles.items():
        done = "not run"
        if role.failed:
            done = f"[red]failed: {escape(role.failed[0])}[/]"
        elif role.changed:
            done = f"[yellow]{escape('; '.join(dict.fromkeys(role.changed)))}[/]"
        elif role.ran:
            done = "nothing to do"
        table.add_row(name, done, spell(role.seconds) if role.ran else "", parts.get(name, "real"))
    console.print(table)
    show_hosts(console, collected.status)
    for host, tally in finished.hosts.items():
        counts = f"ok={tally.ok} changed={tally.changed} failed={tally.failed} unreachable={tally.unreachable}"
        console.print(f"[bold]{host}[/] {counts}", highlight=False)
    console.print(f"took {spell(took)}, log {log}", highlight=False, soft_wrap=True)
    for tally in finished.hosts.values():
        if tally.message:
            console.print(f"\n[red]{escape(tally.message)}[/]", highlight=False, soft_wrap=True)


def show_hosts(console: Console, status: dict[str, dict[str, Any]]) -> None:
    """Prints each host's state: plan, releases, patch, address."""
    for host, found in status.items():
        _show_host(console, host, found)


def _show_host(console: Console, host: str, status: dict[str, Any]) -> None:
    serving = status.get("serving") or {}
    console.print(f"\n[bold]{host}[/] {'serving' if serving.get('active') else '[red]not serving[/]'}")
    for decision in status.get("decisions", []):
        console.print(f"  plan     {decision['topic']}: {decision['decision']} — {decision['why']}", soft_wrap=True)
    for release in status.get("releases", []):
        patch = release.get("patch") or {}
        here = " (current)" if release.get("current") else ""
        console.print(f"  release  {release['build_id']}{here}", highlight=False)
        console.print(f"  patch    {patch.get('outcome', 'no record')}: {patch.get('reason', '')}", soft_wrap=True)
    if serving.get("active"):
        url, model = serving["url"], serving["model"]
        console.print(f"  address  {url}", highlight=False)
        body = f'{{"model":"{model}","messages":[{{"role":"user","content":"{serving["question"]}"}}]}}'
        console.print(
            f"  try      {status.get('enter', '')}curl -s {url}/v1/chat/completions "
            f"-H 'Content-Type: application/json' -d '{escape(body)}'",
            highlight=False,
            soft_wrap=True,
        )
