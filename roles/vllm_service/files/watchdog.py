#!/usr/bin/env python3
"""Says whether a server's engine hangs: `watchdog.py REQUEST.json` exits 0 where it is to be restarted, 1 where not.

An engine can hang while its server answers /health with 200 (vllm#39863), and a busy one can leave a short question
unanswered for minutes and be well. So tokens decide: where the engine's own counters moved since the last look, or move
while a question waits, it works. Only where they stand still and a question of one token stays unanswered, and that
several times in a row, it hangs. A start that has not answered yet has the gate's patience.

Runs as the condition of a unit, whose command is reached by exit status 0 alone: a fault of this program restarts
nothing. Standard library alone; sources of the rules: CASES B02, B04, B05.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# vLLM's own names, 0.26 to 0.33. Cache usage moves with every chunk of a long prompt, the counters only at its end.
_PROGRESS = re.compile(
    r"^vllm:(generation_tokens_total|prompt_tokens_total|kv_cache_usage_perc)(?:\{[^}]*\})? (\S+)", re.M
)
_COUNTER = "generation_tokens_total"


@dataclass(frozen=True, slots=True)
class Unit:
    """The server's unit: whether it is active, the id of this start, and its age in seconds."""

    active: bool
    invocation: str
    age_seconds: float


@dataclass(slots=True)
class Memory:
    """What is kept between two looks.

    Attributes:
        invocation: the start that it is about.
        proven: whether that start has ever worked.
        failures: looks in a row that found it hanging.
        progress: the engine's counters at the end of the last look.
        verdict: stopped, loading, working, answering, blind or hanging.
        detail: the evidence, in words.
    """

    invocation: str = ""
    proven: bool = False
    failures: int = 0
    progress: list[float] | None = None
    verdict: str = ""
    detail: str = ""


class Server:
    """The server's HTTP side; a look never goes through a proxy, since the server is on this host."""

    def __init__(self, url: str, model: str, answer_seconds: float) -> None:
        self.url, self.model, self.patience = url, model, answer_seconds
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def progress(self) -> list[float] | None:
        """The engine's counters, empty where it shows none; None where the server does not answer."""
        try:
            with self.opener.open(self.url + "/metrics", timeout=self.patience) as reply:
                found = _PROGRESS.findall(reply.read().decode(errors="replace"))
        except (OSError, http.client.HTTPException):
            return None
        return [float(value) for _, value in found] if any(name == _COUNTER for name, _ in found) else []

    def ask(self) -> str:
        """Asks for one token: `answered`, `refused` (the question's fault, so nothing is known) or `nothing`."""
        question = {"model": self.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
        request = urllib.request.Request(
            self.url + "/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        try:
            with self.opener.open(request, timeout=self.patience) as reply:
                reply.read()
            return "answered"
        except urllib.error.HTTPError as error:
            return "refused" if error.code < 500 else "nothing"
        except (OSError, http.client.HTTPException):
            return "nothing"


def look(server: Server, unit: Unit, before: Memory, load_seconds: float) -> Memory:
    """One look: what is known now, given what was known before."""
    if not unit.active:
        return Memory(verdict="stopped", detail="the unit is not active: systemd's own matter")
    now = before if before.invocation == unit.invocation else Memory(invocation=unit.invocation)
    found = server.progress()
    if found and now.progress is not None and found != now.progress:
        return _well(now, "working", "tokens moved since the last look", found)
    asked = server.ask() if found is not None else "nothing"
    after = server.progress()
    if asked == "answered":
        return _well(now, "answering", "a question of one token was answered", after)
    if found and after and after != found:
        return _well(now, "working", "tokens moved while a question waited", after)
    if asked == "refused" or found == []:
        detail = "no token counters at /metrics" if found == [] else "the question was refused"
        return Memory(unit.invocation, now.proven, 0, after, "blind", f"{detail}: nothing is known, nothing is done")
    if not now.proven and unit.age_seconds < load_seconds:
        detail = f"not answered yet, {unit.age_seconds:.0f} s after the start, {load_seconds:.0f} s are given"
        return Memory(unit.invocation, False, 0, after, "loading", detail)
    heard = "the server does not answer" if found is None else "tokens stand still and a question is not answered"
    detail = f"{heard} within {server.patience:g} s"
    return Memory(unit.invocation, now.proven, now.failures + 1, after, "hanging", detail)


def _well(now: Memory, verdict: str, detail: str, progress: list[float] | None) -> Memory:
    return Memory(now.invocation, True, 0, progress, verdict, detail)


def read_unit(name: str) -> Unit:
    """What systemd says of the unit."""
    properties = "ActiveState,InvocationID,ActiveEnterTimestampMonotonic"
    done = subprocess.run(
        ["systemctl", "show", name, f"--property={properties}"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"<3>vllm_watchdog: systemd does not say how {name} is: {done.stderr.strip()}\n"
            f"<3>  where: {name}\n<3>  mend:  systemctl status {name}"
        )
    shown = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    entered = int(shown.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
    age = time.clock_gettime(time.CLOCK_MONOTONIC) - entered
    return Unit(shown.get("ActiveState") == "active", shown.get("InvocationID", ""), age)


def main(path: str) -> int:
    """Looks once; says what changed, as a notice in the journal."""
    request: dict[str, Any] = json.loads(Path(path).read_text())
    kept = Path(os.environ["RUNTIME_DIRECTORY"]) / "state.json"
    try:
        before = Memory(**json.loads(kept.read_text()))
    except (OSError, ValueError, TypeError):
        before = Memory()
    unit = read_unit(request["unit"])
    server = Server(request["url"], request["model"], request["answer_seconds"])
    now = look(server, unit, before, request["load_seconds"])
    hangs = now.failures >= request["failures"]
    if hangs and read_unit(request["unit"]).invocation != unit.invocation:
        # Started anew while this look waited: what was seen is not about what runs.
        hangs, now = False, Memory()
    part = kept.with_suffix(".part")
    part.write_text(json.dumps(asdict(now)))
    part.replace(kept)
    if hangs:
        print(
            f"<3>vllm_watchdog: the engine hangs, seen {now.failures} times in a row: {now.detail}; it is restarted\n"
            f"<3>  where: {request['url']} ({request['unit']})\n"
            f"<3>  mend:  journalctl -u {request['unit']} -n 200"
        )
    elif (now.verdict, now.failures) != (before.verdict, before.failures):
        print(f"<5>{now.verdict} ({now.failures} of {request['failures']}): {now.detail}")
    return 0 if hangs else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
