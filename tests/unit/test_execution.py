"""The adapter: typed events, exit codes, a watchdog that ends a hung run, and nothing left behind."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from ansible_runner.interface import init_runner
from rich.console import Console

from fleet import running
from fleet.errors import ExitCode, FleetError
from fleet.events import Event, HostResult, HostStarted, Outcome, TaskStarted
from fleet.execution import arguments, execute
from fleet.paths import PROJECT, state_dir
from fleet.requests import Request
from fleet.runlog import RunLog


def request(folder: Path, tasks: str, **changes: object) -> Request:
    """A request for one local host with these tasks."""
    playbook = folder / "play.yml"
    playbook.write_text(
        "- hosts: vllm\n  gather_facts: false\n"
        '  environment: {VLLM_FLEET_RUN: "{{ vllm_fleet_run }}"}\n  tasks:\n' + tasks
    )
    inventory = folder / "hosts.yml"
    inventory.write_text(
        f"vllm: {{hosts: {{here: {{ansible_connection: local, ansible_python_interpreter: {sys.executable}}}}}}}\n"
    )
    return Request(playbook=str(playbook), inventories=(inventory,), **changes)  # type: ignore[arg-type]


def processes(pattern: str) -> list[str]:
    """Command lines on this machine that match."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if re.search(pattern, line)]


def test_events_are_typed_and_counted(tmp_path: Path) -> None:
    events: list[Event] = []
    tasks = "  - {name: one, ansible.builtin.command: {argv: ['true']}}\n  - {name: two, ansible.builtin.ping: }\n"
    finished = execute(request(tmp_path, tasks), events.append)
    assert finished.code is ExitCode.OK
    assert (finished.hosts["here"].ok, finished.hosts["here"].changed) == (2, 1)
    assert [e.task for e in events if isinstance(e, TaskStarted)] == ["one", "two"]
    assert [(e.host, e.task) for e in events if isinstance(e, HostStarted)] == [("here", "one"), ("here", "two")]
    assert [e.outcome for e in events if isinstance(e, HostResult)] == [Outcome.CHANGED, Outcome.OK]
    assert list((state_dir() / "runs").glob(f"{os.getpid()}-*")) == []


@pytest.mark.parametrize(
    ("tasks", "code"),
    [
        ("  - {name: no, ansible.builtin.fail: {msg: no}}\n", ExitCode.HOST_FAILED),
        ("  - {name: no, ansible.builtin.nonsense: }\n", ExitCode.BAD_INPUT),
    ],
)
def test_failures_have_their_code(tmp_path: Path, tasks: str, code: ExitCode) -> None:
    assert execute(request(tmp_path, tasks), lambda _: None).code is code


def test_options_reach_ansible(tmp_path: Path) -> None:
    asked = request(
        tmp_path, "", limit="a,b", tags="rust,swapfile_verify", forks=3, verbosity=2, flags=("--check", "--diff")
    )
    words = init_runner(**arguments(asked, tmp_path)).config.command
    options = dict(itertools.pairwise(words))
    assert Path(words[0]).name == "ansible-playbook"
    assert options["--limit"] == "a,b"
    assert options["--tags"] == "rust,swapfile_verify"
    assert options["--forks"] == "3"
    assert {"-vv", "--check", "--diff"} <= set(words)
    other = tmp_path / "other"
    other.mkdir()
    plain = init_runner(**arguments(request(tmp_path, ""), other)).config.command
    assert not {"--limit", "--tags", "--check", "--diff", "-v"} & set(plain)


def test_limit_tags_and_check_act(tmp_path: Path) -> None:
    tasks = (
        "  - {name: one, tags: [a], ansible.builtin.command: {argv: ['true']}}\n"
        "  - {name: two, tags: [b], ansible.builtin.copy: {content: x, dest: "
        + str(tmp_path / "written")
        + ", mode: '0644'}}\n"
    )
    done = execute(request(tmp_path, tasks, tags="b", flags=("--check", "--diff")), lambda _: None)
    assert (done.hosts["here"].ok, done.hosts["here"].changed) == (1, 1)
    assert not (tmp_path / "written").exists()
    done = execute(request(tmp_path, tasks, limit="elsewhere"), lambda _: None)
    assert done.code is ExitCode.BAD_INPUT
    assert "elsewhere" in done.said


def test_no_file_of_a_run_holds_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Killed with -9 the run would leave them behind.
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY")
    held: list[str] = []

    def look(_: Event) -> None:
        for path in (state_dir() / "runs").rglob("*"):
            if path.is_file() and b"wJalrXUtnFEMI" in path.read_bytes():
                held.append(str(path))

    assert execute(request(tmp_path, "  - {name: two, ansible.builtin.ping: }\n"), look).code is ExitCode.OK
    assert held == []


