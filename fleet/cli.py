"""The command line: reads the request, runs it, shows it, and ends with the right exit code."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from fleet import summary
from fleet.errors import ExitCode, FleetError
from fleet.events import Event
from fleet.execution import Finished, execute
from fleet.requests import Request, known_variables, parse_extra_vars, sandbox_inventory
from fleet.runlog import RunLog
from fleet.steps import Durations, Steps
from fleet.view import RunView
from sandbox import evidence, world

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Bare GPU hosts become vLLM servers that are proven to answer.",
)
sandbox_app = typer.Typer(no_args_is_help=True, help="The local sandbox: hosts in containers, and a local AWS.")
app.add_typer(sandbox_app, name="sandbox")

Inventory = Annotated[
    list[Path] | None, typer.Option("-i", "--inventory", help="Inventory; without one, the local sandbox.")
]
Limit = Annotated[str | None, typer.Option("--limit", help="Hosts or groups to confine the run to.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]


def _console(*, stderr: bool = False) -> Console:
    """The terminal as it is; a pipe or file gets lines wide enough for the table."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=120)


def run() -> int:
    """Runs the command line; every error a user can act on ends in the house form."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        # Outside standalone mode an Exit comes back as the command's value.
        return int(app(standalone_mode=False) or 0)
    except FleetError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": error.as_dict()}))
        print(error, file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        print("runner: stopped; what was done stays done, a build goes on; converge again to go on", file=sys.stderr)
        return 130
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")):
            words = error.format_message() if hasattr(error, "format_message") else str(error)
            print(f"runner: {words}\n  where: command line\n  mend:  ./runner.py --help", file=sys.stderr)
            return int(ExitCode.BAD_INPUT)
        raise


@app.command()
def converge(
    inventory: Inventory = None,
    limit: Limit = None,
    tags: Annotated[str | None, typer.Option("--tags", help="Roles or role phases to run.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing, say what would change.")] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Show what changes in files.")] = False,
    extra_vars: Annotated[list[str] | None, typer.Option("-e", "--extra-vars", help="name=value.")] = None,
    verbose: Annotated[int, typer.Option("-v", count=True, help="Say more.")] = 0,
    forks: Annotated[int, typer.Option("--forks", min=1, help="Hosts at a time.")] = 20,
    limit_s: Annotated[int, typer.Option("--time-limit", min=1, help="Longest run, seconds.")] = 4 * 3600,
    stall_s: Annotated[int, typer.Option("--stall-limit", min=1, help="Longest silence, seconds.")] = 900,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Make hosts into servers that answer; without an inventory, a sandbox host on this machine."""
    del yes  # runner.py has asked already
    variables = parse_extra_vars(extra_vars or [], known_variables())
    request = Request(
        playbook="playbooks/site.yml",
        inventories=_inventories(inventory),
        extra_vars=variables,
        limit=limit,
        tags=tags,
        forks=forks,
        flags=(*(["--check"] if check else []), *(["--diff"] if diff else [])),
        verbosity=verbose,
        limit_s=limit_s,
        stall_s=stall_s,
    )
    console = _console(stderr=as_json)
    if not inventory:
        world.up(Steps(console, Durations(), "sandbox"))
    finished, collected, log, took = _run(request, console, verbose=bool(verbose))
    parts = evidence.PARTS if not inventory else {}
    summary.show(console, collected, finished, parts, log, took)
    _end(finished, request, collected, as_json=as_json)


@app.command()
def status(inventory: Inventory = None, limit: Limit = None, as_json: AsJson = False) -> None:
    """Say what runs on the hosts against what should run; changes nothing."""
    request = Request(
        playbook="playbooks/status.yml", inventories=_inventories(inventory), limit=limit, command="status"
    )
    console = _console(stderr=as_json)
    finished, collected, _, _ = _run(request, console, quiet=True)
    if not as_json:
        summary.show_hosts(console, collected.status)
    _end(finished, request, collected, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context, yes: Yes = False) -> None:
    """Run all checks and tests; further words go to pytest instead of the whole."""
    del yes
    from tests import whole

    raise typer.Exit(whole.run(context.args, Steps(_console(), Durations(), "test")))


