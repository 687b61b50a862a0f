#!/usr/bin/env python3
"""Publishes a release that was built while the store was away: `publish_release.py SPEC.json`, detached."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from job import started, write_whole
from store_stages import NOT_PUBLISHED, StoreStages


class Publication(StoreStages):
    """The wheelhouse that a build left, into the store; the release stays as it is and serves on."""

    def stages(self) -> list[Callable[[], None]]:
        """What is done, in order."""
        return [self.make_tools, self.publish_kept]

    def publish_kept(self) -> None:
        """Puts what was kept; where another host was first by now, the record says so."""
        self.open_store()
        manifest = json.loads((self.wheelhouse / "manifest.json").read_text())
        winner = self.store.publish(manifest, self.wheelhouse)
        state = "published" if winner is manifest else "published by another, built here too"
        record = json.loads((self.release / "release.json").read_text())
        record["store"] = {**self.place(), "state": state, "built_by": winner["host"]}
        record["warnings"] = [line for line in record["warnings"] if not line.startswith(NOT_PUBLISHED)]
        self.judged["store"] = record["store"]
        # The record's time is that of the build, by which later damage is told.
        built = (self.release / "release.json").stat()
        write_whole(self.release / "release.json", record)
        os.utime(self.release / "release.json", ns=(built.st_atime_ns, built.st_mtime_ns))
        self.clear_wheelhouse()


if __name__ == "__main__":
    started(Publication(Path(sys.argv[1])))
