"""Runs `./runner.py converge` in a terminal and draws what it ends with: `.venv/bin/python docs/picture.py`."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

_PROJECT = Path(__file__).resolve().parents[1]
_COLUMNS = 132
_CURSOR = re.compile(r"\x1b\[\?[0-9;]*[a-z]|\x1b\[[0-9;]*[ABCDGHJK]|\r")
# Without fonts from elsewhere: the reader's own monospace one does.
_FORMAT = re.sub(r" *@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def main() -> int:
    """Writes docs/converge.svg; the code is the run's own."""
    said = bytearray()

    def keep(terminal: int) -> bytes:
        data = os.read(terminal, 65536)
        said.extend(data)
        return data

    os.chdir(_PROJECT)
    os.environ["COLUMNS"] = str(_COLUMNS)
    code = os.waitstatus_to_exitcode(pty.spawn([sys.executable, "-m", "fleet", "converge"], keep))
    text = said.decode()
    end = _CURSOR.sub("", text[text.rindex("Roles") :]).rstrip().replace(str(Path.home()), "~")
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(f"$ ./runner.py converge\n…\n{end}"))
    console.save_svg(str(_PROJECT / "docs" / "converge.svg"), title="vllm-fleet", code_format=_FORMAT)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
