"""The command line: words in, requests and their showing out, errors as text or JSON, exit codes."""

from __future__ import annotations

import errno
import sys
from types import FrameType
from typing import Annotated

import typer

from bench.cli import app as bench_app
from fleet import running, summary
from fleet.audit_cli import audit
from fleet.benchmark_cli import app as benchmark_app
from fleet.build_cli import app as build_app
from fleet.errors import ExitCode, FleetError
from fleet.execution import on_ending_signals
from fleet.launch_cli import app as launch_app
from fleet.options import AsJson, Inventory, Limit, Reach, Yes, end, errors, standing
from fleet.patch_cli import app as patch_app
from fleet.progress import terminal
from fleet.reboot_cli import reboot
from fleet.redaction import RedactedStream
from fleet.requests import (
    LOCAL_AWS,
    Request,
    Transport,
    known_variables,
    parse_extra_vars,
    parse_inventories,
    parse_max_errors,
)
from fleet.rotate_cli import rotate
from fleet.ssm_cli import app as ssm_app
from fleet.steps import Durations, Steps
from sandbox import evidence, local_fleet, world
from sandbox.cli import app as sandbox_app
from tests import whole

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Bare GPU hosts become vLLM servers that are proven to answer.",
)
app.add_typer(sandbox_app, name="sandbox")
app.add_typer(patch_app, name="patch")
app.add_typer(bench_app, name="bench")
app.add_typer(benchmark_app, name="benchmark")
app.add_typer(build_app, name="build")
app.add_typer(ssm_app, name="ssm")
app.command()(reboot)
app.command()(audit)
app.command()(rotate)
app.add_typer(launch_app)

_INTERRUPTED = 130
# A disk that is full or cannot be written is the machine's, not a fault of the program.
_MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def run() -> int:
    """Runs the command line; every error a user can act on ends in the house form."""
    on_ending_signals(_interrupt)
    sys.stdout, sys.stderr = RedactedStream.over(sys.stdout), RedactedStream.over(sys.stderr)
    try:
        # Outside standalone mode an Exit comes back as the command's value, and so does an interrupt.
        code = int(app(prog_name="./runner.py", standalone_mode=False) or 0)
    except FleetError as error:
        print(error, file=sys.stderr)
        return int(error.code)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    except OSError as error:
        if error.errno not in _MACHINE_ERRORS:
            raise
        place = error.filename or "this machine"
        refusal = FleetError(
            f"this machine says: {error.strerror}", where=str(place), mend=f"df -h {place}; ls -ld {place}",
            code=ExitCode.REFUSED,
        )  # fmt: skip
        print(refusal, file=sys.stderr)
        return int(refusal.code)
    except Exception as error:
        if type(error).__module__.startswith(("click", "typer")):
            words = error.format_message() if hasattr(error, "format_message") else str(error)
            print(f"runner: {words}\n  where: command line\n  mend:  ./runner.py --help", file=sys.stderr)
            return int(ExitCode.BAD_INPUT)
        raise
    if code == _INTERRUPTED:
        print("runner: stopped; what was done stays done, a build goes on; converge again to go on", file=sys.stderr)
    return code


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
    max_errors: Annotated[
        str, typer.Option("--max-errors", help="More failures (a number or %) begin no further host on EC2.")
    ] = "100%",
    limit_s: Annotated[int, typer.Option("--time-limit", min=1, help="Longest run, seconds.")] = 4 * 3600,
    stall_s: Annotated[int, typer.Option("--stall-limit", min=1, help="Longest silence, seconds.")] = 900,
    transport: Reach = Transport.RUN_COMMAND,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Make hosts into servers that answer; without an inventory, a sandbox host on this machine."""
    del yes  # runner.py has asked already
    console = terminal(stderr=as_json)
    with errors(as_json=as_json):
        request = Request(
            playbook="playbooks/site.yml",
            inventories=parse_inventories(inventory or []),
            extra_vars=parse_extra_vars(extra_vars or [], known_variables()),
            limit=limit,
            tags=tags,
            forks=forks,
            flags=(*(["--check"] if check else []), *(["--diff"] if diff else [])),
            verbosity=verbose,
            limit_s=limit_s,
            stall_s=stall_s,
            transport=transport,
            max_errors=parse_max_errors(max_errors),
        )
        running.check_reach(request)
        if not inventory:
            world.up(Steps(console, Durations(), "sandbox"))
        elif inventory == [LOCAL_AWS]:
            local_fleet.up(Steps(console, Durations(), "sandbox"))
        ran = running.shown(request, console)
        summary.show(console, ran, {} if inventory not in (None, [], [LOCAL_AWS]) else evidence.PARTS)
        end(ran, as_json=as_json)


@app.command()
def status(
    inventory: Inventory = None,
    limit: Limit = None,
    transport: Reach = Transport.RUN_COMMAND,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Say what runs on the hosts against what should run; changes nothing."""
    del yes
    console = terminal(stderr=as_json)
    with errors(as_json=as_json):
        request = Request(
            playbook="playbooks/status.yml",
            inventories=standing(inventory),
            limit=limit,
            command="status",
            stall_s=120,
            transport=transport,
        )
        ran = running.shown(request, console)
        if not as_json:
            summary.show_hosts(console, ran.collected.status)
        end(ran, as_json=as_json)


@app.command()
def repatch(
    inventory: Inventory = None,
    limit: Limit = None,
    check: Annotated[bool, typer.Option("--check", help="Change nothing, say what would change.")] = False,
    transport: Reach = Transport.RUN_COMMAND,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Put the kernel patch right in what is installed; only a server that runs other code is restarted."""
    del yes
    console = terminal(stderr=as_json)
    with errors(as_json=as_json):
        request = Request(
            playbook="playbooks/repatch.yml",
            inventories=standing(inventory),
            limit=limit,
            flags=("--check",) if check else (),
            command="repatch",
            transport=transport,
        )
        ran = running.shown(request, console)
        summary.show_patches(console, ran)
        end(ran, as_json=as_json)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context, yes: Yes = False) -> None:
    """Run all checks and tests; further words go to pytest instead of the whole."""
    del yes
    raise typer.Exit(whole.run(context.args, Steps(terminal(), Durations(), "test")))


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
