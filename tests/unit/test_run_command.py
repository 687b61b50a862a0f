"""The run-command transport end to end: real boto3, bootstrap, worker and events, against the local AWS."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from fleet import execution
from fleet.errors import ExitCode, FleetError
from fleet.events import Event, HostResult, HostStarted, TaskStarted
from fleet.paths import PROJECT
from fleet.requests import Request
from fleet.run_command import commands, document, store
from fleet.run_command.following import Following
from fleet.run_command.transport import execute
from tests.unit.fleet_on_ec2 import BUCKET, SOON, Fleet, fleet
from tests.unit.local_aws import REGION

RAN = "  - {name: one, ansible.builtin.command: {argv: ['sh', '-c', 'echo ran >>{{ folder }}/ran']}}\n"
WAITS = (
    "  - {name: waits, ansible.builtin.command: {argv: ['sh', '-c', 'echo $$ >{{ folder }}/pid; exec sleep 100']}}\n"
)
FAILS = "  - {name: fails, ansible.builtin.fail: {msg: 'as asked'}}\n"


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    with fleet(tmp_path, monkeypatch) as found:
        yield found


def until(found: Callable[[], Any], seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if got := found():
            return got
        time.sleep(0.05)
    raise AssertionError(f"nothing within {seconds} s")


def put(found: Fleet) -> bytes:
    """What hosts have put to S3 by now."""
    s3 = found.aws.client("s3")
    listed = s3.list_objects_v2(Bucket=BUCKET, Prefix=f"{store.PREFIX}runs/").get("Contents", [])
    bodies = [s3.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read() for item in listed]
    return b"".join(map(gzip.decompress, bodies))


def told(found: Fleet, tasks: str = RAN, code: ExitCode = ExitCode.UNREACHABLE) -> str:
    """What the first machine's host is told to have come to."""
    finished = execute(found.request(tasks), lambda _: None, SOON)
    assert finished.code is code, finished
    message = finished.hosts[found.machines[0].machine.instance_id].message
    assert "\n  where: " in message and "\n  mend:  " in message
    return message


def meanwhile(found: Fleet, act: Callable[[], None]) -> None:
    """Acts as soon as the first machine is in its long task."""

    def wait() -> None:
        until(lambda: (found.folder / "host0" / "pid").exists())
        act()

    threading.Thread(target=wait, daemon=True).start()


def ran(found: Fleet, number: int = 0) -> int:
    path = found.folder / f"host{number}" / "ran"
    return len(path.read_text().split()) if path.exists() else 0


def on_host(found: Fleet) -> list[str]:
    """Processes of the run on the first machine."""
    state = str(found.folder / "host0" / "state").encode()
    lines = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes()
            lines += [line.decode()] if state in line else []
    return lines


def seen(events: list[Event], host: str) -> list[tuple[str, str, str]]:
    """What a host's events tell, without its name and times."""
    found = []
    for event in events:
        if isinstance(event, TaskStarted):
            continue
        if event.host == host:
            found.append((event.role, event.task, str(event.outcome) if isinstance(event, HostResult) else "began"))
    return found


def test_events_and_codes_are_those_of_a_push_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = RAN + "  - {name: two, ansible.builtin.ping: }\n  - {name: no, ansible.builtin.ping: , when: false}\n"
    with fleet(tmp_path, monkeypatch, count=2) as found:
        for more, code in (("", ExitCode.OK), (FAILS, ExitCode.HOST_FAILED)):
            request = found.request(tasks + more)
            pulled: list[Event] = []
            finished = execute(request, pulled.append, SOON)
            pushed: list[Event] = []
            local = {**request.extra_vars, "ansible_connection": "local"}
            playbook = str(found.project / request.playbook)
            push = execution.execute(
                type(request)(playbook=playbook, inventories=request.inventories, extra_vars=local), pushed.append
            )
            assert finished.code is push.code is code, (finished, push)
            assert finished.hosts == push.hosts
            for machine in found.machines:
                name = machine.machine.instance_id
                assert seen(pulled, name) == seen(pushed, name) != []
        assert [isinstance(event, HostStarted) for event in pulled].count(True) == 8
        # Two hosts begin each task, and the view is told of it once.
        assert [event for event in pulled if isinstance(event, TaskStarted)] == [
            event for event in pushed if isinstance(event, TaskStarted)
        ]


def test_what_is_marked_as_from_outside_reaches_the_host_as_its_value(one: Fleet) -> None:
    tasks = "  - {name: said, ansible.builtin.debug: {msg: '{{ instance_id }} {{ marked }}'}}\n"
    request = one.request(tasks)
    path = request.inventories[0]
    path.write_text(
        path.read_text().replace(
            '"vllm_fleet_bucket"', '"marked": {"__ansible_unsafe": "{{ no }}"}, "vllm_fleet_bucket"'
        )
    )
    events: list[Event] = []
    assert execute(request, events.append, SOON).code is ExitCode.OK
    said = [event.result["msg"] for event in events if isinstance(event, HostResult)]
    assert said == [one.machines[0].machine.instance_id + " {{ no }}"]


