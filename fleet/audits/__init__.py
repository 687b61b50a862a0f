"""What an audit looks at, and what it says of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at: of what (an instance's id, a bucket, a document), what was found, and what mends it.

    `mend` is empty where the check is passed.
    """

    subject: str
    name: str
    found: str
    mend: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is nothing to mend."""
        return not self.mend

    def as_dict(self) -> dict[str, str | bool]:
        """As JSON: `{subject, name, ok, found, mend}`."""
        return {**asdict(self), "ok": self.ok}
