"""`./runner.py benchmark`: what a fleet's own GPUs say of the kernels."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleet import running, summary
from fleet.options import AsJson, Inventory, Limit, Reach, Yes, end, errors, standing
from fleet.progress import plain, terminal
from fleet.requests import Request, Transport, sandbox_inventory

from ansible.module_utils.launch_shapes import REPORTED, chosen  # isort: skip

app = typer.Typer(no_args_is_help=True, help="What a fleet's own GPUs say of the kernels.")


@app.callback()
def benchmark() -> None:
    """What a fleet's own GPUs say of the kernels."""


@app.command()
def kernels(
    inventory: Inventory = None,
    limit: Limit = None,
    stop: Annotated[bool, typer.Option("--stop", help="Stop a server that runs, and start it again.")] = False,
    transport: Reach = Transport.RUN_COMMAND,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Time the attention kernels' launch shapes on each host's own GPU, and keep the figures for `repatch`."""
    del yes
    console = terminal(stderr=as_json)
    with errors(as_json=as_json):
        request = Request(
            playbook="playbooks/benchmark.yml",
            inventories=standing(inventory),
            limit=limit,
            command="benchmark kernels",
            switches={"--stop": "triton_patch_search_stops_service"} if stop else {},
            transport=transport,
        )
        ran = running.shown(request, console)
        for host, report in ran.collected.launch_shapes.items():
            _show(console, host, report)
        summary.show_end(console, ran)
        if ran.collected.launch_shapes:
            console.print(f"next: {_repatch(request)}", markup=False, highlight=False, soft_wrap=True)
        end(ran, as_json=as_json)


def compared(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of each phase and head size what stands without a search, and the best of what was timed.

    Args:
        report: as `shape_search.py` prints it, with `limit_bytes`.

    Returns:
        `{phase, head_size, known, known_us, best, best_us}`: shapes are (BLOCK_M, tile, warps), `known` upstream's own
        or, where that does not fit, the field report's; times in microseconds by problem. `best` is None where no shape
        saves a tenth of the time.
    """
    timed = [row for row in report["shapes"] if row["us"] and row["shared_bytes"] <= report["limit_bytes"]]
    best: dict[tuple[str, int], tuple[int, int, int]] = {}
    for shape in chosen(str(report["lowered_for"]), report):
        best.setdefault((shape.phase, shape.head_size), (shape.rows, shape.tile, shape.warps))
    found = []
    for phase, head in sorted({(row["phase"], row["head_size"]) for row in timed}, key=lambda key: (-key[1], key[0])):
        us = {_shape(row): row["us"] for row in timed if (row["phase"], row["head_size"]) == (phase, head)}
        stock = [_shape(row) for row in timed if (row["phase"], row["head_size"]) == (phase, head) and row["stock"]]
        known, taken = (stock or [REPORTED])[0], best.get((phase, head))
        found.append(
            {
                "phase": phase,
                "head_size": head,
                "known": known,
                "known_us": us.get(known, {}),
                "best": taken,
                "best_us": us[taken] if taken else {},
            }
        )
    return found


def _shape(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return (int(row["block_m"]), int(row["tile"]), int(row["warps"]))


def _show(console: Console, host: str, report: Mapping[str, Any]) -> None:
    title = (
        f"{host}: {report['gpu']}, vLLM {report['vllm']}, Triton {report['triton']}; shapes are BLOCK_M, tile, warps"
    )
    table = Table(title=Text(plain(title)), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("head", "problem", "without a search", "µs", "best", "µs", "saves"):
        table.add_column(column)
    for row in compared(report):
        for problem, before in row["known_us"].items():
            known = (str(row["head_size"]), problem, _spelled(row["known"]), f"{before:,.0f}")
            if not row["best"]:
                table.add_row(*known, "the same", "", "")
                continue
            after = row["best_us"][problem]
            table.add_row(*known, _spelled(row["best"]), f"{after:,.0f}", f"{1 - after / before:.0%}")
    console.print(table)


def _spelled(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))


def _repatch(request: Request) -> str:
    words = ["./runner.py", "repatch"]
    for path in request.inventories:
        words += ["-i", str(path)] if path != sandbox_inventory() else []
    return shlex.join([*words, *(["--limit", request.limit] if request.limit else [])])
