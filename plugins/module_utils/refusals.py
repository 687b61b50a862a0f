"""Reasons not to touch a host, and their one shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """One reason not to touch the host, in the parts of the house form."""

    what: str
    where: str
    mend: str


def house_form(refusals: Sequence[Refusal], host: str, who: str = "preflight") -> str:
    """All refusals as one text in the house form."""
    if len(refusals) == 1:
        only = refusals[0]
        return f"{who}: {only.what}\n  where: {host} {only.where}\n  mend:  {only.mend}"
    numbered = list(enumerate(refusals, 1))
    return (
        f"{who}: {len(refusals)} things stand against this host: "
        + "; ".join(f"({n}) {r.what}" for n, r in numbered)
        + f"\n  where: {host} "
        + "; ".join(f"({n}) {r.where}" for n, r in numbered)
        + "\n  mend:  "
        + "; ".join(f"({n}) {r.mend}" for n, r in numbered)
    )
