"""What a user asks for: which playbook on which hosts, checked before anything starts."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from fleet.errors import FleetError
from fleet.paths import PROJECT

# In the order of playbooks/site.yml.
ROLES = (
    "preflight",
    "swapfile",
    "cuda_toolkit_sbsa",
    "rust",
    "vllm_source_build",
    "triton_patch",
    "secrets_fetch",
    "vllm_service",
)
_SECRET_NAME = re.compile(r"(?i)(^|_)(token|secret|password|passwd|api_?key|access_?key|credential)s?$")
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{16,}|A[KS]IA[0-9A-Z]{16}|-----BEGIN [A-Z ]*PRIVATE KEY")


# The local AWS's fleet, in place of an inventory.
LOCAL_AWS = Path("local-aws")


class Transport(StrEnum):
    """How hosts on EC2 are reached."""

    RUN_COMMAND = "run-command"
    SESSION = "session"


@dataclass(frozen=True, slots=True)
class Request:
    """One run of one playbook. Times in seconds."""

    playbook: str
    inventories: tuple[Path, ...]
    extra_vars: dict[str, Any] = field(default_factory=dict)
    limit: str | None = None
    tags: str | None = None
    forks: int = 20
    flags: tuple[str, ...] = ()
    verbosity: int = 0
    limit_s: int = 4 * 3600
    stall_s: int = 900
    command: str = "converge"
    # How hosts on EC2 are reached: by one command each, or by Ansible's own connection.
    transport: Transport = Transport.RUN_COMMAND
    # The command's own switches that are given, each with the variable that it sets true.
    switches: dict[str, str] = field(default_factory=dict)
    # A number or a share of the hosts; Run Command begins on no further one after more failures.
    max_errors: str = "100%"
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def stopping(self) -> Request:
        """The request that ends what this one has left running on its hosts."""
        return replace(
            self,
            playbook="playbooks/stop.yml",
            extra_vars={},
            switches={},
            tags=None,
            flags=(),
            limit_s=180,
            stall_s=180,
            command="stop",
        )

    def again(self) -> str:
        """The command line that goes on with this request."""
        words = ["./runner.py", *self.command.split()]
        words += _inventory_words(self.inventories)
        words += ["--transport", self.transport] if self.transport is not Transport.RUN_COMMAND else []
        words += ["--limit", self.limit] if self.limit else []
        words += ["--tags", self.tags] if self.tags else []
        words += [*self.flags, *self.switches]
        words += ["--forks", str(self.forks)] if self.forks != Request.__dataclass_fields__["forks"].default else []
        words += ["--max-errors", self.max_errors] if self.max_errors != "100%" else []
        for name, value in self.extra_vars.items():
            # As JSON where the bare word would be read as something else.
            same = isinstance(value, str) and yaml.safe_load(value) == value
            words += ["-e", f"{name}={value if same else json.dumps(value)}"]
        return shlex.join(words)


def _inventory_words(inventories: tuple[Path, ...]) -> list[str]:
    """The words that name these inventories on the command line."""
    if inventories == local_aws_inventories():
        return ["-i", str(LOCAL_AWS)]
    return [word for path in inventories if path != sandbox_inventory() for word in ("-i", str(path))]


def local_aws_inventories() -> tuple[Path, ...]:
    """EC2's own inventory, and what the sandbox's hosts need besides."""
    return PROJECT / "inventory" / "aws_ec2.yml", PROJECT / "inventory" / "local_aws.py"


def sandbox_inventory() -> Path:
    """The inventory of the local sandbox."""
    return PROJECT / "inventory" / "sandbox.py"


def parse_inventories(given: Sequence[Path]) -> tuple[Path, ...]:
    """Inventories that are there; none given means the sandbox's, `local-aws` the local AWS's fleet."""
    if tuple(given) == (LOCAL_AWS,):
        return local_aws_inventories()
    for path in given:
        if not path.exists():
            raise FleetError(
                "no such inventory, and a file or folder is wanted", where=f"-i {path}", mend=f"ls {path.parent}"
            )
    return tuple(path.resolve() for path in given) or (sandbox_inventory(),)


def parse_max_errors(given: str) -> str:
    """A number of hosts or a share of them; raises FleetError for anything else."""
    if not re.fullmatch(r"[0-9]+|[0-9]{1,2}%|100%", given):
        raise FleetError(
            f"{given!r} is neither a number of hosts nor a share of them", where="--max-errors", mend="--max-errors 10%"
        )
    return given


def parse_extra_vars(given: Sequence[str], known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Reads `-e name=value` words; refuses unknown names, values of the wrong type, and what looks like a secret.

    Args:
        given: the words as typed; values are read as YAML, so `3` is a number and `[a]` a list.
        known: every public variable of the roles and of the inventories, with its specification.
    """
    found: dict[str, Any] = {}
    for word in given:
        name, sign, text = word.partition("=")
        if not sign or not name.isidentifier():
            raise FleetError(
                f"{name[:40]!r} is no variable, and name=value is wanted",
                where="-e",
                mend="./runner.py converge -e swapfile_size_mib=1024",
            )
        secret = name if _SECRET_VALUE.search(text) else _named_as_secret(name, text)
        if secret:
            raise FleetError(
                f"{secret} looks like a secret, and secrets never pass through this machine",
                where=f"-e {name}",
                mend="put it in Secrets Manager and name it: -e secrets_fetch_secret_id=NAME",
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise FleetError(
                f"no role has a variable {name!r}" + (f" (nearest: {near[0]})" if near else ""),
                where=f"-e {name}",
                mend=f"-e {near[0]}=VALUE" if near else "grep '^| `' roles/*/README.md",
            )
        found[name] = _typed(name, text, known[name])
    return found


def _named_as_secret(name: str, text: str) -> str:
    """The first name that is a secret's: the variable's, or a key's or an option's (`--api-key=x`) within its value."""
    if _SECRET_NAME.search(name):
        return name
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return ""
    return next((found for found in _names_in(value) if _SECRET_NAME.search(found.replace("-", "_"))), "")


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _names_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _names_in(inner)
    elif isinstance(value, str) and value.startswith("--"):
        yield value.partition("=")[0]


def _typed(name: str, text: str, option: dict[str, Any]) -> Any:
    """The value as the role will take it, by Ansible's own rules; a template is left to the host."""
    if "{{" in text:
        return text
    try:
        checked = ArgumentSpecValidator({name: option}).validate({name: yaml.safe_load(text)})
        wrong = "; ".join(checked.error_messages)
    except yaml.YAMLError as error:
        wrong = f"no YAML: {' '.join(str(error).split())}"
    if wrong:
        raise FleetError(f"{name}: {wrong}", where=f"-e {name}", mend=f"grep '`{name}`' roles/*/README.md")
    return checked.validated_parameters[name]


def known_variables() -> dict[str, dict[str, Any]]:
    """Public variables and their specifications: every role's, and what the inventories take."""
    names = ("sandbox_model", "vllm_fleet_bucket", "vllm_fleet_endpoint_url", "vllm_fleet_python")
    known: dict[str, dict[str, Any]] = {name: {"type": "str"} for name in names}
    for spec in sorted(PROJECT.glob("roles/*/meta/argument_specs.yml")):
        for entry in yaml.safe_load(spec.read_text())["argument_specs"].values():
            known.update(entry.get("options") or {})
    return known
