"""What several commands share at the command line: options, and errors for whoever asked for JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Annotated

import typer

from fleet.errors import FleetError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")]


@contextlib.contextmanager
def errors(*, as_json: bool) -> Iterator[None]:
    """Whoever asked for JSON gets an error as JSON too, besides its text."""
    try:
        yield
    except FleetError as error:
        if as_json:
            print(json.dumps({"error": error.as_dict()}))
        raise
