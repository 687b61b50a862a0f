"""The Systems Manager document of this project: its content, and whether AWS has just this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fleet.aws_errors import told
from fleet.errors import FleetError

NAME = "vllm-fleet-run"
_ON_HOST = Path(__file__).resolve().parent / "on_host"
_DIGEST = "^[0-9a-f]{64}$"
# Parameter, the variable that the program reads, what it is for, default, and what Systems Manager lets through: the
# patterns are the guard that no value can be more than a value in the script.
_PARAMETERS: tuple[tuple[str, str, str, str | None, str], ...] = (
    ("RunId", "FLEET_RUN_ID", "Id of the run; a host carries out each once.", None, "^[0-9a-f]{32}$"),
    ("Bucket", "FLEET_BUCKET", "Bucket of bundles and results.", "", "^[a-z0-9.-]{0,63}$"),
    ("Prefix", "FLEET_PREFIX", "What every key in it begins with.", "", "^[A-Za-z0-9/_.-]{0,200}$"),
    ("Region", "FLEET_REGION", "Region of the bucket.", "", "^[a-z0-9-]{0,30}$"),
    ("EndpointUrl", "FLEET_ENDPOINT_URL", "Endpoint of S3, for a VPC's own.", "", "^[A-Za-z0-9:/._-]{0,200}$"),
    ("Python", "FLEET_PYTHON", "Python version of the host's environment.", "", "^[0-9.]{0,8}$"),
    ("WheelsSha256", "FLEET_WHEELS", "Digest of that environment's wheels.", "0" * 64, _DIGEST),
    ("BundleSha256", "FLEET_BUNDLE", "Digest of the project's files.", "0" * 64, _DIGEST),
    ("JobSha256", "FLEET_JOB", "Digest of the job.", "0" * 64, _DIGEST),
)
# An echo proves that commands are carried out, and by which boot; it needs neither bucket nor Python.
_ECHO = (
    'if [ "{{ Job }}" = echo ]; then',
    "  read -r boot_id </proc/sys/kernel/random/boot_id",
    "  read -r uptime _ </proc/uptime",
    """  printf '{"echo": "%s", "boot_id": "%s", "uptime_s": %s}\\n' "{{ RunId }}" "$boot_id" "$uptime\"""",
    "  exit 0",
    "fi",
)


def content() -> str:
    """The document as JSON: schema 2.2, one script."""
    parameters: dict[str, dict[str, Any]] = {
        "Job": {
            "type": "String",
            "description": "run: a playbook; echo: only an answer.",
            "default": "run",
            "allowedValues": ["run", "echo"],
        },
        "ExecutionTimeout": {
            "type": "String",
            "description": "Longest run, seconds.",
            "default": "14400",
            "allowedPattern": "^[1-9][0-9]{0,5}$",
        },
    }
    for name, _, description, default, pattern in _PARAMETERS:
        parameters[name] = {"type": "String", "description": description, "allowedPattern": pattern}
        if default is not None:
            parameters[name]["default"] = default
    exports = [f"export {variable}='{{{{ {name} }}}}'" for name, variable, *_ in _PARAMETERS]
    script = ["set -eu", *_ECHO, *exports, "exec python3 - <<'PROGRAM'", *program().splitlines(), "PROGRAM"]
    step = {"timeoutSeconds": "{{ ExecutionTimeout }}", "runCommand": script}
    return json.dumps(
        {
            "schemaVersion": "2.2",
            "description": "One run of a vllm-fleet playbook on this host, or an echo.",
            "parameters": parameters,
            "mainSteps": [{"action": "aws:runShellScript", "name": "run", "inputs": step}],
        },
        indent=1,
    )


def program() -> str:
    """instance_store.py and bootstrap.py as one: the second's import of the first is left out."""
    first, second = ((_ON_HOST / name).read_text() for name in ("instance_store.py", "bootstrap.py"))
    own = [
        line
        for line in second.splitlines()
        if line.partition(" import ")[0] not in ("from instance_store", "from __future__")
    ]
    return first + "\n".join(own) + "\n"


def install(ssm: Any, region: str) -> str:
    """Makes it the document's default version, a new one where no earlier is the same.

    Returns `created`, `updated` or `unchanged`.
    """
    with told(f"{region} document {NAME}", who="ssm"):
        version, same = _found(ssm)
        if same:
            return "unchanged"
        if not version:
            ssm.create_document(
                Content=content(), Name=NAME, DocumentType="Command", DocumentFormat="JSON",
                TargetType="/AWS::EC2::Instance", Tags=[{"Key": "vllm-fleet", "Value": "document"}],
            )  # fmt: skip
            return "created"
        try:
            made = ssm.update_document(Content=content(), Name=NAME, DocumentVersion="$LATEST", DocumentFormat="JSON")
            version = made["DocumentDescription"]["DocumentVersion"]
        except ssm.exceptions.DuplicateDocumentContent:
            # Back to an earlier version of this project.
            pages = ssm.get_paginator("list_document_versions").paginate(Name=NAME)
            versions = [found["DocumentVersion"] for page in pages for found in page["DocumentVersions"]]
            version = next(found for found in versions if _found(ssm, found)[1])
        ssm.update_document_default_version(Name=NAME, DocumentVersion=version)
        return "updated"


def installed(ssm: Any, region: str) -> str:
    """The version of the document that AWS has; raises FleetError where there is none, or another project's version."""
    with told(f"{region} document {NAME}"):
        version, same = _found(ssm)
    if not same:
        what = "is of another version of this project" if version else "is not in this region"
        raise FleetError(
            f"the document {NAME} {what}",
            where=f"Systems Manager in {region}",
            mend=f"./runner.py ssm install --region {region}",
        )
    return version


def _found(ssm: Any, version: str = "") -> tuple[str, bool]:
    """The version that is there, the default one unless named (empty for none), and whether it is this project's."""
    wanted = {"DocumentVersion": version} if version else {}
    try:
        found = ssm.get_document(Name=NAME, DocumentFormat="JSON", **wanted)
    except ssm.exceptions.InvalidDocument:
        return "", False
    return str(found["DocumentVersion"]), json.loads(found["Content"]) == json.loads(content())
