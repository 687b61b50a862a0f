#!/usr/bin/env python3
"""Asks the installed vLLM whether it takes these arguments and reads these variables, without starting it.

`check_arguments.py REQUEST.json`, run by the release's Python, prints `{"unknown_variables": [...], "arguments": ""}`;
an argument that vLLM's own parser refuses is told in its own words. The server's entry point itself is run up to the
end of its parsing, since the parser's module moves between versions and the entry point does not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

_ENTRY = "vllm.entrypoints.openai.api_server"


class Parsed(BaseException):
    """The server's arguments were parsed; nothing after that is wanted."""


def main(path: str) -> int:
    """Prints the findings as JSON."""
    request = json.loads(Path(path).read_text())
    import vllm.envs

    known = set(vllm.envs.environment_variables)
    unknown = [name for name in request["variables"] if name.startswith("VLLM_") and name not in known]
    whole = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> argparse.Namespace:
        found: argparse.Namespace = whole(self, *args, **kwargs)
        if "--served-model-name" in self._option_string_actions:
            raise Parsed
        return found

    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[method-assign,assignment]
    sys.argv = [_ENTRY, *request["arguments"]]
    words = io.StringIO()
    refused = ""
    with contextlib.redirect_stderr(words), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module(_ENTRY, run_name="__main__")
        except Parsed:
            pass
        except SystemExit:
            refused = ([*words.getvalue().strip().splitlines()] or ["the parser ended without a word"])[-1]
    print(json.dumps({"unknown_variables": unknown, "arguments": refused}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
