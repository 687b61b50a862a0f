"""What can become of a host that is reached by Systems Manager, each told apart, in the house form."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fleet.run_command.document import NAME


class Fate(StrEnum):
    """How a host's part ended, where it is not by its playbook."""

    NO_AGENT = "no agent"
    NEVER_ANSWERED = "never answered"
    AGENT_LOST = "agent lost"
    REBOOTED = "rebooted"
    GONE = "instance gone"
    SILENT = "silent"
    STALLED = "stalled"
    CANCELLED = "cancelled"
    NOT_BEGUN = "not begun"
    REFUSED = "refused"
    TIMED_OUT = "timed out"


# What it means, and what mends it.
_TOLD = {
    Fate.NO_AGENT: (
        "Systems Manager does not know this instance: no agent, no role, or no way to its endpoints",
        "compare its instance profile with docs/policies/instance.json; aws ssm describe-instance-information",
    ),
    Fate.NEVER_ANSWERED: (
        "its agent is away and has not taken the command, which is withdrawn",
        "aws ssm describe-instance-information; then ./runner.py reboot",
    ),
    Fate.AGENT_LOST: (
        "its agent is lost and no event comes; what it was at may go on",
        "aws ssm describe-instance-information; then converge again",
    ),
    Fate.REBOOTED: ("it rebooted in the middle of the run, which was not begun again", "converge again"),
    Fate.GONE: ("the instance is no longer running", "aws ec2 describe-instances; then launch another"),
    Fate.SILENT: ("it says nothing, though its agent lives", "converge again"),
    Fate.STALLED: ("no event came, though it gives signs of life; it was cancelled there", "converge again"),
    Fate.CANCELLED: (
        "the command was cancelled by somebody else",
        "converge again",
    ),
    Fate.NOT_BEGUN: ("more hosts than --max-errors allows had failed before its turn came", "converge again"),
    Fate.REFUSED: ("what it said does not hold together, and is not taken", "find out who writes to the bucket"),
    Fate.TIMED_OUT: ("it took longer than the run's limit", "./runner.py converge --time-limit SECONDS"),
}


@dataclass(frozen=True, slots=True)
class End:
    """A host's fate with what was found."""

    fate: Fate
    found: str = ""

    def message(self, host: str, task: str) -> str:
        """What, where and mend."""
        what, mend = _TOLD[self.fate]
        found = f" ({self.found})" if self.found else ""
        at = f", at {task}" if task else ""
        return f"{NAME}: {self.fate}: {what}{found}\n  where: {host}{at}\n  mend:  {mend}"
