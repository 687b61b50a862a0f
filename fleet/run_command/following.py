"""The commands of a run followed to their ends: events as they come, and each host's fate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fleet import aws
from fleet.events import HostResult, Outcome
from fleet.execution import Listener
from fleet.run_command import agents, commands
from fleet.run_command.fates import End, Fate
from fleet.run_command.store import Store
from fleet.run_command.streams import Stream

# What the bootstrap and the job say of themselves ends within this time of the command's own end, seconds.
_AFTER_S = 20.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: between two looks at the bucket (first and longest), and of silence until AWS is asked about a host.

    A host gives a sign of life each minute; two that did not come are a silence.
    """

    first_s: float = 3.0
    longest_s: float = 5.0
    growth: float = 1.1
    silence_s: float = 150.0
    cancel_s: float = 20.0


class _Followed:
    """One host: its stream, what AWS says of its command, and when it was last heard."""

    def __init__(self, instance_id: str, command: commands.Command, stream: Stream) -> None:
        self.instance_id = instance_id
        self.command = command
        self.stream = stream
        self.invocation: commands.Invocation | None = None
        self.heard = self.told = time.monotonic()
        self.done = False

    @property
    def begun(self) -> bool:
        """Whether it has said something, or AWS says that its agent took the command."""
        return bool(self.stream.count or (self.invocation and self.invocation.status != "Pending"))


