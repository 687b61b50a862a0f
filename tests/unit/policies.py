"""Compares the policies in docs/policies with calls that were really made."""

from __future__ import annotations

import json
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from fleet.paths import PROJECT
from sandbox.standins.cloud import Call

# By AWS's "Actions defined by Amazon S3" a HEAD of an object is GetObject's right, and both of these are ListBucket's.
_RIGHTS = {"HeadObject": "GetObject", "HeadBucket": "ListBucket", "ListObjectsV2": "ListBucket"}


def granted(*names: str) -> dict[str, list[str]]:
    """Action to resources, over the policies of these names."""
    found: dict[str, list[str]] = {}
    for name in names:
        for statement in json.loads((PROJECT / "docs" / "policies" / f"{name}.json").read_text())["Statement"]:
            assert statement["Effect"] == "Allow"
            for action in as_list(statement["Action"]):
                found.setdefault(action, []).extend(as_list(statement["Resource"]))
    return found


def as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def used(calls: Iterable[Call]) -> set[tuple[str, str]]:
    """Action and resource of each call, as IAM would ask for them."""
    found = set()
    for call in calls:
        if call.service == "s3":
            key = f"/{call.parameters['Key']}" if call.parameters["Key"] else ""
            found.add((f"s3:{_RIGHTS.get(call.operation, call.operation)}", f"arn:aws:s3:::BUCKET{key}"))
        else:
            found.add((f"{call.service}:{call.operation}", "*"))
    return found


def compared(calls: Iterable[Call], *policies: str) -> tuple[set[str], set[str]]:
    """What is used and not granted, and what is granted and not used."""
    rights = granted(*policies)
    asked = used(calls)
    missing = {
        f"{action} {resource}"
        for action, resource in asked
        if not any(resource == "*" or fnmatchcase(resource, pattern) for pattern in rights.get(action, []))
    }
    idle = {
        f"{action} {pattern}"
        for action, patterns in rights.items()
        for pattern in patterns
        if not any(
            action == name and (resource == "*" or ":s3:" not in pattern or fnmatchcase(resource, pattern))
            for name, resource in asked
        )
    }
    return missing, idle
