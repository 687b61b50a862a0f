"""Every message a user can meet has the house form; every role's interface agrees with itself."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet import role_docs
from fleet.paths import PROJECT

ROLES = sorted((PROJECT / "roles").iterdir())
TASK_FILES = sorted(PROJECT.glob("roles/*/tasks/*.yml"))
MODULES = sorted(PROJECT.glob("plugins/modules/*.py"))
HOUSE = re.compile(r"^[a-z_]+: .+\n  where: .+\n  mend:  .+", re.S)


def fail_messages(node: Any) -> list[str]:
    """Every fail_msg and every fail's msg below a piece of YAML."""
    found: list[str] = []
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "fail_msg":
                found.append(value)
            elif key == "ansible.builtin.fail":
                found.append(value["msg"])
            else:
                found += fail_messages(value)
    elif isinstance(node, list):
        for item in node:
            found += fail_messages(item)
    return found


def asserts(node: Any) -> list[dict[str, Any]]:
    """Every assert task below a piece of YAML."""
    if isinstance(node, dict):
        here = [node["ansible.builtin.assert"]] if "ansible.builtin.assert" in node else []
        return here + [a for value in node.values() for a in asserts(value)]
    return [a for item in node for a in asserts(item)] if isinstance(node, list) else []


@pytest.mark.parametrize("path", TASK_FILES, ids=lambda p: f"{p.parent.parent.name}/{p.name}")
def test_task_failures_have_the_house_form(path: Path) -> None:
    tasks = yaml.safe_load(path.read_text())
    assert all("fail_msg" in found for found in asserts(tasks))
    for text in fail_messages(tasks):
        assert HOUSE.match(text), text
        assert text.startswith(f"{path.parent.parent.name}: "), text


def literal(node: ast.expr) -> str:
    """The text of a string expression, with {} for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)  # type: ignore[misc]
    return "{}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_module_failures_have_the_house_form(path: Path) -> None:
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    fails = [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == "fail_json"]
    for call in fails:
        message = next(k.value for k in call.keywords if k.arg == "msg")
        text = literal(message)
        computed = isinstance(message, ast.Call)  # house_form(...) and the fetcher's own three lines
        assert computed or ("\n  where: " in text and "\n  mend:  " in text), ast.unparse(call)[:200]


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_specification_agrees_with_defaults(role: Path) -> None:
    options, defaults = role_docs.spec_of(role), role_docs.defaults_of(role)
    assert set(options) == set(defaults)
    for name, option in options.items():
        assert name.startswith(f"{role.name}_") or name == role.name, name
        assert option["description"], name
        templated = "{{" in str(defaults[name])
        # A templated default in a specification is evaluated before the facts that it reads are there.
        assert ("default" in option) != templated, name
        if not templated:
            assert option["default"] == defaults[name], name
            kind = {"path": str, "str": str, "int": int, "bool": bool, "list": list, "dict": dict}[option["type"]]
            assert isinstance(defaults[name], kind), name


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_every_entry_point_has_a_specification(role: Path) -> None:
    spec = yaml.safe_load((role / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    assert {"main", "verify"} <= set(spec)
    assert (role / "tasks" / "verify.yml").is_file()


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_readme_table_is_up_to_date(role: Path) -> None:
    assert (role / "README.md").read_text() == role_docs.rendered(role), "run: python -m fleet.role_docs"


@pytest.mark.parametrize("role", ROLES, ids=lambda p: p.name)
def test_each_default_has_its_comment(role: Path) -> None:
    lines = (role / "defaults" / "main.yml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"[a-z]", line):
            assert lines[number - 1].startswith("# "), line


def test_nothing_on_the_host_knows_that_it_is_tested() -> None:
    word = re.compile(r"\b(molecule|pytest|testinfra|sandbox|moto|stand-?in)\b", re.I)
    hits = [
        f"{path.relative_to(PROJECT)}: {line}"
        for top in ("roles", "plugins")
        for path in sorted((PROJECT / top).rglob("*"))
        if path.is_file() and path.suffix in (".py", ".yml", ".j2", ".md")
        for line in path.read_text().splitlines()
        # systemd's own word for confining a service is sandboxing.
        if word.search(line.replace("sandboxed", ""))
    ]
    assert hits == []


# What they find is read by the roles that were chosen, whichever these are.
_READ_BY_OTHERS = ("preflight", "vllm_source_build")


def test_tags_are_the_roles_own() -> None:
    for path in TASK_FILES:
        role = path.parent.parent.name
        for task in yaml.safe_load(path.read_text()):
            for tag in task.get("tags", []):
                own = tag == role or tag.startswith(f"{role}_")
                assert own or (tag == "always" and role in _READ_BY_OTHERS), (path, tag)