class Following:
    """Follows a run; `rc` is Ansible's worst code where no host failed by a task, `hosts` are by instance id."""

    def __init__(
        self, listener: Listener, store: Store, run_id: str, private: str, patience: Patience, stall_s: float
    ) -> None:
        self.rc = 0
        self._listener = listener
        self._store = store
        self._run_id = run_id
        self._private = private
        self._patience = patience
        self._stall_s = stall_s
        self.hosts: dict[str, _Followed] = {}
        self._clients: dict[str, Any] = {}
        self._begun: set[tuple[str, str]] = set()

    def follow(self, sent: Sequence[commands.Command]) -> None:
        """Returns when every host's part is over; a run that is to stop is cancelled on its hosts first."""
        self.expect(sent)
        wait_s = self._patience.first_s
        asked = time.monotonic()
        while self._left():
            if self._listener.should_stop():
                self._cancel()
                return
            self._listener.cancelled.wait(wait_s)
            wait_s = min(wait_s * self._patience.growth, self._patience.longest_s)
            self._read()
            self.end_stalled()
            ended = all(host.stream.over for host in self._left())
            # Results tell nearly all: AWS is asked where a host has ended or says nothing, and now and then.
            due = time.monotonic() - asked > self._patience.silence_s / 5
            if ended or due:
                asked = time.monotonic()
                self._ask()
            if due:
                self._look_at_silent()

    def _heard(self, raw: dict[str, Any]) -> bool:
        """Each host tells of each task that begins; as in a push run the first to begin it counts for all."""
        if raw.get("event") == "playbook_on_task_start":
            data = raw.get("event_data") or {}
            task = (str(data.get("role", "")), str(data.get("task", "")))
            if task in self._begun:
                return False
            self._begun.add(task)
        return self._listener.heard(raw)

    def expect(self, sent: Sequence[commands.Command]) -> None:
        """Takes the commands' hosts for those of the run."""
        for command in sent:
            for instance_id in command.instance_ids:
                stream = Stream(self._heard, self._private)
                self.hosts[instance_id] = _Followed(instance_id, command, stream)

    def _left(self) -> list[_Followed]:
        return [host for host in self.hosts.values() if not host.done]

    def _silent(self, host: _Followed) -> bool:
        # One that never began gives no sign of life: whether it is only its turn that has not come, AWS knows.
        limit_s = self._patience.silence_s / (1 if host.begun else 5)
        return time.monotonic() - host.heard > limit_s

    def _read(self) -> None:
        for instance_id, chunk in self._store.new(self._run_id):
            host = self.hosts.get(instance_id)
            if host is None or host.done:
                continue
            host.heard = time.monotonic()
            try:
                host.stream.take(chunk)
            except (ValueError, KeyError, TypeError) as error:
                host.stream.broken = f"chunk {chunk.number} is no stream of ansible-runner's: {error}"
            if host.stream.broken:
                self._end(host, End(Fate.REFUSED, host.stream.broken))

    def end_stalled(self) -> None:
        """Ends the part of hosts whose task says nothing any more; where it is so on all, the run itself is stalled."""
        now = time.monotonic()
        left = self._left()
        stalled = [host for host in left if host.stream.worked and now - host.stream.worked > self._stall_s]
        if len(stalled) == len(left):
            return
        for host in stalled:
            commands.cancel(self._ssm(host.command.region), host.command, [host.instance_id])
            self._end(host, End(Fate.STALLED, f"for {self._stall_s:.0f} s"))

    def _ask(self) -> None:
        for command in {host.command.id: host.command for host in self._left()}.values():
            for invocation in commands.invocations(self._ssm(command.region), command):
                host = self.hosts[invocation.instance_id]
                if host.done:
                    continue
                if host.invocation is None or host.invocation.status != invocation.status:
                    host.told = time.monotonic()
                host.invocation = invocation
                if invocation.over:
                    self._judge(host, invocation)

    def _judge(self, host: _Followed, invocation: commands.Invocation) -> None:
        """A command that is over: by what the host's own last lines say, and by AWS's word where it says nothing."""
        said = {name: line for line in invocation.said for name in ("error", "digest", "duplicate") if name in line}
        if "error" in said:
            error = said["error"]["error"]
            self._failed(
                host,
                f"bootstrap: {error['what']}\n  where: {host.instance_id} {error['where']}\n  mend:  {error['mend']}",
            )
        elif "digest" in said:
            self._compare(host, said["digest"])
        elif said.get("duplicate", {}).get("rebooted"):
            self._end(host, End(Fate.REBOOTED))
        elif invocation.details == "Terminated":
            self._end(host, End(Fate.NOT_BEGUN))
        elif invocation.status == "TimedOut":
            never = invocation.details in ("DeliveryTimedOut", "Undeliverable")
            self._end(host, End(Fate.NEVER_ANSWERED if never else Fate.TIMED_OUT))
        elif invocation.status == "Cancelled":
            self._end(host, End(Fate.CANCELLED, invocation.details))
        else:
            tail = invocation.output.strip()[-300:] or "it says nothing"
            self._failed(
                host,
                f"bootstrap: the command ended with {invocation.status}: {tail}\n"
                f"  where: {host.instance_id}\n  mend:  aws ssm get-command-invocation --command-id "
                f"{host.command.id} --instance-id {host.instance_id}",
            )

    def _compare(self, host: _Followed, said: dict[str, Any]) -> None:
        """The stream against the host's last word of it, which came another way."""
        if "trouble" in said:
            self._failed(
                host,
                f"bootstrap: its results could not be put: {said['trouble']}\n"
                f"  where: {host.instance_id} s3://{self._store.bucket}\n"
                "  mend:  compare its instance profile with docs/policies/instance.json",
            )
        elif host.stream.count < int(said["chunks"]):
            # S3 shows at once what was put, so the next look has it.
            if time.monotonic() - host.told > _AFTER_S:
                self._end(host, End(Fate.REFUSED, f"{host.stream.count} of {said['chunks']} results are there"))
        elif host.stream.digest != said["digest"]:
            self._end(host, End(Fate.REFUSED, "its results have another digest than it says"))
        else:
            host.done = True
            self.rc = self.rc or int(said["rc"] or 0)

    def _look_at_silent(self) -> None:
        """Asks AWS what became of hosts that say nothing."""
        silent = [host for host in self._left() if self._silent(host)]
        for region in sorted({host.command.region for host in silent}):
            there = [host for host in silent if host.command.region == region]
            ids = [host.instance_id for host in there]
            # The agents first: one that went with its instance is then seen with the instance gone.
            known = agents.agents(region, ids)
            states = agents.states(region, ids)
            # What came while AWS was asked: a spot notice, the task that it was at.
            self._read()
            for host in there:
                if host.done:
                    continue
                state, agent = states.get(host.instance_id, "terminated"), known.get(host.instance_id)
                notice = host.stream.spot_notice
                if state not in ("running", "pending"):
                    told = f", after a spot notice: {notice.get('action')} at {notice.get('time')}" if notice else ""
                    self._end(host, End(Fate.GONE, state + told))
                elif not self._silent(host):
                    continue
                elif agent is None or not agent.online:
                    if not host.begun:
                        # It must not begin when nobody follows it any longer.
                        commands.cancel(self._ssm(region), host.command, [host.instance_id])
                    self._end(host, End(Fate.AGENT_LOST if host.begun else Fate.NEVER_ANSWERED))
                elif host.begun and time.monotonic() - host.heard > self._stall_s:
                    self._end(host, End(Fate.SILENT, f"nothing for {self._stall_s:.0f} s"))

    def _cancel(self) -> None:
        """Cancels on all hosts and waits a little for the word that they ended."""
        left = {host.command.id: host.command for host in self._left()}
        for command in left.values():
            commands.cancel(self._ssm(command.region), command)
        until = time.monotonic() + self._patience.cancel_s
        while left and time.monotonic() < until:
            for command in list(left.values()):
                if all(found.over for found in commands.invocations(self._ssm(command.region), command)):
                    del left[command.id]
            time.sleep(min(1.0, self._patience.first_s))

    def _failed(self, host: _Followed, message: str) -> None:
        host.done = True
        self._listener.tell(_result(host, Outcome.FAILED, message))

    def _end(self, host: _Followed, end: End) -> None:
        host.done = True
        message = end.message(host.instance_id, self._listener.at(host.instance_id))
        self._listener.tell(_result(host, Outcome.UNREACHABLE, message))

    def _ssm(self, region: str) -> Any:
        if region not in self._clients:
            self._clients[region] = aws.client("ssm", region)
        return self._clients[region]


def _result(host: _Followed, outcome: Outcome, message: str) -> HostResult:
    return HostResult(host.instance_id, "", "Systems Manager", outcome, 0.0, message)
