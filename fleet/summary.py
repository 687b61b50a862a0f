"""What a run ended with, per role and per host: in words, and as JSON."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet.progress import plain, spell
from fleet.running import Ran


def show(console: Console, ran: Ran, parts: dict[str, str]) -> None:
    """Prints the table of roles with what is real of each part, then each host's state, then totals."""
    table = Table(title="Roles", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("role", "done", "took", "part"):
        table.add_column(column, overflow="fold")
    for name, role in ran.collected.roles.items():
        done = Text("nothing to do" if role.ran else "not run")
        if role.failed:
            done = Text(f"failed: {plain(role.failed[0])}", "red")
        elif role.changed:
            done = Text(plain("; ".join(dict.fromkeys(role.changed))), "yellow")
        table.add_row(name, done, spell(role.seconds) if role.ran else "", parts.get(name, "real"))
    console.print(table)
    show_hosts(console, ran.collected.status)
    show_end(console, ran)


def show_patches(console: Console, ran: Ran) -> None:
    """Prints what the patch came to on each host and whether its server was started anew, then states and totals."""
    table = Table(title="Patch", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("host", "release", "patch", "why", "server"):
        table.add_column(column, overflow="fold")
    for host, tally in ran.finished.hosts.items():
        server = "failed" if tally.failed or tally.unreachable else _restart(ran, host)
        for patch in ran.collected.patches.get(host) or [{"build_id": "", "outcome": "no outcome", "reason": ""}]:
            words = (host, patch["build_id"], patch["outcome"], patch["reason"], server)
            table.add_row(*(Text(plain(word)) for word in words))
    console.print(table)
    show_hosts(console, ran.collected.status)
    show_end(console, ran)


def _restart(ran: Ran, host: str) -> str:
    serving = ran.collected.status.get(host, {}).get("serving") or {}
    if "--check" in ran.request.flags:
        # What would be put in place is not there yet, so only the patch can tell that the server would be stale.
        patches = ran.collected.patches.get(host, [])
        stale = any(patch["changed"] and patch["build_id"] == serving.get("build_id") for patch in patches)
        return "would be restarted" if host in ran.collected.restarted or stale else "would not be restarted"
    if host in ran.collected.restarted:
        return "restarted"
    return "not restarted" if serving.get("active") else "does not serve"


def show_end(console: Console, ran: Ran) -> None:
    """Prints the counts of each host, the duration, the log, and what failed."""
    for host, tally in ran.finished.hosts.items():
        counts = f"ok={tally.ok} changed={tally.changed} failed={tally.failed} unreachable={tally.unreachable}"
        _say(console, (host, "bold"), f" {counts}")
    _say(console, f"took {spell(ran.seconds)}, log {ran.log}")
    for tally in ran.finished.hosts.values():
        if tally.message:
            _say(console, ("\n" + tally.message, "red"))


def show_hosts(console: Console, status: dict[str, dict[str, Any]]) -> None:
    """Prints each host's state: plan, releases, patch, address."""
    for host, found in status.items():
        _show_host(console, host, found)


def as_json(ran: Ran) -> dict[str, Any]:
    """`{code, hosts}`; of each host the counts, the first failure's message, what the run did, and `state_of` it.

    `patches` are the outcomes of this run by release, `restarted` whether the server was (in a check, would be) started
    anew, `builds` those that a host has begun, where these were asked for.
    """
    return {
        "code": int(ran.finished.code),
        "hosts": {
            name: {
                "ok": tally.ok,
                "changed": tally.changed,
                "failed": tally.failed,
                "unreachable": tally.unreachable,
                "message": tally.message,
                "patches": [
                    {key: patch[key] for key in ("build_id", "outcome", "reason", "changed")}
                    for patch in ran.collected.patches.get(name, [])
                ],
                "restarted": name in ran.collected.restarted,
                **({"builds": ran.collected.builds[name]} if name in ran.collected.builds else {}),
                **state_of(ran.collected.status.get(name, {})),
            }
            for name, tally in ran.finished.hosts.items()
        },
    }


def state_of(status: dict[str, Any]) -> dict[str, Any]:
    """A host's state, the telling part first.

    `address` is where it answers, `release` the build that is switched to, `patch` what the patch came to there,
    `running` the build that serves now, `wanted` the one that last passed its gate; each None where there is none.
    """
    serving = status.get("serving") or {}
    release: dict[str, Any] = next((found for found in status.get("releases", []) if found.get("current")), {})
    up = bool(serving.get("active"))
    return {
        "address": serving.get("url") if up else None,
        "release": release.get("build_id"),
        "patch": (release.get("patch") or {}).get("outcome"),
        "running": release.get("build_id") if up else None,
        "wanted": serving.get("build_id"),
        **status,
    }


def _show_host(console: Console, host: str, status: dict[str, Any]) -> None:
    serving = status.get("serving") or {}
    active = bool(serving.get("active"))
    _say(console, "\n", (host, "bold"), " ", ("serving", "") if active else ("not serving", "red"))
    for decision in status.get("decisions", []):
        _say(console, f"  plan     {decision['topic']}: {decision['decision']} — {decision['why']}")
    for release in status.get("releases", []):
        patch = release.get("patch") or {}
        _say(console, f"  release  {release['build_id']}", " (current)" if release.get("current") else "")
        _say(console, f"  patch    {patch.get('outcome', 'no record')}: {patch.get('reason', '')}")
    state = state_of(status)
    if state["running"] != state["wanted"]:
        _say(console, (f"  drift    {state['running'] or 'nothing'} runs, {state['wanted']} is wanted", "yellow"))
    for drift in serving.get("drift") or []:
        _say(
            console,
            (
                f"  drift    {drift['what']}: {drift['found'] or 'nothing'}, {drift['wanted'] or 'nothing'} is wanted",
                "yellow",
            ),
        )
    if serving.get("token") == "older":
        _say(console, ("  token    the server was started with an older one; ./runner.py rotate", "yellow"))
    if active:
        url, model = serving["url"], serving["model"]
        _say(console, f"  address  {url}")
        body = f'{{"model":"{model}","messages":[{{"role":"user","content":"{serving["question"]}"}}]}}'
        _say(
            console,
            f"  try      {status.get('enter', '')}curl -s {url}/v1/chat/completions "
            f"-H 'Content-Type: application/json' -d '{body}'",
        )


def _say(console: Console, *parts: str | tuple[str, str]) -> None:
    """One line as it is: nothing of it is read as markup, and nothing of it steers the terminal."""
    texts = [Text(plain(part)) if isinstance(part, str) else Text(plain(part[0]), part[1]) for part in parts]
    console.print(Text.assemble(*texts), highlight=False, soft_wrap=True)
