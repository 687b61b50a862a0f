"""`./runner.py bench`: what the project claims, measured anew."""

from __future__ import annotations

from typing import Annotated

import typer

from bench import build_cache, build_fleet, build_units, patch, ssm_scale, ssm_transports
from bench.leaks import hunt
from fleet.options import Yes
from fleet.progress import terminal
from fleet.steps import Durations, Steps

# What `bench build` measures, in order.
_BUILD_PARTS = (build_units.run, build_cache.run, build_fleet.run)
# And `bench ssm`.
_SSM_PARTS = (ssm_transports.run, ssm_scale.run)

app = typer.Typer(no_args_is_help=True, help="What the project claims, measured anew.")


@app.callback()
def measure() -> None:
    """What the project claims, measured anew."""


@app.command("patch")
def patch_matrix(
    vllm: Annotated[list[str] | None, typer.Option("--vllm", help="Version; all of the package index if none.")] = None,
    triton: Annotated[
        list[str] | None,
        typer.Option("--triton", help="Compiler; the newest, torch 2.12's, the version's own if none."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Apply, compile and revert the patches on every vLLM and on drifted sources; exit code 1 for a missed goal."""
    del yes
    console = terminal()
    raise typer.Exit(patch.run(vllm or [], triton or [], console, Steps(console, Durations(), "bench")))


@app.command("build")
def build_parts(yes: Yes = False) -> None:
    """Count what a build compiles, build with a warm cache and for five hosts; exit code 1 for a missed goal."""
    del yes
    console = terminal()
    steps = Steps(console, Durations(), "bench")
    raise typer.Exit(max([part(console, steps) for part in _BUILD_PARTS]))


@app.command("ssm")
def ssm_parts(yes: Yes = False) -> None:
    """Time a converge with nothing to do by both transports, and count requests; exit code 1 for a missed goal."""
    del yes
    console = terminal()
    steps = Steps(console, Durations(), "bench")
    raise typer.Exit(max([part(console, steps) for part in _SSM_PARTS]))


@app.command("leaks")
def leak_hunt(yes: Yes = False) -> None:
    """Plant secrets, put a host through its life, and search everything for them; exit code 1 for a missed goal."""
    del yes
    console = terminal()
    raise typer.Exit(hunt.run(console, Steps(console, Durations(), "bench")))
