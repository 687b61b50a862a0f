"""The newest version of vLLM that nothing known rules out, and what rules out each newer one. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ansible.module_utils.host_plan import version_pair
from ansible.module_utils.version_rules import JUDGEMENTS, NEWEST_KNOWN, RULES, Judgement, Rule

_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(?:(a|b|rc)(\d+))?(?:\.post(\d+))?(?:\.dev(\d+))?(?:\+.*)?", re.ASCII)
_LAST = 1 << 30


@dataclass(frozen=True, slots=True)
class Candidate:
    """One version that could be had. `requires_python` is set where it does not take the host's Python."""

    version: str
    wheel: bool = True
    sdist: bool = True
    requires_python: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What of a host, its model and one wanted release rules versions out; empty strings where not known."""

    method: str
    target_device: str = "cuda"
    architecture: str = ""
    capability: str = ""
    model_type: str = ""
    mixed_heads: bool = False
    float16: bool = False
    torch: str = ""
    gcc: str = ""
    rust: str = ""
    python: str = ""
    unpublished: bool = False

    @property
    def compiles(self) -> bool:
        """Whether the release is compiled for CUDA against the host's torch."""
        return self.method == "source" and self.target_device == "cuda"


@dataclass(frozen=True, slots=True)
class Rejection:
    """What rules a version out: name of the constraint, why in words, and its source."""

    version: str
    id: str
    why: str
    source: str
    floor: str = ""

    def __str__(self) -> str:
        return f"{self.id}: {self.why} ({self.source})"


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen version (empty where none is left) and every newer one with what rules it out."""

    version: str
    rejected: tuple[Rejection, ...]


def version_key(version: str) -> tuple[Any, ...]:
    """A key that orders versions as PEP 440 does; empty where it is no version. A local part does not count."""
    found = _VERSION.fullmatch(version)
    if not found:
        return ()
    release = tuple(int(part) for part in found[1].split("."))
    while release and not release[-1]:
        release = release[:-1]
    pre, post, dev = found[2], found[4], found[5]
    stage: tuple[Any, ...] = (pre, int(found[3])) if pre else ("" if dev and not post else "z", 0)
    return release, stage, -1 if post is None else int(post), _LAST if dev is None else int(dev)


def is_prerelease(version: str) -> bool:
    """Whether it is an alpha, beta, candidate or development version."""
    found = _VERSION.fullmatch(version)
    return bool(found and (found[2] or found[5]))


def judgement(version: str, torch: str) -> Judgement:
    """What is known of that vLLM compiled against that torch; a pair that nobody has shown is `unknown`."""
    key, found = version_key(version), version_key(torch)
    for row in JUDGEMENTS:
        among = version_key(row.since) <= key <= version_key(row.until)
        if key and found and among and version_key(row.torch) <= found < version_key(row.torch_below):
            return row
    return Judgement(version, version, torch, "", "unknown", "nobody has shown this pair", "", "no record of it")


def told(version: str, torch: str) -> str:
    """A judgement in words."""
    row = judgement(version, torch)
    when = f", {row.date}" if row.date else ""
    return f"{row.verdict}: vLLM {version} on torch {torch}: {row.evidence} ({row.source}{when})"


def rejection(version: str, facts: Facts) -> Rejection | None:
    """The first constraint that rules a version out on that host; None where none does, or it is no version."""
    key = version_key(version)
    if not key:
        return None
    for rule in RULES:
        since, below = version_key(rule.since), version_key(rule.below)
        if since <= key and (not below or key < below) and _holds(rule, facts):
            why = rule.why.format(
                model_type=facts.model_type, capability=facts.capability, architecture=facts.architecture,
                gcc=facts.gcc, rust=facts.rust,
            )  # fmt: skip
            return Rejection(version, rule.id, why, rule.source, "" if rule.unpublished else rule.below)
    if facts.compiles and facts.torch:
        row = judgement(version, facts.torch)
        if row.verdict == "refused":
            return Rejection(version, "torch", f"torch is {facts.torch}: {row.evidence}", row.source)
    return None


def choose(candidates: Iterable[Candidate], facts: Facts, *, prereleases: bool = False) -> Choice:
    """The newest candidate that nothing rules out; a prerelease only where asked for, or where no other is left."""
    known = {version_key(found.version): found for found in candidates if version_key(found.version)}
    newest_first = [known[key] for key in sorted(known, reverse=True)]
    fits = {found.version: _unfit(found, facts) or rejection(found.version, facts) for found in newest_first}
    order = list(fits) if prereleases else sorted(fits, key=is_prerelease)
    chosen = next((version for version in order if fits[version] is None), "")
    tried = order[: order.index(chosen)] if chosen else order
    newer = list(fits)[: list(fits).index(chosen)] if chosen else []
    early = "a prerelease, and a final version is left"
    return Choice(
        chosen,
        tuple(
            fits[version] or Rejection(version, "prerelease", early, "prereleases of that entry is false")
            for version in fits
            if version in tried or version in newer
        ),
    )


def grouped(rejected: Sequence[Rejection]) -> str:
    """All rejections in a few words: versions with the same reason together, each as `newest to oldest (how many)`."""
    by_reason: dict[str, list[str]] = {}
    for found in rejected:
        by_reason.setdefault(str(found), []).append(found.version)
    return "; ".join(f"{_span(versions)}: {reason}" for reason, versions in by_reason.items())


def unproven(version: str) -> str:
    """Words on a version that is newer than all that is known; empty where it is not."""
    if version_key(version) <= version_key(NEWEST_KNOWN):
        return ""
    return f"unproven: newer than {NEWEST_KNOWN}, the newest that is known here"


def _span(versions: Sequence[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]} ({len(versions)} versions)"


def _unfit(found: Candidate, facts: Facts) -> Rejection | None:
    if found.requires_python:
        why = f"Python is {facts.python}, and {found.requires_python} is wanted"
        return Rejection(found.version, "Python", why, "Requires-Python on the index")
    kind, there = ("sdist", found.sdist) if facts.method == "source" else ("wheel", found.wheel)
    if not there:
        return Rejection(found.version, "files", f"no {kind} for this host is there", "the package index")
    return None


def _holds(rule: Rule, facts: Facts) -> bool:
    capability = version_pair(facts.capability)
    holds = [
        not rule.mixed_heads or facts.mixed_heads,
        not rule.float16_of or (facts.float16 and facts.model_type in rule.float16_of),
        not rule.capability_below or (0, 0) < capability < version_pair(rule.capability_below),
        not rule.capability_from or capability >= version_pair(rule.capability_from),
        not rule.gcc_below or (facts.compiles and () < version_key(facts.gcc) < version_key(rule.gcc_below)),
        not rule.rust_below or (facts.compiles and () < version_key(facts.rust) < version_key(rule.rust_below)),
        not rule.unpublished or (facts.method == "wheel" and facts.target_device == "cuda" and facts.unpublished),
    ]
    return all(holds)
