#!/usr/bin/env python3
"""Asks the installed vLLM whether it takes these arguments and reads these variables, without starting it.

`check_arguments.py REQUEST.json`, run by the release's Python, prints `{"unknown_variables": [...], "arguments": ""}`;
an argument that vLLM's own parser refuses is told in its own words. The server's entry point itself is run up to the
end of its parsing, since the parser's module moves between versions and the entry point does not. A variable in a
library's name that is mentioned nowhere in that library is unknown too; other names are left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ENTRY = "vllm.entrypoints.openai.api_server"
# Who reads the variables that begin so. vLLM has a list of its own, and passes others' on.
_READERS = {
    "TRITON_": ("triton", "torch", "vllm"),
    "TORCH": ("torch", "triton", "vllm"),
    "PYTORCH_": ("torch", "vllm"),
    "HF_": ("huggingface_hub", "transformers", "vllm"),
    "TRANSFORMERS_": ("transformers", "vllm"),
    "TOKENIZERS_": ("tokenizers", "transformers"),
    "FLASHINFER_": ("flashinfer", "vllm"),
}


class Parsed(BaseException):
    """The server's arguments were parsed; nothing after that is wanted."""


def is_read(name: str) -> bool:
    """Whether a library that the name is meant for mentions it; a name that is meant for none counts as read."""
    readers = next((readers for prefix, readers in _READERS.items() if name.startswith(prefix)), None)
    if readers is None:
        return True
    whole = re.compile(rb"(?<![A-Z0-9_])" + re.escape(name).encode() + rb"(?![A-Z0-9_])")
    for suffix in (".py", ".so"):
        for reader in readers:
            spec = find_spec(reader)
            for folder in (spec.submodule_search_locations or []) if spec else []:
                for top, _, files in os.walk(folder):
                    for file in files:
                        if (suffix in file) and whole.search((Path(top) / file).read_bytes()):
                            return True
    return False


def main(path: str) -> int:
    """Prints the findings as JSON."""
    request = json.loads(Path(path).read_text())
    import vllm.envs

    known = set(vllm.envs.environment_variables)
    unknown = [name for name in request["variables"] if name.startswith("VLLM_") and name not in known]
    unknown += [name for name in request["variables"] if name not in request["own"] and not is_read(name)]
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
