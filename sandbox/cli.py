"""`./runner.py sandbox`: starts, stops and names the local sandbox."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from fleet.errors import FleetError
from fleet.options import AsJson, Yes
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from sandbox import local_fleet, world

app = typer.Typer(no_args_is_help=True, help="The local sandbox: hosts in containers, and a local AWS.")


@app.command()
def up(
    hosts: Annotated[int, typer.Option("--hosts", min=1, max=9, help="How many hosts.")] = 1,
    base_image: Annotated[
        str | None, typer.Option("--base-image", help="Image to start from instead of a bootstrapped one.")
    ] = None,
    arm64: Annotated[bool, typer.Option("--arm64", help="An emulated Arm host too, in the group `emulated`.")] = False,
    yes: Yes = False,
) -> None:
    """Start the sandbox: the stand-ins and the hosts."""
    del yes
    found = world.up(Steps(terminal(), Durations(), "sandbox"), hosts=hosts, base_image=base_image, arm64=arm64)
    print("\n".join(f"{host.name} {host.address}" for host in found.hosts))


@app.command()
def down(yes: Yes = False) -> None:
    """Stop the sandbox and put the machine back as it was; caches stay."""
    del yes
    world.down(Steps(terminal(), Durations(), "sandbox"))


@app.command()
def environment() -> None:
    """Print what lets any tool of AWS ask the local one: eval "$(./runner.py sandbox environment)"."""
    found = world.read()
    if found is None:
        raise FleetError("no sandbox is up", where="this machine", mend="./runner.py sandbox up", who="sandbox")
    for name, value in local_fleet.environment(found).items():
        print(f"export {name}={shlex.quote(value)}")


@app.command()
def status(as_json: AsJson = False, yes: Yes = False) -> None:
    """Say what of the sandbox is up."""
    del yes
    found = world.read()
    if as_json:
        print(json.dumps(None if found is None else {"hosts": [h.name for h in found.hosts], "aws": found.aws_url}))
    elif found is None:
        print("no sandbox is up; start one with ./runner.py sandbox up")
    else:
        print("\n".join(f"{host.name} {host.address}" for host in found.hosts))
