"""What an instance's role may do beyond docs/policies/instance.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fleet.paths import PROJECT

_DOCUMENTED = PROJECT / "docs" / "policies" / "instance.json"
# AWS's own, for the agent.
_AGENTS_OWN = re.compile(r"arn:aws[a-z-]*:iam::aws:policy/AmazonSSMManagedInstanceCore")
# Beside the documented: the one secret that the host reads, and the key that it may be encrypted with.
_SECRET = re.compile(r"arn:aws[a-z-]*:secretsmanager:[a-z0-9-]+:\d{12}:secret:[^*?]+(-\?{6}|-\*|\*)?")
_KEY = re.compile(r"arn:aws[a-z-]*:kms:[a-z0-9-]+:\d{12}:key/[^*?]+")


def wider(iam: Any, role: str) -> list[str]:
    """What the role's policies allow and the documented ones do not, as `action on resource`, sorted."""
    rights = documented()
    found = set()
    for policy in _policies(iam, role):
        for statement in _listed(policy["Statement"]):
            if statement["Effect"] == "Allow":
                found |= set(_beyond(statement, rights))
    return sorted(found)


def documented() -> dict[str, list[re.Pattern[str]]]:
    """Resources by action, by IAM's reading: what stands for a bucket or an account is one name, `*` is anything."""
    rights: dict[str, list[re.Pattern[str]]] = {
        "secretsmanager:getsecretvalue": [_SECRET],
        "kms:decrypt": [_KEY],
    }
    for statement in json.loads(_DOCUMENTED.read_text())["Statement"]:
        for action in _listed(statement["Action"]):
            rights.setdefault(action.lower(), []).extend(map(_pattern, _listed(statement["Resource"])))
    return rights


def _pattern(resource: str) -> re.Pattern[str]:
    name = re.escape(resource).replace("BUCKET", "[a-z0-9.-]+").replace("ACCOUNT", r"\d{12}").replace(r"\*", ".*")
    return re.compile(name.replace("arn:aws:", "arn:aws[a-z-]*:"))


def _beyond(statement: Mapping[str, Any], rights: Mapping[str, list[re.Pattern[str]]]) -> Iterator[str]:
    if "Action" not in statement or "Resource" not in statement:
        # Everything but what is named.
        left = next((name for name in ("NotAction", "NotResource") if name in statement), "no resource")
        yield f"{', '.join(_listed(statement.get('Action', '*')))} by {left}"
        return
    for action in _listed(statement["Action"]):
        for resource in _listed(statement["Resource"]):
            # A granted pattern is no wider where the documented one takes its very text.
            if not any(one.fullmatch(resource) for one in rights.get(action.lower(), [])):
                yield f"{action} on {resource}"


def _policies(iam: Any, role: str) -> Iterator[dict[str, Any]]:
    """The role's own policies and those attached to it, but for the agent's."""
    for page in iam.get_paginator("list_role_policies").paginate(RoleName=role):
        for name in page["PolicyNames"]:
            yield iam.get_role_policy(RoleName=role, PolicyName=name)["PolicyDocument"]
    for page in iam.get_paginator("list_attached_role_policies").paginate(RoleName=role):
        for policy in page["AttachedPolicies"]:
            arn = policy["PolicyArn"]
            if not _AGENTS_OWN.fullmatch(arn):
                version = iam.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
                yield iam.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
