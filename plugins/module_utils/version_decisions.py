"""Which version each wanted release comes to on a host, and what is known of it, in words. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ansible.module_utils.host_plan import Plan, Wishes
from ansible.module_utils.published_builds import ARCH_LISTS, listed
from ansible.module_utils.version_choice import (
    Candidate,
    Facts,
    choose,
    grouped,
    is_prerelease,
    judgement,
    rejection,
    told,
    unproven,
    version_key,
)

NEWEST = "newest"
_HELD = ("tag", "commit", "sha256", "lock")
_WHERE = "vllm_source_build_releases"


def facts_of(
    plan: Plan, host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes, wanted: Mapping[str, Any]
) -> Facts:
    """What of host, model and entry rules versions out."""
    published = ARCH_LISTS.get(plan.architecture, {}).get("vllm", ())
    return Facts(
        method=plan.method if wanted.get("method") in (None, "auto") else wanted["method"],
        target_device=wanted.get("target_device") or "cuda",
        architecture=plan.architecture,
        capability=plan.capability,
        model_type=model["model_type"],
        mixed_heads=len({head for head, *_ in model["attention"]}) > 1,
        float16=wishes.argument("--dtype") in ("float16", "half"),
        torch=host["torch"]["version"],
        gcc=wishes.gcc,
        rust="" if wanted.get("rust_frontend") is False else wishes.rust_toolchain,
        python=host["compiler"]["python"],
        unpublished=not listed(published, plan.capability),
    )


def decide_versions(plan: Plan, host: Mapping[str, Any], model: Mapping[str, Any], wishes: Wishes) -> None:
    """The version of every wanted release: as asked for, or the newest that nothing rules out (`plan.versions`)."""
    refused = set()
    for wanted in wishes.releases:
        facts = facts_of(plan, host, model, wishes, wanted)
        version = wanted["version"]
        if version == NEWEST:
            version = plan.versions[wanted["name"]] = _newest(plan, wishes, wanted, facts)
        else:
            found = rejection(version, facts)
            if found and (version, found.id) not in refused:
                refused.add((version, found.id))
                _refuse(plan, version, found.id, found.why, found.floor)
            _there(plan, wishes, wanted, facts)
        if version and facts.compiles and facts.torch and judgement(version, facts.torch).verdict != "refused":
            verdict, _, words = told(version, facts.torch).partition(": ")
            plan.decide(f"torch of {wanted['name']}", verdict, words)


def _refuse(plan: Plan, version: str, constraint: str, why: str, floor: str) -> None:
    if constraint == "float16":
        plan.refuse(
            f"--dtype float16 is asked for, and {why}",
            "vllm_service_arguments",
            f"set --dtype {'float32' if plan.below_8 else 'auto'} in vllm_service_arguments",
        )
    elif floor:
        plan.refuse(
            f"vLLM {version} is asked for, and {floor} or newer is wanted: {why}",
            _WHERE,
            f"set a version of {floor} or newer in {_WHERE}, or newest",
        )
    else:
        plan.refuse(
            f"vLLM {version} is asked for, and {why}", _WHERE, f"set version: {NEWEST} in that entry of {_WHERE}"
        )


def _newest(plan: Plan, wishes: Wishes, wanted: Mapping[str, Any], facts: Facts) -> str:
    name, place = wanted["name"], f"{_WHERE}: {wanted['name']}"
    held = [key for key in _HELD if wanted.get(key)]
    if held:
        plan.refuse(
            f"{held[0]} holds the release to one source, and version {NEWEST} is asked for",
            place,
            f"take {held[0]} out of that entry, or set its version",
        )
        return ""
    origin = wanted.get("repository") or f"the index, {wanted['distribution']}"
    candidates, silence = wishes.candidates.get(name, ((), "it was not asked"))
    before: str = wishes.versions_before.get(name, "")
    if silence:
        if before:
            plan.decide(
                f"version of {name}", before, f"chosen at an earlier run; {origin} does not answer now: {silence}"
            )
        elif not wishes.index_silence[1]:
            plan.refuse(
                f"version {NEWEST} is asked for, and what there is cannot be read from {origin}: {silence}",
                place,
                "mend that (pip config list; git ls-remote), or set a version in that entry",
            )
        return before
    choice = choose(candidates, facts, prereleases=bool(wanted.get("prereleases")))
    if not choice.version:
        what = grouped(choice.rejected) or "it has none at all"
        plan.refuse(
            f"no version of {wanted['distribution']} is left of {len(candidates)} from {origin}: {what}",
            place,
            "change what rules them out, or take the source from a repository whose tags have a newer one",
        )
        return ""
    for found in choice.rejected:
        plan.decide(f"version of {name}", f"not {found.version}", str(found))
    words = f"the newest of {len(candidates)} from {origin} that nothing rules out"
    early = "a prerelease, since no final version is left" if is_prerelease(choice.version) else ""
    if wanted.get("prereleases"):
        early = ""
    plan.decide(f"version of {name}", choice.version, "; ".join(filter(None, (words, early, unproven(choice.version)))))
    return str(choice.version)


def _there(plan: Plan, wishes: Wishes, wanted: Mapping[str, Any], facts: Facts) -> None:
    """A version that the index or the repository does not have; where neither was asked, the fetch tells it."""
    candidates, silence = wishes.candidates.get(wanted["name"], ((), "it was not asked"))
    version, distribution = wanted["version"], wanted["distribution"]
    if silence or wanted.get("tag") or not version_key(version):
        return
    mine = [found for found in candidates if found.sdist or facts.method != "source"]
    mine = [found for found in mine if found.wheel or facts.method == "source"]
    if any(version_key(found.version) == version_key(version) for found in mine):
        return
    origin = wanted.get("repository") or "the package index"
    kind = "tag" if wanted.get("repository") else "sdist" if facts.method == "source" else "wheel for this host"
    near = nearest(version, mine)
    plan.refuse(
        f"{origin} has no {kind} of {distribution} {version}; it has {', '.join(near) or 'none at all'}",
        f"{_WHERE}: {wanted['name']}",
        f'set version: "{near[-1]}" in that entry' if near else "pip config list; set an index that has it",
    )


def nearest(version: str, candidates: Sequence[Candidate]) -> list[str]:
    """The version next below and above a missing one, and the newest of all, oldest first."""
    ordered = sorted({found.version for found in candidates if version_key(found.version)}, key=version_key)
    below = [found for found in ordered if version_key(found) < version_key(version)]
    above = [found for found in ordered if version_key(found) > version_key(version)]
    return list(dict.fromkeys([*below[-1:], *above[:1], *ordered[-1:]]))
