"""The one error shape: what is wrong, where, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    HOST_FAILED = 1
    BAD_INPUT = 2
    UNREACHABLE = 3
    DRIFT = 4
    STALLED = 5
    REFUSED = 6


# Of several ends a command has the code of the worst.
_WORST_FIRST = (
    ExitCode.HOST_FAILED,
    ExitCode.STALLED,
    ExitCode.BAD_INPUT,
    ExitCode.REFUSED,
    ExitCode.UNREACHABLE,
    ExitCode.DRIFT,
    ExitCode.OK,
)


def worst(codes: Iterable[ExitCode]) -> ExitCode:
    """The code of a command whose parts ended with these; OK for none."""
    ended = {ExitCode.OK, *codes}
    return next(code for code in _WORST_FIRST if code in ended)


class FleetError(Exception):
    """An error a user can act on.

    Args:
        what: what is wrong, with the value found and the value wanted.
        where: the host, path or variable concerned.
        mend: one command to run or one variable to set.
        code: the exit code of the command that raises it.
        who: the role or command that speaks.
    """

    def __init__(
        self, what: str, *, where: str, mend: str, code: ExitCode = ExitCode.BAD_INPUT, who: str = "runner"
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.mend = mend
        self.code = code
        self.who = who

    def __str__(self) -> str:
        return f"{self.who}: {self.what}\n  where: {self.where}\n  mend:  {self.mend}"

    def as_dict(self) -> dict[str, str | int]:
        """The same as JSON: `{who, what, where, mend, code}`."""
        return {
            "who": self.who,
            "what": self.what,
            "where": self.where,
            "mend": self.mend,
            "code": int(self.code),
        }
