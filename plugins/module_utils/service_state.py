"""What serves on a host: the record of what last passed its gate, what is there now, and the way back.

`service.json` is written when a gate is passed, and by nothing else. `service.unfinished.json` stands from the moment
the earlier service is stopped until the gate's verdict is acted on: whoever finds it knows that a switch was cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.patch_files import sha256, write_whole
from ansible.module_utils.records import read_json
from ansible.module_utils.systemd_unit import Unit, daemon_reload

UNIT = "vllm.service"
# Held during a switch; the watchdog's restart takes it too, so that it never restarts into one.
LOCK = Path("/run/vllm-serve.lock")
# Written by the unit before each start: the key of the unit text that was started.
STARTED = Path("/run/vllm/started")
# What systemd has handed to the unit that runs.
_CREDENTIALS = Path("/run/credentials") / UNIT
_TOKEN = re.compile(r"^LoadCredential=hf_token:(?P<file>.+)$", re.MULTILINE)


class Service:
    """The service of one host, by its records, its unit and the current link."""

    def __init__(self, root: Path, state: Path) -> None:
        self.unit = Unit(UNIT)
        self.current = root / "current"
        self.state = state
        self.record_path = state / "service.json"
        self.unfinished_path = state / "service.unfinished.json"

    def record(self) -> dict[str, Any]:
        """What last passed its gate; empty where nothing did."""
        found: dict[str, Any] = read_json(self.record_path)
        return found

    def last_good(self) -> dict[str, Any] | None:
        """The record, where its release is still there."""
        record = self.record()
        return record if record and Path(record["path"]).is_dir() else None

    def unfinished(self) -> dict[str, Any]:
        """The switch that was cut off: `run`, `build_id`; empty for none."""
        found: dict[str, Any] = read_json(self.unfinished_path)
        return found

    def begin(self, build_id: str, unit_text: str) -> None:
        """Stops what serves and puts another unit in its place; until `finish` or `undo` the switch is unfinished."""
        note = {"run": os.environ.get("VLLM_FLEET_RUN", ""), "build_id": build_id}
        write_whole(self.unfinished_path, json.dumps(note).encode())
        self.unit.call("stop")
        self._put(unit_text)

    def start(self) -> int:
        """Starts the unit now and after reboots; the exit status."""
        self.unit.call("enable")
        return int(self.unit.call("start"))

    def finish(self, record: dict[str, Any]) -> None:
        """The gate is passed: the link and the record follow what runs."""
        self._link(record["path"])
        write_whole(self.record_path, (json.dumps(record, indent=1, sort_keys=True) + "\n").encode())
        self.unfinished_path.unlink(missing_ok=True)

    def undo(self) -> dict[str, Any] | None:
        """Starts what last passed its gate, or leaves no service where none did; does not wait for its answer.

        Returns:
            The record of what is started; None where there is nothing to go back to.
        """
        self.unit.call("stop")
        earlier = self.last_good()
        if earlier is None:
            self.unit.call("disable")
            self.unit.path.unlink(missing_ok=True)
            self.current.unlink(missing_ok=True)
            daemon_reload()
        else:
            self._put(earlier["unit_text"])
            self._link(earlier["path"])
            self.start()
        self.unfinished_path.unlink(missing_ok=True)
        return earlier

    def _put(self, unit_text: str) -> None:
        self.unit.write(unit_text)
        daemon_reload()
        self.unit.call("reset-failed")

    def _link(self, target: str) -> None:
        if self.current.is_symlink() and self.current.readlink() == Path(target):
            return
        part = self.current.with_name(".current.part")
        part.unlink(missing_ok=True)
        part.symlink_to(target)
        part.replace(self.current)

    def drift(self, record: dict[str, Any]) -> list[dict[str, str]]:
        """Where what is there differs from the record, as `what`, `found`, `wanted`; empty where it is as proven."""
        unfinished = ("unfinished switch", self.unfinished().get("build_id", "none"), "none")
        if not record:
            return _differing([unfinished])
        shown = self.unit.show("ActiveState", "UnitFileState", "NeedDaemonReload", "DropInPaths")
        stale = self.runs_other_code(Path(record["path"]))
        pairs = [
            ("release", str(self.current.resolve()) if self.current.exists() else "none", record["path"]),
            ("unit text", short_digest(self.unit.text()), short_digest(record["unit_text"])),
            ("unit overrides", shown.get("DropInPaths", ""), ""),
            ("unit read anew", shown.get("NeedDaemonReload", ""), "no"),
            ("active", shown.get("ActiveState", ""), "active"),
            ("enabled", shown.get("UnitFileState", ""), "enabled"),
            ("started unit", read_text(STARTED), record.get("key", "")),
            ("patched files", self.patch(Path(record["path"])), record.get("patch", "")),
            ("running code", "older than the patched files" if stale else "theirs", "theirs"),
            unfinished,
        ]
        return _differing(pairs)

    def patch(self, release: Path) -> str:
        """Digest of the release's patched files as they are on disk; `none` where none is patched."""
        _, files = self._patched_files(release)
        digests = {target: sha256(path.read_bytes()) for target, path in files.items() if path.is_file()}
        return short_digest(json.dumps(digests, sort_keys=True)) if files else "none"

    def runs_other_code(self, release: Path) -> bool:
        """Whether a patched file was put in place after the unit's start, so that the start read another.

        The digests do not tell: a file may have been laid anew by pip, read by a start, and patched again since. A
        file that needs no patch is the installer's, may be shared with its cache, and says nothing by its time.
        """
        known, files = self._patched_files(release)
        if known.get("outcome") != "applied":
            return False
        entered = self.unit.show("ActiveEnterTimestampMonotonic").get("ActiveEnterTimestampMonotonic") or 0
        started = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC) + int(entered) / 1e6
        return any(path.is_file() and path.stat().st_ctime > started for path in files.values())

    def token(self) -> str:
        """What token the server holds, against the file that it takes it from.

        Returns:
            `none`: its unit takes none. `missing`: the file is not there. `unused`: the server does not run. `current`:
            it holds what is in the file. `older`: it was started with another. The files are compared, not read here.
        """
        found = _TOKEN.search(self.unit.text())
        if found is None:
            return "none"
        file, held = Path(found["file"].replace("%%", "%")), _CREDENTIALS / "hf_token"
        if not file.is_file():
            return "missing"
        if not held.is_file():
            return "unused"
        same = subprocess.run(["cmp", "--silent", str(file), str(held)], capture_output=True, check=False)
        return "older" if same.returncode else "current"

    def _patched_files(self, release: Path) -> tuple[dict[str, Any], dict[str, Path]]:
        """The release's patch record, and the files it names by target."""
        record = read_json(self.state / "patches" / f"{release.name}.json")
        site = Path(read_json(release / "release.json").get("site_packages", release))
        return record, {target: site / target for target in record.get("files") or {}}

    @contextlib.contextmanager
    def held(self, wait_seconds: float) -> Iterator[None]:
        """Holds the lock of switches. Raises TimeoutError where another run holds it for longer."""
        end = time.monotonic() + wait_seconds
        with LOCK.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= end:
                        raise TimeoutError from None
                    time.sleep(1)
            yield


def _differing(pairs: list[tuple[str, str, str]]) -> list[dict[str, str]]:
    return [{"what": what, "found": found, "wanted": wanted} for what, found, wanted in pairs if found != wanted]


def short_digest(text: str) -> str:
    """Twelve hex digits of the text's digest; `none` for no text."""
    return sha256(text.encode())[:12] if text else "none"


def read_text(path: Path) -> str:
    """The file's text without the line's end; empty where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
