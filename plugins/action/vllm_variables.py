"""The variables of one host against the roles' specifications, on the controller, before any host is touched."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleTemplateError, AnsibleUndefinedVariable
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

_ROLES = Path(__file__).resolve().parents[2] / "roles"


@dataclass(frozen=True, slots=True)
class Wrong:
    """One variable, what is wrong with it, and what mends it."""

    name: str
    what: str
    mend: str


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core has no types
    """Fails where a variable with a role's prefix is no variable of that role, or has a value of a wrong type.

    A value that takes what a role finds on its way cannot be read yet and is left to that role's own validation.
    """

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Reads every variable of the host once."""
        super().run(tmp, task_vars)
        given = task_vars or {}
        known = _specifications()
        wrong = [*unknown_names(given, known), *self._wrong_values(given, known)]
        if not wrong:
            return {"changed": False}
        return {
            "failed": True,
            "argument_errors": [found.what for found in wrong],
            "msg": f"variables: {'; '.join(found.what for found in wrong)}\n"
            f"  where: {given['inventory_hostname']} {', '.join(found.name for found in wrong)}\n"
            f"  mend:  {'; '.join(found.mend for found in wrong)}",
        }

    def _wrong_values(self, given: Mapping[str, Any], known: Mapping[str, dict[str, Any]]) -> Iterator[Wrong]:
        for name, option in known.items():
            try:
                values = {name: self._templar.template(given[name])} if name in given else {}
                errors = ArgumentSpecValidator({name: option}).validate(values).error_messages
            except AnsibleUndefinedVariable:
                continue
            except AnsibleTemplateError as error:
                errors = [" ".join(str(error).split())]
            if errors:
                yield Wrong(name, f"{name}: {'; '.join(errors)}", f"grep '`{name}`' roles/*/README.md")


def unknown_names(given: Iterable[str], known: Collection[str]) -> Iterator[Wrong]:
    """Names with a role's prefix that no role has."""
    prefixes = tuple(f"{path.name}_" for path in sorted(_ROLES.iterdir()) if path.is_dir())
    for name in sorted(given):
        if name.startswith(prefixes) and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            yield Wrong(
                name,
                f"no role has a variable {name!r}",
                f"rename {name} to {near[0]}" if near else f"take {name} out of the inventory",
            )


def _specifications() -> dict[str, dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}
    for path in sorted(_ROLES.glob("*/meta/argument_specs.yml")):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            known.update(entry.get("options") or {})
    return known
