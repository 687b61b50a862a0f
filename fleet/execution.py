"""The one module that touches ansible-runner: a request in, typed events out, nothing left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ansible_runner

from fleet.errors import ExitCode, FleetError
from fleet.events import Event, HostResult, HostStarted, HostTally, Outcome, TaskStarted
from fleet.paths import PROJECT, state_dir
from fleet.redaction import redacted_data
from fleet.requests import Request

_OUTCOMES = {
    "runner_on_ok": Outcome.OK,
    "runner_on_failed": Outcome.FAILED,
    "runner_on_unreachable": Outcome.UNREACHABLE,
    "runner_on_skipped": Outcome.SKIPPED,
    "runner_retry": Outcome.RETRY,
}


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run ended: exit code, counts per host, and what Ansible said where no host failed."""

    code: ExitCode
    hosts: dict[str, HostTally]
    said: str = ""


def execute(request: Request, on_event: Callable[[Event], None]) -> Finished:
    """Runs the request's playbook and hands each event on as it comes.

    The private directory (inputs and artifacts) is mode 0700 and is removed on every way out; one that a killed runner
    left is removed by the next run. Of the environment, where a user's keys may be, nothing lies there meanwhile.
    """
    runs = state_dir() / "runs"
    runs.mkdir(exist_ok=True, mode=0o700)
    _sweep(runs)
    private = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=runs))
    listener = Listener(request, on_event)
    try:
        with listener.interruptible():
            done = ansible_runner.run(
                **arguments(request, private),
                event_handler=listener.heard,
                cancel_callback=listener.should_stop,
                status_handler=_forget_environment,
            )
        return listener.finish(done.rc)
    finally:
        _end_workers(private)
        shutil.rmtree(private, ignore_errors=True)


def play_arguments(request: Request) -> dict[str, Any]:
    """What of a request is the same wherever Ansible runs, by ansible-runner's own names."""
    return {
        "playbook": request.playbook,
        "extravars": {
            **request.extra_vars,
            **dict.fromkeys(request.switches.values(), True),
            "vllm_fleet_run": request.run_id,
        },
        "tags": request.tags,
        "cmdline": " ".join(request.flags) or None,
        "verbosity": request.verbosity or None,
    }


def arguments(request: Request, private: Path) -> dict[str, Any]:
    """What ansible-runner is asked for on this machine, by its own names."""
    return {
        **play_arguments(request),
        "private_data_dir": str(private),
        "project_dir": str(PROJECT),
        "inventory": [str(path) for path in request.inventories],
        "limit": request.limit,
        "forks": request.forks,
        "envvars": {
            "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            "ANSIBLE_NOCOLOR": "1",
            # Ansible's programs beside this interpreter, before any other on the PATH.
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        },
        "quiet": True,
    }


