"""What is fetched is what was written down: installers with a changed file, and docs/supply-chain.md with the code."""

from __future__ import annotations

import ast
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import job
import pytest
import yaml
from fetch_source import Fetch

import runner
from fleet import vllm_sources
from fleet.errors import FleetError
from fleet.paths import PROJECT, cache_dir
from fleet.progress import terminal
from fleet.run_command import wheels
from fleet.steps import Durations, Steps
from plugins.modules.vllm_secret import Secret
from tests.unit.doubles import Ended, Module
from tests.unit.package_indexes import Index, wheel
from tests.unit.test_source_fetch import spec

GOOD = wheel("demo", "1.0")
PINNED = f"demo==1.0 \\\n    --hash=sha256:{hashlib.sha256(GOOD).hexdigest()}\n"
TABLE = (PROJECT / "docs" / "supply-chain.md").read_text()


def controller(folder: Path, lock: str, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """`./runner.py` makes its environment."""
    monkeypatch.setattr(runner, "PROJECT", folder)
    (folder / "requirements.txt").write_text(lock)
    try:
        runner._make_environment(folder / ".venv" / "bin" / "python")
    except FleetError as error:
        raise Refused(str(error)) from error
    finally:
        found = installed(folder)
    return found


def build_tools(folder: Path, lock: str, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A host's build makes its tools."""
    monkeypatch.setattr(job, "LIB", folder)
    (folder / "tools-requirements.txt").write_text(lock)
    own = {name: os.environ[name] for name in ("PIP_CONFIG_FILE", "PIP_INDEX_URL")}
    monkeypatch.setattr(Fetch, "environment", lambda self: {**job.Job.environment(self), **own})
    asked = Fetch(spec(folder, {"key": "vllm", "kind": "sdist"}))
    try:
        asked.make_tools()
    except job.JobError as error:
        assert not (folder / "tools" / "requirements.stamp").exists()
        raise Refused(f"build: {error}\n  where: {error.where}\n  mend:  {error.mend}") from error
    return installed(folder)


def secret_fetcher(folder: Path, lock: str, _: pytest.MonkeyPatch) -> list[Path]:
    """A host makes the environment that fetches the token."""
    fetcher = Secret(Module({"home": str(folder / "secrets"), "requirements": lock}))
    try:
        fetcher.make_environment(folder / "secrets" / "requirements.stamp")
    except Ended as error:
        assert not (folder / "secrets" / "requirements.stamp").exists()
        raise Refused(str(error)) from error
    return installed(folder)


def host_wheels(folder: Path, lock: str, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The controller packs wheels for hosts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    (folder / "lock.txt").write_text(lock)
    try:
        packed = wheels.wheels("aarch64", "3.12", folder / "lock.txt")
    except FleetError as error:
        assert list((cache_dir() / "host-wheels").glob("*.tar")) == []
        raise Refused(str(error)) from error
    assert GOOD in packed.content
    return [folder]


def index_client(folder: Path, lock: str, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The controller makes the environment that fetches sources."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(vllm_sources, "_FILES", folder)
    (folder / "tools-requirements.txt").write_text(lock)
    try:
        vllm_sources._index_client(Steps(terminal(stderr=True), Durations(), "test"))
    except FleetError as error:
        assert [path.name for path in (cache_dir() / "tools").iterdir()] == ["lock"]
        raise Refused(str(error)) from error
    return installed(folder)


class Refused(Exception):
    """An installer said no, in these words."""


def installed(folder: Path) -> list[Path]:
    """Where below the folder the package is."""
    return list(folder.glob("**/site-packages/demo.py"))


def flipped() -> bytes:
    """One bit of the package's own code, stored without compression; the index tells the digest of what it gives."""
    content = bytearray(GOOD)
    content[GOOD.index(b"version = '1.0'")] ^= 1
    return bytes(content)


Install = Callable[[Path, str, pytest.MonkeyPatch], list[Path]]
INSTALLERS: list[Install] = [controller, build_tools, secret_fetcher, host_wheels, index_client]


@pytest.mark.parametrize("install", INSTALLERS)
def test_a_locked_package_is_taken_as_it_is_and_refused_changed(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {"good": (GOOD, PINNED), "changed": (flipped(), PINNED), "unlocked": (GOOD, "demo==1.0\n")}
    for case, (content, lock) in cases.items():
        Index(tmp_path / f"index-{case}", monkeypatch).add("demo", "demo-1.0-py3-none-any.whl", content)
        folder = tmp_path / case
        folder.mkdir()
        if case == "good":
            assert install(folder, lock, monkeypatch)
            continue
        with pytest.raises(Refused) as caught:
            install(folder, lock, monkeypatch)
        assert "\n  where: " in str(caught.value) and "\n  mend:  " in str(caught.value)
        assert installed(folder) == []


LOCKS = sorted({*PROJECT.glob("**/*requirements.txt"), *PROJECT.glob("roles/*/files/locks/*.txt")})
SOURCES = [
    PROJECT / "runner.py",
    *sorted(path for top in ("roles", "plugins", "fleet") for path in (PROJECT / top).rglob("*.py")),
]
# Calls that bring bytes from elsewhere.
FETCHES = {"urlopen", "urlretrieve", "get_object", "download_file", "download_fileobj", "download"}


@pytest.mark.parametrize("path", [path for path in LOCKS if ".venv" not in path.parts], ids=lambda path: path.name)
def test_every_line_of_a_lock_has_a_version_and_a_digest(path: Path) -> None:
    text = re.sub(r"\\\n\s*", "", path.read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w.-]+==[^\s;]+( ; [^#]+?)?( --hash=sha256:[0-9a-f]{64})+", line), line


def functions() -> Iterator[tuple[str, ast.AST, set[str]]]:
    """Every function with its place, such as `fleet/a.py:f`, and the texts that stand in it."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
                yield f"{path.relative_to(PROJECT)}:{node.name}", node, texts


def named(heading: str) -> set[str]:
    """Places of the code that a section of the table names."""
    section = TABLE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"`([\w/.]+\.py:\w+)`", section))


def test_pip_and_uv_install_by_hash_where_the_table_does_not_say_otherwise() -> None:
    loose = set()
    for place, _, texts in functions():
        installs = {"install", "download", "wheel"} & texts and any(re.fullmatch(r"(.*/)?(uv )?pip", t) for t in texts)
        if installs and "--require-hashes" not in texts:
            loose.add(place)
    assert loose
    assert loose - named("Not held to a digest of ours") == set()


def test_whatever_fetches_stands_in_the_table() -> None:
    found = set()
    for place, node, texts in functions():
        names = {
            n.func.attr if isinstance(n.func, ast.Attribute) else getattr(n.func, "id", "")
            for n in ast.walk(node)
            if isinstance(n, ast.Call)
        }
        if FETCHES & names or {"git", "fetch"} <= texts or {"git", "clone"} <= texts:
            found.add(place)
    assert found
    assert found - named("What is fetched") - named("Not held to a digest of ours") == set()


def test_no_task_fetches_without_a_checksum() -> None:
    def tasks(node: Any) -> Iterator[dict[str, Any]]:
        if isinstance(node, dict):
            yield node
        for value in node.values() if isinstance(node, dict) else node if isinstance(node, list) else []:
            yield from tasks(value)

    for path in [*PROJECT.glob("roles/**/*.yml"), *PROJECT.glob("playbooks/*.yml")]:
        for task in tasks(yaml.safe_load(path.read_text())):
            for name, words in task.items():
                kind = str(name).rpartition(".")[2]
                where = f"{path.relative_to(PROJECT)}: {task.get('name')}"
                if kind == "get_url":
                    assert words.get("checksum", "").startswith("sha256:"), where
                # These know no digest: get_url first, by digest.
                assert kind not in ("pip", "deb822_repository", "apt_key") or not isinstance(words, dict), where
                assert kind != "unarchive" or "://" not in str(words), where


def test_the_table_names_what_is_there() -> None:
    there = {place for place, *_ in functions()}
    for place in named("What is fetched") | named("Not held to a digest of ours"):
        assert place in there, place
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TABLE)
    assert len(tests) > 10
    for file, name in tests:
        assert f"def {name}(" in (PROJECT / file).read_text(), f"{file}::{name}"
