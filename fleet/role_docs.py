"""The variable tables of the roles' READMEs, made from each role's argument specification.

`python -m fleet.role_docs` writes them; a contract test fails where one is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from fleet.paths import PROJECT

BEGIN, END = "<!-- variables -->", "<!-- /variables -->"


def spec_of(role: Path) -> dict[str, dict[str, Any]]:
    """Public variables of a role's main entry point, by name."""
    spec = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text())
    options: dict[str, dict[str, Any]] = spec["argument_specs"]["main"]["options"]
    return options


def defaults_of(role: Path) -> dict[str, Any]:
    """A role's defaults, by name."""
    found: dict[str, Any] = yaml.safe_load((role / "defaults" / "main.yml").read_text())
    return found


def table(role: Path) -> str:
    """The table between the markers."""
    defaults = defaults_of(role)
    lines = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for name, option in spec_of(role).items():
        shown = json.dumps(defaults[name]).replace("|", "\\|")
        lines.append(f"| `{name}` | {option['type']} | `{shown}` | {option['description']} |")
    return "\n".join(lines)


def rendered(role: Path) -> str:
    """The README with its table up to date."""
    text = (role / "README.md").read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n{table(role)}\n{END}{tail}"


def main() -> None:
    """Writes every README."""
    for role in sorted((PROJECT / "roles").iterdir()):
        (role / "README.md").write_text(rendered(role))


if __name__ == "__main__":
    main()
