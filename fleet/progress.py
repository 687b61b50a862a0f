"""What is under way, shown while it lasts: a moving frame on a terminal, a line now and then on a pipe."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_BEAT_S = 15.0
_BAR_WIDTH = 10


@dataclass(slots=True)
class Row:
    """One thing under way. `usual_s`: seconds it took when it last did its work, if that is known."""

    where: str
    what: str
    usual_s: float | None
    doing: str = ""
    began: float = field(default_factory=time.monotonic)


class Progress:
    """Rows that come and go, under the lines of what has ended."""

    def __init__(self, console: Console, label: str, *, beat_s: float = _BEAT_S) -> None:
        self._console = console
        self._label = label
        self._beat_s = beat_s
        self._rows: dict[str, Row] = {}
        self._lock = threading.Lock()
        self._spinner = Spinner("dots")
        self._began = time.monotonic()
        self._started = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._live = Live(console=console, get_renderable=self.frame, refresh_per_second=8, transient=True)
        self.moves = console.is_interactive

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def begin(self, row: Row) -> None:
        """Shows a row; there is one for each `where`."""
        with self._lock:
            self._rows[row.where] = row
        # With the first row and no sooner: Ansible is forked before, and a fork among threads can hang.
        if not self._started:
            self._started = True
            self._live.start() if self.moves else self._thread.start()

    def stop(self) -> None:
        """Ends what moves; what an exception prints comes after the frame is gone and the cursor is back."""
        if not self._started:
            return
        if self.moves:
            self._live.stop()
        elif self._thread.is_alive():
            self._done.set()
            self._thread.join()

    def doing(self, where: str, words: str) -> None:
        """Says what a row is at just now."""
        with self._lock:
            if where in self._rows:
                self._rows[where].doing = words

    def end(self, where: str) -> None:
        """Takes a row away."""
        with self._lock:
            self._rows.pop(where, None)

    def say(self, *parts: str | tuple[str, str]) -> None:
        """Prints one line that stays, of texts and (text, style); none of it is read as markup."""
        line = Text.assemble((f"{self._label:<9} ", "bold"), *(_plain_part(part) for part in parts))
        self._console.print(line, highlight=False, soft_wrap=True)

    def frame(self) -> Table:
        """The moving part: a line per row, the oldest first, as many as the terminal holds, and a foot."""
        rows = self._sorted()
        room = max(1, self._console.size.height - 3)
        body = Table.grid(padding=(0, 1))
        # Where there is no room for all, the step's name is cut, and the times stay.
        for no_wrap in (True, True, False, True, True):
            body.add_column(no_wrap=no_wrap)
        for row in rows[:room]:
            so_far = time.monotonic() - row.began
            doing = f" ({row.doing})" if row.doing else ""
            body.add_row(
                self._spinner,
                Text(plain(row.where), "bold"),
                Text(plain(row.what + doing), no_wrap=True, overflow="ellipsis"),
                ProgressBar(row.usual_s, min(so_far, row.usual_s or 0), _BAR_WIDTH, pulse=not row.usual_s),
                timing(row, so_far),
            )
        whole = Table.grid()
        whole.add_row(body)
        more = f", {len(rows) - room} more under way" if len(rows) > room else ""
        whole.add_row(Text(f"{self._label:<9} {spell(time.monotonic() - self._began)} so far{more}", "dim"))
        return whole

    def _sorted(self) -> list[Row]:
        with self._lock:
            return sorted(self._rows.values(), key=lambda row: row.began)

    def _beat(self) -> None:
        while not self._done.wait(self._beat_s):
            for row in self._sorted():
                so_far = time.monotonic() - row.began
                if so_far >= self._beat_s - 1:
                    host = f"{row.where}: " if row.where else ""
                    doing = f" ({row.doing})" if row.doing else ""
                    self.say((f"  … {host}{row.what}{doing}: {timing(row, so_far)}", "dim"))


def terminal(*, stderr: bool = False) -> Console:
    """The terminal as it is; a pipe or file gets lines wide enough for the tables."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=120)


def timing(row: Row, so_far: float) -> str:
    """`12s so far, usually 44s`."""
    return f"{spell(so_far)} so far" + (f", usually {spell(row.usual_s)}" if row.usual_s and row.usual_s >= 1 else "")


def spell(seconds: float) -> str:
    """`75.2` as `1m15s`."""
    whole = round(seconds)
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def plain(text: str) -> str:
    """Text from elsewhere, with what would steer the terminal spelled out instead."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in text)


def _plain_part(part: str | tuple[str, str]) -> str | tuple[str, str]:
    return plain(part) if isinstance(part, str) else (plain(part[0]), part[1])