def on_ending_signals(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Hands Ctrl-C, a kill and a closed terminal to the handler; what is ignored (nohup) stays so.

    Returns the earlier handlers by signal.
    """
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return {n: signal.signal(n, handler) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}


class Listener:
    """What a run says, whichever way it comes: typed, counted and watched against the request's limits."""

    def __init__(self, request: Request, on_event: Callable[[Event], None]) -> None:
        self.hosts: dict[str, HostTally] = {}
        self.cancelled = threading.Event()
        self._request = request
        self._on_event = on_event
        self._at: dict[str, str] = {}
        self._began = self._last = time.monotonic()
        self._stopped_by: str | None = None
        self._trouble: BaseException | None = None
        self._said: list[str] = []

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Ctrl-C and its like are only taken note of inside: the run asks, ends its work, and returns."""
        earlier = on_ending_signals(lambda *_: self.cancelled.set())
        try:
            yield
        finally:
            for number, handler in earlier.items():
                signal.signal(number, handler)

    def should_stop(self) -> bool:
        """Whether the run is cancelled, too long, or silent."""
        now = time.monotonic()
        if now - self._began > self._request.limit_s:
            self._stopped_by = f"the run took longer than its limit of {self._request.limit_s} s"
        elif now - self._last > self._request.stall_s:
            self._stopped_by = f"no event came for {self._request.stall_s} s"
        return self._stopped_by is not None or self.cancelled.is_set()

    def heard(self, raw: dict[str, Any]) -> bool:
        """Takes one of ansible-runner's events. Returns False, which tells ansible-runner not to keep it."""
        self._last = time.monotonic()
        raw = redacted_data(raw)
        event = _typed(raw)
        if event is None:
            if raw.get("event") in ("verbose", "error", "warning") and raw.get("stdout"):
                self._said.append(raw["stdout"])
        else:
            self.tell(event)
        return False

    def tell(self, event: Event) -> None:
        """Counts an event and hands it on."""
        if isinstance(event, HostStarted):
            self._at[event.host] = event.task
        elif isinstance(event, HostResult):
            self.hosts.setdefault(event.host, HostTally()).add(event)
            if event.outcome is not Outcome.RETRY:
                self._at.pop(event.host, None)
        try:
            self._on_event(event)
        except BaseException as error:  # a full disk under the log, a pipe that nobody reads
            # Raised through ansible-runner it would leave Ansible running behind it.
            self._trouble = error
            self.cancelled.set()

    def at(self, host: str) -> str:
        """The task that the host is at; empty between tasks."""
        return self._at.get(host, "")

    def finish(self, rc: int | None) -> Finished:
        """How the run ended, with `rc` of Ansible's; raises what broke it off."""
        if self._trouble is not None:
            raise self._trouble
        if self.cancelled.is_set():
            raise KeyboardInterrupt
        hosts = self.hosts
        said = "\n".join(self._said)[-3000:]
        if self._stopped_by is not None:
            raise FleetError(
                f"stopped: {self._stopped_by}; what was done stays done",
                where=", ".join(f"{host} ({task})" for host, task in self._at.items()) or "no host at work",
                mend=self._request.again(),
                code=ExitCode.STALLED,
            )
        if any(tally.unreachable for tally in hosts.values()):
            return Finished(ExitCode.UNREACHABLE, hosts, said)
        failed = [tally for tally in hosts.values() if tally.failed]
        if failed:
            refused = any(tally.refused for tally in failed)
            bad = any(tally.bad_input for tally in failed)
            code = ExitCode.REFUSED if refused else ExitCode.BAD_INPUT if bad else ExitCode.HOST_FAILED
            return Finished(code, hosts, said)
        if rc != 0 or not hosts:
            return Finished(ExitCode.BAD_INPUT, hosts, said)
        return Finished(ExitCode.OK, hosts, said)


def _typed(raw: dict[str, Any]) -> Event | None:
    data = raw.get("event_data") or {}
    kind = raw.get("event", "")
    host, role = data.get("host", ""), data.get("role", "")
    task = data.get("task", "").removeprefix(f"{role} : ")
    if kind == "playbook_on_task_start":
        return TaskStarted(role, task)
    if kind == "runner_on_start":
        return HostStarted(host, role, task)
    if kind not in _OUTCOMES:
        return None
    result = data.get("res") or {}
    outcome = _OUTCOMES[kind]
    if outcome is Outcome.OK and result.get("changed"):
        outcome = Outcome.CHANGED
    if outcome is Outcome.FAILED and data.get("ignore_errors"):
        outcome = Outcome.OK
    return HostResult(
        host=host,
        role=role,
        task=task,
        outcome=outcome,
        seconds=float(data.get("duration") or 0.0),
        message=_message(result, host, role),
        result=result,
    )


def _message(result: dict[str, Any], host: str, role: str) -> str:
    text = result.get("msg") or result.get("message") or ""
    if result.get("argument_errors"):
        wrong = "; ".join(result["argument_errors"])
        text = (
            f"{role}: {wrong}\n  where: {host} variables of the role\n  mend:  see the table in roles/{role}/README.md"
        )
    return text if isinstance(text, str) else json.dumps(text)


def _forget_environment(status: dict[str, Any], runner_config: Any) -> None:
    """Ansible-runner has just written down the whole environment, which it needs no more: a killed run leaves none."""
    if status["status"] == "running":
        Path(runner_config.artifact_dir, "command").unlink(missing_ok=True)


def _end_workers(private: Path) -> None:
    """Ends what a cancelled Ansible leaves on this machine.

    Its workers have sessions of their own, outlive it, and go on with their retries on the host. Their command line
    names the private directory, which no other run has.
    """
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(private).encode() in (folder / "cmdline").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def _sweep(runs: Path) -> None:
    """Removes what runners that no longer live have left."""
    for left in runs.iterdir():
        pid = left.name.split("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
