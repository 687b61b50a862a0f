"""What an audit makes of a host's packages and of how its services are confined, from what apt and systemd say."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

# As an audit tells it: `name`, `found`, and `mend`, empty where there is nothing to mend.
Check = dict[str, str]
# Between Date and Valid-Until of Debian's own security lists.
_VALID_DAYS = 7
# systemd's words for less than 5.0 of 10 (analyze-security.c); from there on it says MEDIUM and worse.
_CONFINED = ("PERFECT", "OK")
_SHOWN = 5
# These alone: a whole upgrade would take the driver along.
_UPDATE = (
    "apt-get install --only-upgrade $(apt-get -s --ignore-hold dist-upgrade | awk '/^Inst .*-security[ ,]/ {print $2}')"
)
_INST = re.compile(r"Inst (?P<name>\S+) (?:\[\S+\] )?\(\S+ (?P<sources>.+) \[\S+\]\)")


@dataclass(frozen=True, slots=True)
class Said:
    """What a program printed; `problem` is why that is not to be relied on, empty where it is."""

    out: str
    problem: str = ""


def check(name: str, found: str, mend: str = "") -> Check:
    """One thing that was looked at."""
    return {"name": name, "found": found, "mend": mend}


def updates(releases: Mapping[str, str], simulated: Said, now: float) -> list[Check]:
    """How old the security archive's lists are, and what they have that is not installed.

    Args:
        releases: apt's release files by name.
        simulated: what `apt-get -s dist-upgrade` says.
        now: seconds since the epoch.
    """
    security = [text for name, text in releases.items() if re.search(r"-security_(In)?Release$", name)]
    # A file's own time is the server's, and the folder's moves with an update that fails, too.
    dates = [parsedate_to_datetime(found[1]) for text in security if (found := re.search(r"(?m)^Date: (.+)$", text))]
    if not releases:
        return [check("package lists", "never fetched", "apt-get update")]
    if not dates:
        mend = "add the distribution's security archive below /etc/apt/sources.list.d, then apt-get update"
        return [check("package lists", "none of a security archive", mend)]
    age = int(now - max(dates).timestamp()) // 86400
    lists = check("package lists", f"{age} days old", "apt-get update" if age > _VALID_DAYS else "")
    return [lists, _pending(simulated)]


def _pending(simulated: Said) -> Check:
    name = "security updates"
    if simulated.problem:
        return check(name, f"not known: {simulated.problem}", "apt-get -s dist-upgrade")
    insts = [found for line in simulated.out.splitlines() if (found := _INST.match(line))]
    pending = [
        found["name"] for found in insts if any(source.endswith("-security") for source in found["sources"].split(", "))
    ]
    if not pending:
        return check(name, "none pending")
    more = f" and {len(pending) - _SHOWN} more" if len(pending) > _SHOWN else ""
    told = f"{len(pending)} pending: {', '.join(pending[:_SHOWN])}{more}"
    return check(name, told, _UPDATE)


def reboot(packages: str | None) -> Check:
    """Whether packages ask for a reboot; `packages` names them, None where nothing asks."""
    if packages is None:
        return check("reboot", "nothing asks for one")
    return check("reboot", f"asked for by {', '.join(packages.split()) or 'an update'}", "systemctl reboot")


def sandboxing(unit: str, analysis: Said, tests: Said) -> Check:
    """How exposed a unit is by systemd's own measure, and where it is too much by what.

    Args:
        unit: its name.
        analysis: what `systemd-analyze security UNIT` says.
        tests: the same as JSON, empty where this systemd has none (before 250).
    """
    name = f"sandboxing of {unit}"
    overall = re.search(r"Overall exposure level for \S+: ([0-9.]+) ([A-Z]+)", analysis.out)
    if overall is None:
        return check(name, f"not known: {analysis.problem or 'no score'}", f"systemd-analyze security {unit}")
    score, word = overall.groups()
    if word in _CONFINED:
        return check(name, f"exposure {score} {word}")
    failed = [test for test in json.loads(tests.out or "[]") if not test["set"] and test["exposure"]]
    failed.sort(key=lambda test: float(test["exposure"]), reverse=True)
    worst = ", ".join(f"{test['name']} {test['exposure']}" for test in failed[:_SHOWN])
    # An override in a drop-in is what raises it; the text itself is the role's.
    mend = f"systemctl revert {unit}, then ./runner.py converge"
    return check(name, f"exposure {score} {word}" + (f", most by {worst}" if worst else ""), mend)
