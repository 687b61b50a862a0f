"""One host goes first, and the others keep what they have where it fails; the runs themselves are doubles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from fleet import rotate_cli, running
from fleet.collector import Collector
from fleet.errors import ExitCode, FleetError
from fleet.events import HostTally
from fleet.execution import Finished
from fleet.paths import PROJECT
from fleet.requests import Request

HOSTS = ("a", "b", "c", "d")


class Runs:
    """Runs that end as they are told to, host by host; `limits` are what they were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits: list[str | None] = []
        self.bad: dict[str, str] = {}
        monkeypatch.setattr(running, "shown", self.shown)

    def shown(self, request: Request, _console: Console) -> running.Ran:
        self.limits.append(request.limit)
        names = (request.limit or "").split(",")
        hosts = {name: HostTally(ok=3, failed=int(name in self.bad), message=self.bad.get(name, "")) for name in names}
        collected = Collector()
        for name in names:
            collected.status[name] = {"serving": {"token": "current", "active": True}}
        collected.restarted = {name for name in names if name not in self.bad}
        code = ExitCode.HOST_FAILED if set(names) & set(self.bad) else ExitCode.OK
        return running.Ran(request, Finished(code, hosts), collected, Path("/log"), 1.0)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    file = tmp_path / "hosts.yml"
    file.write_text(json.dumps({"vllm": {"hosts": dict.fromkeys(HOSTS)}, "builder": {"hosts": {"arm": None}}}))
    return file


def rotate(inventory: Path, limit: str | None = None, *, as_json: bool = False) -> int:
    """The command's exit code."""
    with pytest.raises(typer.Exit) as ended:
        rotate_cli.rotate([inventory], limit, as_json=as_json)
    return ended.value.exit_code


def test_one_goes_first_and_then_the_others(runs: Runs, inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rotate(inventory, as_json=True) == 0
    assert runs.limits == ["a", "b,c,d"]
    said = json.loads(capsys.readouterr().out)
    assert said["left"] == []
    assert {name: host["restarted"] for name, host in said["hosts"].items()} == dict.fromkeys(HOSTS, True)


def test_where_the_first_fails_the_others_are_not_begun(
    runs: Runs, inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.bad = {"a": "secrets_fetch: secret s is no JSON\n  where: s\n  mend:  store it"}
    assert rotate(inventory) == 1
    assert runs.limits == ["a"]
    out, err = capsys.readouterr()
    assert out.count("keeps what it has") == 3
    assert "secret s is no JSON" in out
    assert "4 of 4 hosts left: a, b, c, d" in err
    assert f"./runner.py rotate -i {inventory} --limit a,b,c,d" in err


def test_a_later_failure_leaves_that_host_alone(
    runs: Runs, inventory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.bad = {"c": "vllm_service: failed its gate\n  where: c\n  mend:  look"}
    assert rotate(inventory, as_json=True) == 1
    assert runs.limits == ["a", "b,c,d"]
    assert json.loads(capsys.readouterr().out)["left"] == ["c"]


def test_a_limit_is_within_the_servers_and_one_that_leaves_none_is_bad_input(runs: Runs, inventory: Path) -> None:
    assert rotate(inventory, "c,b") == 0
    assert runs.limits == ["b", "c"]
    with pytest.raises(FleetError, match="no host of the group vllm is left by --limit arm") as refused:
        rotate_cli.rotate([inventory], "arm")
    assert refused.value.code is ExitCode.BAD_INPUT
    assert runs.limits == ["b", "c"]


def test_an_unnamed_secret_is_refused_by_the_first_host(inventory: Path, tmp_path: Path) -> None:
    host = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory.write_text(json.dumps({"vllm": {"hosts": {"a": host}}}))
    words = [sys.executable, "-m", "fleet", "rotate", "-i", str(inventory), "--json"]
    environment: dict[str, Any] = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(words, cwd=PROJECT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.BAD_INPUT, done.stderr
    message = json.loads(done.stdout)["hosts"]["a"]["message"]
    assert message.startswith(
        "secrets_fetch: secrets_fetch_secret_id is empty, and a secret's name is wanted\n  where: "
    )