@sandbox_app.command("up")
def sandbox_up(
    hosts: Annotated[int, typer.Option("--hosts", min=1, max=9, help="How many hosts.")] = 1,
    base_image: Annotated[
        str | None, typer.Option("--base-image", help="Image to start from instead of a bootstrapped one.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Start the sandbox: the stand-ins and the hosts."""
    del yes
    found = world.up(Steps(_console(), Durations(), "sandbox"), hosts=hosts, base_image=base_image)
    for host in found.hosts:
        print(f"{host.name} {host.address}")


@sandbox_app.command("down")
def sandbox_down(yes: Yes = False) -> None:
    """Stop the sandbox and put the machine back as it was; caches stay."""
    del yes
    world.down(Steps(_console(), Durations(), "sandbox"))


@sandbox_app.command("status")
def sandbox_status(as_json: AsJson = False, yes: Yes = False) -> None:
    """Say what of the sandbox is up."""
    del yes
    found = world.read()
    if as_json:
        print(json.dumps(None if found is None else {"hosts": [h.name for h in found.hosts], "aws": found.aws_url}))
    elif found is None:
        print("no sandbox is up; start one with ./runner.py sandbox up")
    else:
        print("\n".join(f"{host.name} {host.address}" for host in found.hosts))


def _inventories(given: list[Path] | None) -> tuple[Path, ...]:
    for path in given or []:
        if not path.exists():
            raise FleetError(
                "no such inventory, and a file or folder is wanted",
                where=f"-i {path}",
                mend=f"ls {path.parent}",
            )
    return tuple(path.resolve() for path in given) if given else (sandbox_inventory(),)


def _run(
    request: Request, console: Console, *, verbose: bool = False, quiet: bool = False
) -> tuple[Finished, summary.Collector, str, float]:
    collected = summary.Collector()
    began = time.monotonic()
    with (
        RunLog(request.command) as log,
        RunView(console, Durations(), verbose=verbose, rehearsal="--check" in request.flags) as view,
    ):

        def on_event(event: Event) -> None:
            log(event)
            collected(event)
            if not quiet:
                view(event)

        try:
            finished = execute(request, on_event)
        except (KeyboardInterrupt, FleetError) as error:
            if isinstance(error, KeyboardInterrupt) or error.code is ExitCode.STALLED:
                console.print("runner: ending what the run has left running on its hosts", highlight=False)
                execute(request.stopping(), log)
            raise
    return finished, collected, str(log.path), time.monotonic() - began


def _end(finished: Finished, request: Request, collected: summary.Collector, *, as_json: bool) -> None:
    if as_json:
        hosts = {
            name: {
                "ok": tally.ok, "changed": tally.changed, "failed": tally.failed, "unreachable": tally.unreachable,
                "message": tally.message, **collected.status.get(name, {}),
            }
            for name, tally in finished.hosts.items()
        }  # fmt: skip
        print(json.dumps({"code": int(finished.code), "hosts": hosts}, indent=1))
    if finished.code is ExitCode.OK:
        return
    if not any(tally.message for tally in finished.hosts.values()):
        raise FleetError(
            finished.said.strip() or "Ansible ran on no host",
            where=", ".join(str(path) for path in request.inventories),
            mend="check the inventory, --limit and --tags",
            code=finished.code,
        )
    left = [name for name, tally in finished.hosts.items() if tally.failed or tally.unreachable]
    print(f"runner: {len(left)} of {len(finished.hosts)} hosts left: {', '.join(left)}", file=sys.stderr)
    print(f"  go on: {request.again()}", file=sys.stderr)
    raise typer.Exit(int(finished.code))


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