def test_a_silent_run_is_ended(tmp_path: Path) -> None:
    tasks = "  - {name: hang, ansible.builtin.command: {argv: [sleep, '611']}}\n"
    hung = request(tmp_path, tasks, stall_s=4)
    began = time.monotonic()
    with pytest.raises(FleetError, match="no event came for 4 s") as error:
        execute(hung, lambda _: None)
    assert error.value.code is ExitCode.STALLED
    assert (error.value.where, error.value.mend) == ("here (hang)", hung.again())
    assert time.monotonic() - began < 60
    # What the task left on the host is ended by the stopping request, and only that.
    execute(hung.stopping(), lambda _: None)
    assert processes("^sleep 611 $") == []
    assert list((state_dir() / "runs").glob(f"{os.getpid()}-*")) == []


def test_a_task_that_is_polled_for_is_no_stall_and_has_the_runs_mark(tmp_path: Path) -> None:
    command = "sleep 7; echo mark=$VLLM_FLEET_RUN"
    polled = request(
        tmp_path, f"  - {{name: long, ansible.builtin.shell: '{command}', async: 60, poll: 1}}\n", stall_s=5
    )
    events: list[Event] = []
    assert execute(polled, events.append).code is ExitCode.OK
    [result] = [event.result for event in events if isinstance(event, HostResult)]
    assert result["stdout"] == f"mark={polled.run_id}"


def test_trouble_with_an_event_ends_the_run_and_is_told(tmp_path: Path) -> None:
    def full(event: Event) -> None:
        if isinstance(event, HostStarted):
            raise OSError(errno.ENOSPC, "No space left on device")

    tasks = "  - {name: hang, ansible.builtin.command: {argv: [sleep, '613']}}\n"
    began = time.monotonic()
    broken = request(tmp_path, tasks)
    with pytest.raises(OSError, match="No space left"):
        execute(broken, full)
    assert time.monotonic() - began < 60
    execute(broken.stopping(), lambda _: None)
    assert list((state_dir() / "runs").glob(f"{os.getpid()}-*")) == []


def test_what_breaks_a_run_off_ends_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = "  - {name: hang, ansible.builtin.command: {argv: [sleep, '617']}}\n"
    monkeypatch.setattr(RunLog, "__call__", lambda _log, event: full_disk() if isinstance(event, HostStarted) else None)
    with pytest.raises(OSError, match="No space left"):
        running.shown(request(tmp_path, tasks), Console(file=io.StringIO()))
    # Neither the task nor the Ansible that waited for it.
    assert processes("^sleep 617 $") == processes(f"ansible-playbook.*{tmp_path}") == []


def full_disk() -> None:
    """What a full disk says, somewhat after the task began."""
    time.sleep(3)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_closed_terminal_is_an_interrupt_and_nohup_stays_nohup() -> None:
    program = (
        "import signal\nfrom fleet.execution import on_ending_signals\n"
        "print([int(number) for number in on_ending_signals(lambda *_: None)])"
    )
    for before, expected in (([], "[2, 15, 1]\n"), (["nohup"], "[2, 15]\n")):
        done = subprocess.run(
            [*before, sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True
        )
        assert done.stdout == expected


def test_a_run_over_its_limit_is_ended(tmp_path: Path) -> None:
    tasks = "  - {name: again, ansible.builtin.command: {argv: [sleep, '1']}, until: false, retries: 60, delay: 0}\n"
    with pytest.raises(FleetError, match="longer than its limit of 5 s") as error:
        execute(request(tmp_path, tasks, limit_s=5, stall_s=60), lambda _: None)
    assert error.value.code is ExitCode.STALLED
    # Else the worker would go on trying for all its times.
    assert processes(f"ansible-playbook.*{tmp_path}") == []


def test_what_a_killed_runner_left_is_swept(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    left = state_dir() / "runs" / f"{dead.pid}-left"
    left.mkdir(parents=True)
    (left / "env").write_text("something")
    execute(request(tmp_path, "  - {name: one, ansible.builtin.ping: }\n"), lambda _: None)
    assert not left.exists()


@pytest.mark.parametrize("name", ["site", "status", "verify"])
def test_the_playbooks_mark_their_processes(name: str) -> None:
    plays = yaml.safe_load((PROJECT / "playbooks" / f"{name}.yml").read_text())
    for play in (play for play in plays if "hosts" in play):
        assert play["environment"] == {"VLLM_FLEET_RUN": "{{ vllm_fleet_run | default('none') }}"}


def test_a_wrong_type_is_bad_input_in_the_house_form(tmp_path: Path) -> None:
    tasks = "  - {name: role, ansible.builtin.import_role: {name: swapfile}, vars: {swapfile_size_mib: lots}}\n"
    finished = execute(request(tmp_path, tasks), lambda _: None)
    assert finished.code is ExitCode.BAD_INPUT
    message = finished.hosts["here"].message
    assert message.startswith("swapfile: argument 'swapfile_size_mib' is of type"), message
    assert "\n  where: here " in message
    assert "\n  mend:  " in message