def test_a_host_knows_who_else_is_in_its_groups_whatever_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = RAN + "  - {name: said, ansible.builtin.debug: {msg: '{{ groups.builder }} {{ group_names }}'}}\n"
    with fleet(tmp_path, monkeypatch, count=2) as found:
        one, other = (machine.machine.instance_id for machine in found.machines)
        request = found.request(tasks, limit=f"{one[:-1]}*:!{other}")
        path = request.inventories[0]
        listed = json.loads(path.read_text())
        listed["all"]["children"]["builder"] = {"hosts": {other: None}}
        path.write_text(json.dumps(listed))
        events: list[Event] = []
        assert execute(request, events.append, SOON).code is ExitCode.OK
        said = [event.result["msg"] for event in events if isinstance(event, HostResult) and event.task == "said"]
        assert said == [f"['{other}'] ['aws_ec2', 'vllm']"]
        assert (ran(found, 0), ran(found, 1)) == (1, 0)


def test_modules_are_run_by_the_hosts_own_python(one: Fleet) -> None:
    # A host with the one Python that its job is made for: it and the job's have the same name.
    own = one.folder / "own" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    own.parent.mkdir()
    for name in (own, own.with_name("python3")):
        name.symlink_to(Path(sys.base_prefix) / "bin" / own.name)
    one.machines[0].variables["PATH"] = f"{own.parent}:/usr/bin:/bin"
    tasks = "  - {name: said, ansible.builtin.setup: {gather_subset: ['!all', python]}}\n"
    request = one.request(tasks)
    path = request.inventories[0]
    listed = json.loads(path.read_text())
    for variables in listed["all"]["hosts"].values():
        del variables["ansible_python_interpreter"]
    path.write_text(json.dumps(listed))
    events: list[Event] = []
    execute(request, events.append, SOON)
    found = [event.result for event in events if isinstance(event, HostResult)]
    assert found[0]["ansible_facts"]["discovered_interpreter_python"] == str(own)


def test_a_host_that_stalls_while_others_go_on_is_told_and_cancelled_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled: list[tuple[str, ...]] = []
    monkeypatch.setattr(commands, "cancel", lambda _ssm, _command, ids: cancelled.append(tuple(ids)))
    listener = execution.Listener(Request("play.yml", (tmp_path,)), lambda _: None)
    following = Following(listener, store.Store(None, BUCKET), "0" * 32, str(tmp_path), SOON, stall_s=60)
    command = commands.Command("c", REGION, ("i-stuck", "i-other", "i-waits"))
    following.expect([command])
    # The third has not begun: nothing is wanted of it yet.
    stuck, other, _ = (following.hosts[name].stream for name in command.instance_ids)
    stuck.worked, other.worked = time.monotonic() - 61, time.monotonic() - 1
    following.end_stalled()
    assert cancelled == [("i-stuck",)]
    assert list(listener.hosts) == ["i-stuck"]
    assert "stalled: no event came" in listener.hosts["i-stuck"].message
    # Where it is so on all that are left, the run is ended as any run that stalls.
    following.hosts["i-waits"].done = True
    other.worked = time.monotonic() - 61
    following.end_stalled()
    assert cancelled == [("i-stuck",)]


@pytest.mark.parametrize(("tasks", "code"), [(RAN, ExitCode.OK), (RAN + FAILS, ExitCode.HOST_FAILED)])
def test_delivered_twice_is_carried_out_once(one: Fleet, tasks: str, code: ExitCode) -> None:
    # AWS tells the second delivery's output alone.
    one.machines[0].deliveries = 2
    assert execute(one.request(tasks), lambda _: None, SOON).code is code
    assert ran(one) == 1


