"""`./runner.py patch`: vLLM's source patches on a tree at hand, and whether its kernels fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from fleet.errors import ExitCode
from fleet.options import AsJson, Yes, errors
from fleet.patch_check import Verdict, asked, check
from fleet.patch_export import export
from fleet.patch_trees import Outcome, Result, apply_all, revert_all, status_of
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from fleet.vllm_sources import tree_of

app = typer.Typer(no_args_is_help=True, help="vLLM's source patches on an unpacked sdist or an installed package.")
Tree = Annotated[Path, typer.Option("--tree", help="Folder that holds vllm/.")]
Capability = Annotated[str, typer.Option("--capability", help="Capability of the GPU, such as 7.5.")]
Vllm = Annotated[str, typer.Option("--vllm", help="Version on the package index, newest, or a folder with vllm/.")]


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


@app.command("check")
def check_fit(
    vllm: Vllm,
    capability: Capability,
    model: Annotated[Path, typer.Option("--model", help="Folder of the model; its config.json is read.")],
    triton: Annotated[str | None, typer.Option("--triton", help="Compiler; that of the vLLM's torch if none.")] = None,
    limit_bytes: Annotated[
        int | None,
        typer.Option("--limit-bytes", min=1, help="Opt-in shared memory per block; the capability's if none."),
    ] = None,
    flex: Annotated[bool, typer.Option("--flex", help="Judge Flex attention too.")] = False,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Say whether a vLLM's attention kernels fit a GPU, as they are or patched, by compiling them; needs no GPU."""
    del yes
    steps = Steps(terminal(stderr=as_json), Durations(), "patch")
    with errors(as_json=as_json):
        verdict = check(asked(tree_of(vllm, steps), model, capability, triton, limit_bytes, flex=flex), steps)
    if as_json:
        print(json.dumps(verdict.as_dict(), indent=1))
    else:
        _show_verdict(verdict)
    if verdict.error:
        raise verdict.error


@app.command("export")
def export_mail(
    vllm: Vllm,
    out: Annotated[Path | None, typer.Option("--out", help="File to write; standard output if none.")] = None,
    yes: Yes = False,
) -> None:
    """Write the patch of a vLLM version, with its test, as a mail that git am takes."""
    del yes
    mail = export(tree_of(vllm, Steps(terminal(stderr=True), Durations(), "patch")))
    if out:
        out.write_text(mail)
    else:
        print(mail, end="")


def _show_verdict(verdict: Verdict) -> None:
    console = terminal()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("head", "kernel", "phase"):
        table.add_column(name)
    for version in ("stock", "patched") if verdict.patched else ("stock",):
        for name in ("tile", "block_m", "warps", "shared bytes"):
            table.add_column(f"{version}\n{name}", justify="right")
    for number, stock in enumerate(verdict.stock):
        cells = [str(stock["head_size"]), stock["kernel"], stock["phase"]]
        for launch in (stock, verdict.patched[number]) if verdict.patched else (stock,):
            cells += [str(launch["tile"]), str(launch["block_m"] or ""), str(launch["warps"])]
            over = launch["shared_bytes"] > verdict.asked.limit_bytes
            cells.append(f"{launch['shared_bytes']:,}{' !' if over else ''}")
        table.add_row(*cells)
    if verdict.stock:
        console.print(table)
    one = verdict.asked
    words = f"vLLM {one.tree.version or one.tree.path}, capability {one.capability}"
    if verdict.torch:
        words += f", Triton {one.triton}, torch {verdict.torch}, limit {one.limit_bytes:,} bytes"
    # What is wrong follows in the house form.
    words += "" if verdict.error else f"\n{verdict.outcome}: {verdict.reason}"
    console.print(Text(words), soft_wrap=True)


def _show(results: list[Result], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"patches": [result.as_dict() for result in results]}, indent=1))
        return
    console = terminal()
    for result in results:
        console.print(Text(f"{result.patch} r{result.revision} {result.outcome}: {result.reason}"), soft_wrap=True)
        for target, digests in result.files.items():
            console.print(Text(f"  {target} sha256 {digests['sha256']}"), soft_wrap=True)
