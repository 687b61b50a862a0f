"""A host's stream of ansible-runner's own, fed line by line to ansible-runner's own processor.

With fleet/execution.py the only place that touches ansible-runner.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from ansible_runner.streaming import Processor

from fleet.run_command.store import Chunk


class Stream(Processor):  # type: ignore[misc]
    """One host's stream; needs no thread of its own, and keeps no event."""

    def __init__(self, heard: Callable[[dict[str, Any]], bool], private: str) -> None:
        super().__init__(private_data_dir=private, event_handler=heard, quiet=True, settings={})
        self.over = False
        # When an event last came, a sign of life aside; nothing is expected before the first.
        self.worked: float | None = None
        self.digest = ""
        self.count = 0
        self.spot_notice: dict[str, Any] | None = None
        self.broken = ""
        self._waiting: dict[int, Chunk] = {}

    def take(self, chunk: Chunk) -> None:
        """Takes a chunk in its turn; one that comes early waits, one that does not follow breaks the stream."""
        self._waiting[chunk.number] = chunk
        while not self.broken and (turn := self._waiting.pop(self.count + 1, None)):
            if turn.after != self.digest:
                self.broken = f"chunk {turn.number} does not follow the one before: its digest is another"
                return
            self.count, self.digest = turn.number, turn.digest
            for line in turn.lines:
                self._line(line)

    def _line(self, line: bytes) -> None:
        data = json.loads(line)
        if "status" in data:
            self.status_callback(data)
        elif "eof" in data:
            self.over = True
        elif "spot_notice" in data:
            self.spot_notice = data["spot_notice"]
        elif "event" in data:
            if data["event"] != "keepalive":
                self.worked = time.monotonic()
            self.event_callback(data)
