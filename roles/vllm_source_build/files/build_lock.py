"""Who builds a build id: an advisory lock in the store with an owner, an age and an expiry.

Two that build at once waste an hour and nothing else: the manifest's conditional put decides in any case.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wheel_store import Found, Store, StoreError


@dataclass(frozen=True, slots=True)
class Holder:
    """Whoever holds a lock, or held it last: its body, seconds since it was renewed, and whether it counts."""

    body: dict[str, Any]
    age_s: float
    alive: bool

    @property
    def host(self) -> str:
        """The holder's host name."""
        return str(self.body.get("owner", {}).get("host", "?"))


class BuildLock:
    """The lock of one build id, for one job on one host."""

    def __init__(
        self,
        store: Store,
        build_id: str,
        inputs: dict[str, Any],
        owner: dict[str, str],
        expires_s: float,
        progress: Callable[[], Any],
    ) -> None:
        self.store, self.expires_s, self.progress = store, expires_s, progress
        self.key = f"builds/{build_id}/lock.json"
        self.etag: str | None = None
        self.lost = False
        self.body: dict[str, Any] = {
            "build_id": build_id,
            "owner": owner,
            "boot_id": read("/proc/sys/kernel/random/boot_id"),
            "inputs": inputs,
            "expires_s": expires_s,
            "state": "building",
        }
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lock")

    def take(self) -> bool:
        """Takes the lock where nobody has it, where its holder let it run out, or where this job left it behind.

        Of several that find it expired one alone gets it: each puts over the ETag it has seen.
        """
        found = self.store.get(self.key)
        if found is not None and self.judged(found).alive and found.content.get("owner") != self.body["owner"]:
            return False
        self.etag = self.store.put(self.key, self._written(), over=found.etag if found else "")
        if self.etag is None:
            return False
        self._thread.start()
        return True

    def holder(self) -> Holder | None:
        """Whoever has it or had it last; None where nobody ever did."""
        found = self.store.get(self.key)
        return None if found is None else self.judged(found)

    def release(self, outcome: str) -> None:
        """Gives it up, with the outcome for those that wait; may be called twice, and by whoever is being ended."""
        self._over.set()
        # The renewing thread may be in the middle of a put, or be the one that is interrupted.
        with_turn = self._turn.acquire(timeout=10)
        try:
            if self.etag is not None and not self.lost:
                self.body |= {"state": "released", "outcome": outcome}
                self._write()
                self.etag = None
        finally:
            if with_turn:
                self._turn.release()

    def _renew(self) -> None:
        while not self._over.wait(self.expires_s / 4):
            with self._turn:
                if self._over.is_set():
                    return
                # A store that is away: until the expiry the lock stands, and afterwards the next put tells.
                with contextlib.suppress(StoreError):
                    self._write()
                if self.lost:
                    return

    def _write(self) -> None:
        """Renews over one's own ETag, also where an earlier answer was lost; else it is another's by now."""
        body = self._written()
        etag = self.store.put(self.key, body, over=str(self.etag))
        if etag is None:
            found = self.store.get(self.key)
            if found is not None and found.content.get("owner") == self.body["owner"]:
                etag = self.store.put(self.key, body, over=found.etag)
        self.etag, self.lost = etag, etag is None

    def _written(self) -> bytes:
        """The body anew; the random word makes each writing another ETag, and one's own known again."""
        return json.dumps({**self.body, "nonce": secrets.token_hex(8), "progress": self.progress()}).encode()

    @staticmethod
    def judged(found: Found) -> Holder:
        """What a lock's object says, by the store's clock."""
        body = found.content
        expires_s = float(body.get("expires_s") or 0)
        return Holder(body, found.age_s, body.get("state") == "building" and found.age_s <= expires_s)


def others(store: Store, build_id: str, inputs: dict[str, Any]) -> list[str]:
    """What is built or being built of the same version under other build ids, and in which inputs that differs."""
    found = []
    stem = build_id.rsplit("-", 1)[0]
    for other in sorted(set(store.names(f"builds/{stem}-")) - {build_id}):
        held = store.get(f"builds/{other}/lock.json")
        holder = None if held is None else BuildLock.judged(held)
        manifest = store.manifest(other)
        if manifest is not None:
            who, theirs = f"{other} is published by {manifest.get('host')}", manifest.get("inputs", {})
        elif holder is not None and holder.alive:
            who, theirs = f"{holder.host} builds {other}", holder.body.get("inputs", {})
        else:
            continue
        unlike = [
            f"{key} {theirs.get(key)!r} there, {inputs[key]!r} here" for key in inputs if theirs.get(key) != inputs[key]
        ]
        found.append(f"{who} ({'; '.join(unlike)})")
    return found


def read(path: str) -> str:
    """What the system says in a file of one line; empty where it has none."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
