"""Hosts rebooted by EC2, a few at a time: a reboot is over when another boot of the host echoes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from botocore.exceptions import ConnectionClosedError, ReadTimeoutError

from fleet import aws
from fleet.aws_errors import told
from fleet.errors import ExitCode, FleetError
from fleet.run_command import echoes


class Outcome(StrEnum):
    """What became of one host."""

    BACK = "back"
    DOWN = "stayed down"
    UNCHANGED = "did not reboot"
    UNREACHABLE = "unreachable, not rebooted"
    AT_WORK = "at work, not rebooted"
    FAILED = "AWS refused"


_CODES = {
    Outcome.BACK: ExitCode.OK,
    Outcome.DOWN: ExitCode.HOST_FAILED,
    Outcome.UNCHANGED: ExitCode.STALLED,
    Outcome.UNREACHABLE: ExitCode.UNREACHABLE,
    Outcome.AT_WORK: ExitCode.REFUSED,
}
# Nothing was done to these: the others go on, and they are among those left.
UNTOUCHED = (Outcome.UNREACHABLE, Outcome.AT_WORK)


@dataclass(frozen=True, slots=True)
class Target:
    """An instance and its region."""

    instance_id: str
    region: str


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: for a reboot as a whole, for one echo (no less than an echo takes), and between two looks.

    A shutdown that hangs is cut off by EC2 after some minutes, which the default for the whole covers.
    """

    reboot_s: float = 600.0
    echo_s: float = 30.0
    poll_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Rebooted:
    """How one host's turn ended; the boots' ids are empty where no echo told them."""

    target: Target
    outcome: Outcome
    before: str = ""
    after: str = ""
    seconds: float = 0.0
    error: FleetError | None = None

    @property
    def code(self) -> ExitCode:
        """The exit code that this end has by itself."""
        return self.error.code if self.error else _CODES[self.outcome]


def rolling(
    targets: Sequence[Target],
    patience: Patience,
    at_once: int,
    say: Callable[[Target, str], None],
    ended: Callable[[Rebooted], None],
) -> None:
    """Reboots the hosts in order, `at_once` at a time, and begins no further one after one that failed.

    Hosts that are unreachable or at work are passed over. `say` and `ended` are called from this thread and others.
    """
    queue, stop = deque(targets), threading.Event()
    failed = False
    pending: set[Future[Rebooted]] = set()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            while pending or (queue and not failed):
                while queue and len(pending) < at_once and not failed:
                    pending.add(pool.submit(_turn, queue.popleft(), patience, say, stop))
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    rebooted = future.result()
                    failed |= rebooted.code is not ExitCode.OK and rebooted.outcome not in UNTOUCHED
                    ended(rebooted)
        except BaseException:
            # The reboots that were asked for take place; only the watching ends.
            stop.set()
            raise


def _turn(target: Target, patience: Patience, say: Callable[[Target, str], None], stop: threading.Event) -> Rebooted:
    began = time.monotonic()
    try:
        with told(target.instance_id, who="reboot"):
            rebooted = _reboot(target, patience, say, stop)
    except FleetError as error:
        rebooted = Rebooted(target, Outcome.FAILED, error=error)
    return replace(rebooted, seconds=round(time.monotonic() - began, 1))


def _reboot(target: Target, patience: Patience, say: Callable[[Target, str], None], stop: threading.Event) -> Rebooted:
    # An echo acts on nothing, so this client may send it a second time.
    ssm = aws.client("ssm", target.region)

    def echo() -> echoes.Echo | None:
        return echoes.ask(ssm, target.instance_id, wait_s=patience.echo_s, poll_s=patience.poll_s, stop=stop)

    say(target, "asked for an echo")
    if _at_work(ssm, target):
        return Rebooted(target, Outcome.AT_WORK)
    before = echo()
    if before is None:
        return Rebooted(target, Outcome.UNREACHABLE)
    say(target, "told to reboot")
    try:
        aws.client("ec2", target.region, once=True).reboot_instances(InstanceIds=[target.instance_id])
    except (ReadTimeoutError, ConnectionClosedError):
        # EC2 may have heard it or not. Asked twice it might reboot twice; the boot's id tells.
        say(target, "told to reboot, EC2's answer is lost")
    until = time.monotonic() + patience.reboot_s
    latest: echoes.Echo | None = before
    # The last echo gets its whole time, so that it tells a host that is down from one that never rebooted.
    while time.monotonic() < until and not stop.wait(patience.poll_s):
        latest = echo()
        if latest is not None and latest.boot_id != before.boot_id:
            return Rebooted(target, Outcome.BACK, before.boot_id, latest.boot_id)
        say(target, "goes down" if latest else "no echo yet")
    return Rebooted(target, Outcome.UNCHANGED if latest else Outcome.DOWN, before.boot_id)


def _at_work(ssm: Any, target: Target) -> bool:
    """Whether a command is under way there. A build is none: it is the host's own, and goes on after the boot."""
    found = ssm.list_command_invocations(
        InstanceId=target.instance_id, Filters=[{"key": "Status", "value": "InProgress"}]
    )
    return any(invocation["Status"] == "InProgress" for invocation in found["CommandInvocations"])