def test_a_second_delivery_waits_for_the_first_and_answers_with_it(tmp_path: Path) -> None:
    program = (
        "import bootstrap, os, sys, time\n"
        "home = sys.argv[1]\n"
        "if bootstrap.claim(home) is None:\n"
        "    sys.exit(bootstrap.answer_of_first(home))\n"
        "print('first', flush=True)\n"
        "sys.stdin.read()\n"
        "open(os.path.join(home, 'said.json'), 'w').write('{\"rc\": 2}')\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT / "fleet" / "run_command" / "on_host")}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as first, start() as second:
        assert first.stdin and first.stdout and second.stdin and second.stdout
        spoke = {first: first.stdout.readline(), second: second.stdout.readline()}
        [one] = [process for process in spoke if spoke[process] == "first\n"]
        [other] = [process for process in spoke if process is not one]
        assert json.loads(spoke[other]) == {"duplicate": "run", "rebooted": False}
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(0.5)
        one.communicate("", timeout=10)
        assert other.communicate(timeout=10)[0] == '{"rc": 2}\n'
        assert (one.returncode, other.returncode) == (0, 1)


@pytest.mark.parametrize("kind", ["bundles/", "wheels/", "jobs/"])
def test_another_object_than_the_command_names_is_not_run(
    one: Fleet, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def tampered(real: Callable[[store.Store, Any], None]) -> Callable[[store.Store, Any], None]:
        def put(self: store.Store, packed: Any) -> None:
            real(self, packed)
            if packed.key.startswith(kind):
                content = bytearray(packed.content)
                content[len(content) // 2] ^= 1
                one.aws.client("s3").put_object(Bucket=BUCKET, Key=store.PREFIX + packed.key, Body=bytes(content))

        return put

    for name in ("ensure", "put"):
        monkeypatch.setattr(store.Store, name, tampered(getattr(store.Store, name)))
    message = told(one, code=ExitCode.HOST_FAILED)
    assert f"bootstrap: {kind}" in message
    assert "is not run" in message
    assert ran(one) == 0
    # Of what was refused nothing is kept: a project or an environment of that digest would be taken for checked.
    kept = [path.name for path in (one.folder / "host0" / "state").rglob("*") if path.is_dir()]
    assert not any(name.startswith("project-") for name in kept) or kind == "jobs/"
    assert not any(name.startswith("ansible-") for name in kept) or kind != "wheels/"


def test_another_document_than_this_projects_is_not_sent(one: Fleet) -> None:
    ssm = one.aws.client("ssm")
    other = document.content().replace("exec python3 -", "touch /taken; exec python3 -")
    assert other != document.content()
    made = ssm.update_document(Content=other, Name=document.NAME, DocumentVersion="$LATEST", DocumentFormat="JSON")
    ssm.update_document_default_version(
        Name=document.NAME, DocumentVersion=made["DocumentDescription"]["DocumentVersion"]
    )
    with pytest.raises(FleetError, match="is of another version of this project") as refused:
        execute(one.request(RAN), lambda _: None, SOON)
    assert refused.value.mend == "./runner.py ssm install --region us-east-1"
    assert (one.aws.cloud.asked("SendCommand"), ran(one)) == (0, 0)


def test_a_result_that_somebody_else_wrote_is_refused(one: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    get = store.Store._get

    def other(self: store.Store, key: str) -> bytes:
        content = get(self, key)
        # The very lines, put there by another hand: only the digest is another.
        return gzip.compress(gzip.decompress(content) + b"\n", 1)

    monkeypatch.setattr(store.Store, "_get", other)
    assert "refused" in told(one)


def test_an_instance_without_agent_is_told_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(tmp_path, monkeypatch, count=2) as found:
        del found.aws.agents[found.machines[0].machine.instance_id]
        assert "no agent" in told(found)
        assert (ran(found, 0), ran(found, 1)) == (0, 1)


def test_an_agent_that_never_takes_the_command(one: Fleet) -> None:
    one.machines[0].online = False
    assert "never answered" in told(one)
    [command] = one.aws.registry.run_command.commands.values()
    assert command.status == "Cancelled"
    one.machines[0].online = True
    time.sleep(0.5)
    assert ran(one) == 0


def test_a_host_whose_turn_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(tmp_path, monkeypatch, count=2) as found:
        # Longer than a host may be silent that is not known to be at work.
        tasks = "  - {name: works, ansible.builtin.command: sleep 3}\n" + RAN
        assert execute(found.request(tasks, forks=1), lambda _: None, SOON).code is ExitCode.OK
        assert (ran(found, 0), ran(found, 1)) == (1, 1)


def test_after_too_many_failures_no_further_host_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(tmp_path, monkeypatch, count=3) as found:
        finished = execute(found.request(RAN + FAILS, forks=1, max_errors="1"), lambda _: None, SOON)
        assert [ran(found, number) for number in range(3)] == [1, 1, 0]
        ends = [finished.hosts[machine.machine.instance_id] for machine in found.machines]
        assert [(end.failed, end.unreachable) for end in ends] == [(1, 0), (1, 0), (0, 1)]
        assert "not begun: more hosts than --max-errors allows had failed" in ends[2].message
        assert finished.code is ExitCode.UNREACHABLE


def test_an_agent_lost_on_the_way(one: Fleet) -> None:
    def lose() -> None:
        until(lambda: b'"runner_on_start"' in put(one))
        one.machines[0].online = False
        pid = int((one.folder / "host0" / "pid").read_text())
        # Its job is stuck without a word, not only its agent away.
        os.kill(pid, signal.SIGSTOP)

    meanwhile(one, lose)
    try:
        message = told(one, WAITS)
        assert "agent lost" in message and "at waits" in message
    finally:
        os.kill(int((one.folder / "host0" / "pid").read_text()), signal.SIGKILL)


def test_a_spot_instance_that_is_taken_back(one: Fleet) -> None:
    instance = one.machines[0].machine.instance_id

    def take_back() -> None:
        one.machines[0].spot_notice = '{"action": "terminate", "time": "2026-12-03T08:22:00Z"}'
        until(lambda: b"spot_notice" in put(one))
        one.aws.client("ec2").terminate_instances(InstanceIds=[instance])
        one.machines[0].terminated = True
        one.machines[0].go_down()

    meanwhile(one, take_back)
    message = told(one, WAITS)
    assert "terminated" in message and "spot notice: terminate at 2026-12-03T08:22:00Z" in message


def test_a_reboot_in_the_middle_is_told_and_not_begun_again(one: Fleet) -> None:
    def reboot() -> None:
        claims = list((one.folder / "host0" / "state" / "runs").glob("*/boot_id"))
        one.machines[0].go_down()
        # Another boot than the one that claimed the run.
        claims[0].write_text("another boot")

    meanwhile(one, reboot)
    assert "rebooted" in told(one, RAN + WAITS)
    assert ran(one) == 1


def test_ctrl_c_ends_it_on_the_host(one: Fleet) -> None:
    meanwhile(one, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        execute(one.request(WAITS), lambda _: None, SOON)
    # Ansible, and what its task has started: the agent's own kill reaches neither.
    task = Path("/proc") / (one.folder / "host0" / "pid").read_text().strip()
    until(lambda: not on_host(one) and not task.exists())
    command = next(iter(one.aws.registry.run_command.commands.values()))
    assert command.status == "Cancelled"


def test_time_limits_are_the_runs(one: Fleet) -> None:
    with pytest.raises(FleetError) as stopped:
        execute(one.request(WAITS, limit_s=6), lambda _: None, SOON)
    assert stopped.value.code is ExitCode.STALLED
    until(lambda: not on_host(one))


def test_reads_outlive_throttling_and_lag(one: Fleet) -> None:
    one.aws.cloud.lag_s = 2.0
    one.aws.cloud.throttle.update({"ListCommandInvocations": 2, "ListObjectsV2": 2, "DescribeInstanceInformation": 1})
    assert execute(one.request(RAN), lambda _: None, SOON).code is ExitCode.OK
    assert ran(one) == 1


def test_a_send_that_is_turned_away_is_told_and_not_repeated(one: Fleet) -> None:
    one.aws.cloud.throttle["SendCommand"] = 1
    with pytest.raises(FleetError) as turned_away:
        execute(one.request(RAN), lambda _: None, SOON)
    assert turned_away.value.code is ExitCode.UNREACHABLE
    assert (one.aws.cloud.asked("SendCommand"), ran(one)) == (1, 0)


def test_nothing_is_sent_where_something_is_missing(one: Fleet) -> None:
    request = one.request(RAN)
    path = request.inventories[0]
    good = path.read_text()
    wrong: list[tuple[str, str, str, ExitCode]] = [
        (f'"{BUCKET}"', '""', "vllm_fleet_bucket", ExitCode.BAD_INPUT),
        (f'"{BUCKET}"', '"{{ other }}"', "vllm_fleet_bucket", ExitCode.BAD_INPUT),
        (f'"{BUCKET}"', '"no-such-bucket"', "no-such-bucket", ExitCode.HOST_FAILED),
        ('"architecture"', '"other"', "variables of the inventory", ExitCode.BAD_INPUT),
        ('"aws_ec2"', '"elsewhere"', "aws_ec2.json", ExitCode.BAD_INPUT),
        (
            '"vllm_fleet_bucket"',
            '"vllm_fleet_python": "3.9", "vllm_fleet_bucket"',
            "vllm_fleet_python",
            ExitCode.BAD_INPUT,
        ),
    ]
    for before, after, where, _ in wrong:
        path.write_text(good.replace(before, after))
        with pytest.raises(FleetError) as refused:
            execute(request, lambda _: None, SOON)
        assert where in refused.value.where, refused.value
    path.write_text(good)
    one.aws.client("ssm").delete_document(Name="vllm-fleet-run")
    with pytest.raises(FleetError, match="not in this region") as refused:
        execute(request, lambda _: None, SOON)
    assert refused.value.mend == "./runner.py ssm install --region us-east-1"
    assert one.aws.cloud.asked("SendCommand") == 0 and ran(one) == 0
    with pytest.raises(ClientError):
        one.aws.client("s3").head_bucket(Bucket="no-such-bucket")
