"""`./runner.py patch`: vLLM's source patches on a tree at hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from fleet.errors import ExitCode
from fleet.options import AsJson, Yes, errors
from fleet.patch_trees import Outcome, Result, apply_all, revert_all, status_of
from fleet.progress import terminal

app = typer.Typer(no_args_is_help=True, help="vLLM's source patches on an unpacked sdist or an installed package.")
Tree = Annotated[Path, typer.Option("--tree", help="Folder that holds vllm/.")]
Capability = Annotated[str, typer.Option("--capability", help="Capability of the GPU, such as 7.5.")]


@app.command()
def apply(tree: Tree, capability: Capability, as_json: AsJson = False, yes: Yes = False) -> None:
    """Apply every patch that the capability needs: all files or none."""
    del yes
    with errors(as_json=as_json):
        _show(apply_all(tree, capability), as_json=as_json)


@app.command()
def revert(tree: Tree, as_json: AsJson = False, yes: Yes = False) -> None:
    """Take the patches out again, to the byte."""
    del yes
    with errors(as_json=as_json):
        _show(revert_all(tree), as_json=as_json)


@app.command()
def status(tree: Tree, capability: Capability, as_json: AsJson = False, yes: Yes = False) -> None:
    """Say what of the patches is there; exit code 4 where one is needed and absent."""
    del yes
    with errors(as_json=as_json):
        results = status_of(tree, capability)
    _show(results, as_json=as_json)
    if any(result.outcome is Outcome.ABSENT for result in results):
        raise typer.Exit(int(ExitCode.DRIFT))


def _show(results: list[Result], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"patches": [result.as_dict() for result in results]}, indent=1))
        return
    console = terminal()
    for result in results:
        console.print(Text(f"{result.patch} r{result.revision} {result.outcome}: {result.reason}"), soft_wrap=True)
        for target, digests in result.files.items():
            console.print(Text(f"  {target} sha256 {digests['sha256']}"), soft_wrap=True)
