#!/usr/bin/env python3
"""Reads one secret from Secrets Manager into a memory-backed file: `fetch_secret.py REQUEST.json`.

Runs as the host's own unit with the instance's role. The value goes from the reply into the file and nowhere else: not
into arguments, the environment, a log, or an error's text. A failure leaves an earlier file as it was.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any, NoReturn

import boto3
import botocore.config
import botocore.exceptions


def fail(what: str, where: str, mend: str) -> NoReturn:
    """Ends in the house form."""
    sys.stderr.write(f"secrets_fetch: {what}\n  where: {where}\n  mend:  {mend}\n")
    raise SystemExit(1)


def fetch(request: dict[str, Any]) -> tuple[bytes, str]:
    """The secret's value and its version id."""
    name = request["secret_id"]
    config = botocore.config.Config(connect_timeout=5, read_timeout=10, retries={"total_max_attempts": 3})
    client = boto3.client("secretsmanager", region_name=request["region"], config=config)
    try:
        reply = client.get_secret_value(SecretId=name)
    except botocore.exceptions.ClientError as error:
        code = error.response["Error"]["Code"]
        if code == "ResourceNotFoundException":
            fail(
                f"secret {name} is not there, and it is wanted",
                f"{request['region']} {name}",
                f"aws secretsmanager create-secret --name {name}",
            )
        if code in ("AccessDeniedException", "UnrecognizedClientException"):
            fail(
                f"secret {name} is denied to this instance's role ({code})",
                f"{request['region']} {name}",
                "grant secretsmanager:GetSecretValue on it to the instance's role",
            )
        fail(
            f"Secrets Manager answered {code}",
            f"{request['region']} {name}",
            "systemctl restart vllm-secrets",
        )
    except botocore.exceptions.NoCredentialsError:
        fail(
            "no instance role gives credentials",
            "instance metadata",
            "attach an instance profile whose role may read the secret",
        )
    except botocore.exceptions.BotoCoreError as error:
        fail(
            f"Secrets Manager did not answer: {type(error).__name__}",
            f"{request['region']} {name}",
            "check the route to Secrets Manager, then systemctl restart vllm-secrets",
        )
    if "SecretString" not in reply:
        fail(f"secret {name} is binary, and text is wanted", name, "store the token as a string")
    return value_of(reply["SecretString"], request).encode(), reply["VersionId"]


def value_of(text: str, request: dict[str, Any]) -> str:
    """The token in the secret's text; with a key, the text is JSON and the key's value is meant."""
    name, key = request["secret_id"], request["key"]
    if key:
        try:
            found = json.loads(text)
        except ValueError:
            fail(
                f"secret {name} is no JSON, and the value of {key} in it is wanted",
                name,
                'store {"' + key + '": "..."}, or set secrets_fetch_key to \'\'',
            )
        text = str(found.get(key) or "") if isinstance(found, dict) else ""
    if not text:
        fail(f"secret {name} holds nothing under {key or 'its name'}", name, "store a token that is not empty")
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text):
        fail(
            f"secret {name} holds a control character or line break",
            name,
            "store the token alone, without a line break",
        )
    return text


def main(path: str) -> int:
    """Fetches and writes; the version id lies beside the value."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Whatever switched debugging on, and for whichever logger: botocore's parsers log the reply (boto3#2292).
    logging.disable(logging.CRITICAL)
    sys.excepthook = lambda kind, _value, _trace: sys.stderr.write(f"secrets_fetch: unexpected {kind.__name__}\n")
    request = json.loads(Path(path).read_text())
    value, version = fetch(request)
    folder = Path(request["folder"])
    for name, content in ((request["file"], value), ("version", version.encode())):
        part = folder / f".{name}.part"
        part.unlink(missing_ok=True)
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        part.replace(folder / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
