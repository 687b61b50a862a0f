"""A switch ends with what is wanted or with what was, however it ends; the server is a real one, systemd a double."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import service_checks, service_state
from ansible.module_utils.service_checks import Problem

from fleet.paths import PROJECT
from plugins.modules import vllm_serve, vllm_status, vllm_stop
from tests.unit.doubles import MODEL, Module, Server, Systemd, answer, ends, serving

FILES = PROJECT / "roles/vllm_service/files"
UNIT = "vllm.service"
# The program's stand: vLLM itself takes every argument but one.
ARGUMENTS = """
import json, sys
asked = json.load(open(sys.argv[1]))
wrong = [a for a in asked["arguments"] if a == "--nonsense"]
print(json.dumps({"unknown_variables": [v for v in asked["variables"] if v == "VLLM_DEAD"],
    "arguments": f"error: unrecognized arguments: {wrong[0]}" if wrong else ""}))
"""


class Host:
    """A host with releases, a server behind the unit's address, and the module's parameters for it."""

    def __init__(self, folder: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = server
        self.systemd = Systemd(folder / "systemd", monkeypatch)
        self.root, self.state, self.home = folder / "opt", folder / "state", folder / "home"
        self.library = folder / "library"
        self.state.mkdir()
        self.unit = self.systemd.units / UNIT
        self.service = service_state.Service(self.root, self.state)
        for name in ("one", "two"):
            site = self.root / "releases" / name / "site"
            site.mkdir(parents=True)
            (site / "kernel.py").write_text("tile = 16\n")
            (self.root / "releases" / name / "release.json").write_text(json.dumps({"site_packages": str(site)}))
            patches = self.state / "patches"
            patches.mkdir(exist_ok=True)
            (patches / f"{name}.json").write_text(json.dumps({"files": {"kernel.py": {"sha256": "x"}}}))
        # systemd's own word on the text is asked for in test_service_unit.
        monkeypatch.setattr(vllm_serve, "objection", lambda _name, _text: "")
        monkeypatch.setenv("VLLM_FLEET_RUN", "run1")

    def params(self, release: str = "one", **more: Any) -> dict[str, Any]:
        path = self.root / "releases" / release
        return {
            "release": {"build_id": release, "path": str(path), "python": sys.executable},
            "unit_text": f"[Service]\nExecStartPre=-python3 prestart.py {UNIT} @KEY@\nExecStart={path}/bin/python\n",
            "arguments": ["--port", str(self.server.port)],
            "environment": {"MAX_JOBS": "2"},
            "own_environment": ["MAX_JOBS"],
            "cache": str(self.home / "cache" / release / "abc"),
            "gate": {
                "url": self.server.url, "model": MODEL, "question": "What is the capital of France?",
                "expected": r"\bparis\b", "max_tokens": 32, "filler_repeats": 6, "deadline_seconds": 5,
            },
            "load": {"bytes": 0, "mb_per_second": 50, "swap_mib": 0},
            "programs": {
                "gate": (FILES / "gate.py").read_text(),
                "arguments": ARGUMENTS,
                "prestart": (FILES / "prestart.py").read_text(),
            },
            "model": "hub/model", "anew": False,
            "listen": {"host": "10.0.0.1", "port": self.server.port}, "user": "nobody",
            "home": str(self.home), "library": str(self.library), "root": str(self.root), "state": str(self.state),
            **more,
        }  # fmt: skip

    def serve(self, release: str = "one", *, check_mode: bool = False, **more: Any) -> dict[str, Any]:
        module = Module(self.params(release, **more), check_mode=check_mode)
        return ends(lambda: vllm_serve.Serve(module).run())

    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.state / "service.json").read_text())
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = vllm_status._serving(self.root, self.state)
        return found

    def seen(self) -> dict[str, str]:
        """Everything under the host's folders, by path."""
        folders = (self.root, self.state, self.systemd.units, self.library)
        return {
            str(path): str(path.readlink()) if path.is_symlink() else path.read_text()
            for folder in folders
            for path in sorted(folder.rglob("*"))
            if path.is_symlink() or path.is_file()
        }


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with serving(Server()) as server:
        yield Host(tmp_path, server, monkeypatch)


def test_a_bare_host_serves_and_a_second_run_changes_nothing(host: Host) -> None:
    first = host.serve()
    assert (first["failed"], first["changed"], first["answer"]) == (False, True, "The capital of France is Paris.")
    assert host.systemd.state(UNIT)["ActiveState"] == "active"
    assert host.systemd.state(UNIT)["UnitFileState"] == "enabled"
    assert host.service.current.resolve() == host.root / "releases/one"
    assert host.status()["drift"] == []
    assert host.status()["watchdog"]["on"] is False
    seen, calls = host.seen(), host.systemd.calls()
    second = host.serve()
    assert (second["changed"], second["answer"]) == (False, "The capital of France is Paris.")
    assert (host.seen(), host.systemd.calls()) == (seen, calls)


def test_check_mode_touches_nothing_on_a_bare_host_and_reports_nothing_on_a_converged_one(host: Host) -> None:
    seen = host.seen()
    assert host.serve(check_mode=True)["changed"]
    assert (host.seen(), host.systemd.calls()) == (seen, [])
    host.serve()
    assert not host.serve(check_mode=True)["changed"]


def test_the_diff_shows_the_unit_and_the_link(host: Host) -> None:
    host.serve()
    unit, link = host.serve("two", check_mode=True)["diff"]
    assert (link["before"], link["after"]) == (f"{host.root}/releases/one\n", f"{host.root}/releases/two\n")
    assert "releases/one/bin" in unit["before"]
    assert "releases/two/bin" in unit["after"]
    for same in host.serve()["diff"]:
        assert same["before"] == same["after"]


def test_the_link_moves_only_after_the_answer(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.serve()
    linked: list[Path] = []
    whole = host.server.chat

    def chat(asked: dict[str, Any]) -> tuple[int, Any]:
        linked.append(host.service.current.resolve())
        return whole(asked)

    monkeypatch.setattr(host.server, "chat", chat)
    host.serve("two")
    assert linked == [host.root / "releases/one"]
    assert host.service.current.resolve() == host.root / "releases/two"


def test_a_release_that_talks_nonsense_is_switched_back(host: Host) -> None:
    host.serve()
    before = host.seen()
    host.server.replies = [answer("!!!!!!!!"), answer("The capital of France is Paris.")]
    (host.systemd.home / "journal").write_text("(EngineCore) ValueError: root cause\nlast line\n")
    failed = host.serve("two")
    assert failed["failed"]
    assert failed["msg"].startswith("vllm_service: two failed its gate with REPEATED")
    assert "one serves again as before" in failed["msg"]
    assert "\n  where: " in failed["msg"]
    assert "\n  mend:  " in failed["msg"]
    assert "ValueError: root cause" in failed["msg"]
    after = host.seen()
    assert {k: v for k, v in after.items() if "arguments.checked" not in k} == {
        k: v for k, v in before.items() if "arguments.checked" not in k
    }
    assert host.systemd.state(UNIT)["ActiveState"] == "active"
    assert not host.serve()["changed"]


def test_a_first_release_that_fails_leaves_no_service(host: Host) -> None:
    host.server.replies = [answer("")]
    failed = host.serve()
    assert "no service is left" in failed["msg"]
    assert not host.unit.exists()
    assert not host.service.current.is_symlink()
    assert host.systemd.state(UNIT) == {
        **host.systemd.state(UNIT),
        "ActiveState": "inactive",
        "UnitFileState": "disabled",
    }
    assert host.status()["drift"] == []


def test_a_link_to_a_release_that_is_gone_goes_with_a_failed_switch(host: Host) -> None:
    host.serve()
    shutil.rmtree(host.root / "releases" / "one")
    host.server.replies = [answer("")]
    assert "no service is left" in host.serve("two")["msg"]
    assert not host.service.current.is_symlink()


def test_an_earlier_release_that_fails_too_is_told(host: Host) -> None:
    host.serve()
    host.server.replies = [answer("")]
    assert "one, which served before, fails too: EMPTY_ANSWER" in host.serve("two")["msg"]


def test_a_start_that_systemd_refuses_is_switched_back(host: Host) -> None:
    host.serve()
    (host.systemd.home / "on-start.py").write_text(
        "if 'releases/two' in file.read_text():\n    path.write_text(json.dumps(units)); sys.exit(1)\n"
    )
    failed = host.serve("two")
    assert "NOT_STARTED" in failed["msg"]
    assert "one serves again as before" in failed["msg"]


def test_a_disk_that_is_full_in_the_switch_is_switched_back(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.serve()
    whole = service_state.Unit.write

    def write(unit: Any, text: str) -> None:
        if "releases/two" in text:
            raise OSError(28, "No space left on device")
        whole(unit, text)

    monkeypatch.setattr(service_state.Unit, "write", write)
    failed = host.serve("two")
    assert "NOT_SWITCHED: [Errno 28]" in failed["msg"]
    assert "one serves again as before" in failed["msg"]
    assert host.status()["drift"] == []


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"arguments": ["--nonsense"]}, "does not take its arguments: error: unrecognized arguments: --nonsense"),
        ({"environment": {"VLLM_DEAD": "1"}}, "VLLM_DEAD: read by nothing in this release"),
        ({"model": "/nonexistent"}, "the model has no config.json"),
    ],
)
def test_what_is_refused_is_refused_before_what_serves_is_stopped(host: Host, more: dict[str, Any], words: str) -> None:
    host.serve()
    calls = host.systemd.calls()
    refused = host.serve("two", **more)
    assert refused["refused"]
    assert words in refused["msg"]
    assert host.systemd.calls() == calls
    assert host.status()["drift"] == []


def test_a_problem_with_the_host_is_refused_before_the_stop(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.serve()
    for name in ("check_port", "check_gpu", "check_cache"):
        with monkeypatch.context() as patched:
            patched.setattr(service_checks, name, lambda *_: Problem("WHAT", "WHERE", "MEND"))
            calls = host.systemd.calls()
            assert host.serve("two")["msg"] == "vllm_service: WHAT\n  where: WHERE\n  mend:  MEND"
            assert host.systemd.calls() == calls


@pytest.mark.parametrize(
    ("drift", "what"),
    [
        (lambda host: host.unit.write_text(host.unit.read_text() + "# by hand\n"), "unit text"),
        (lambda host: host.systemd.set(UNIT, ActiveState="failed"), "active"),
        (lambda host: host.systemd.set(UNIT, UnitFileState="disabled"), "enabled"),
        (lambda host: host.systemd.set(UNIT, NeedDaemonReload="yes"), "unit read anew"),
        (lambda host: (host.systemd.home / "started").write_text("earlier\n"), "started unit"),
        (lambda host: (host.root / "releases/one/site/kernel.py").write_text("tile = 32\n"), "patched files"),
        (lambda host: host.service.current.unlink(), "release"),
    ],
)
def test_drift_is_told_by_status_and_restarts_the_service(host: Host, drift: Any, what: str) -> None:
    host.serve()
    drift(host)
    assert [found["what"] for found in host.status()["drift"]] == [what]
    calls = len(host.systemd.calls())
    assert host.serve()["changed"]
    assert f"start {UNIT}" in host.systemd.calls()[calls:]
    assert host.status()["drift"] == []
    assert not host.serve()["changed"]


def test_one_that_serves_as_wanted_is_started_anew_on_request_alone(host: Host) -> None:
    host.serve()
    calls = len(host.systemd.calls())
    assert host.serve(anew=True, check_mode=True)["restarted"]
    assert host.systemd.calls()[calls:] == []
    again = host.serve(anew=True)
    assert (again["restarted"], again["answer"]) == (True, "The capital of France is Paris.")
    assert host.systemd.calls()[calls:].count(f"start {UNIT}") == 1


def test_the_token_that_the_server_holds_is_told_from_the_one_that_lies_there(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_state, "_CREDENTIALS", tmp_path / "credentials")
    host.serve()
    assert host.status()["token"] == "none"
    there, held = tmp_path / "100%/hf_token", tmp_path / "credentials/hf_token"
    for file in (there, held):
        file.parent.mkdir()
    # systemd's own spelling of a % in a path.
    load = f"LoadCredential=hf_token:{tmp_path}/100%%/hf_token\n"
    host.unit.write_text(host.unit.read_text() + load)
    assert host.status()["token"] == "missing"
    there.write_text("hf_first")
    assert host.status()["token"] == "unused"
    held.write_text("hf_first")
    assert host.status()["token"] == "current"
    there.write_text("hf_other")
    assert host.status()["token"] == "older"
    assert "hf_" not in json.dumps(host.status()).replace("hf_token", "")


def test_a_start_from_another_file_than_is_there_is_told_and_started_anew(host: Host) -> None:
    record, file = host.state / "patches/one.json", host.root / "releases/one/site/kernel.py"
    record.write_text(json.dumps({**json.loads(record.read_text()), "outcome": "applied"}))
    first = host.serve()
    assert (first["restarted"], host.status()["drift"]) == (True, [])
    # pip lays the file anew, the service starts from it, the patch comes back: the digests are the proven ones.
    patched = file.read_text()
    file.write_text("tile = 32\n")
    host.service.start()
    time.sleep(0.05)  # a file's time is the kernel's, which moves in steps of some milliseconds
    file.with_name("part").write_text(patched)
    file.with_name("part").replace(file)
    assert [(found["what"], found["found"]) for found in host.status()["drift"]] == [
        ("running code", "older than the patched files")
    ]
    assert host.serve(check_mode=True)["restarted"]
    again = host.serve()
    assert (again["changed"], again["restarted"]) == (True, True)
    assert host.status()["drift"] == []
    calls = host.systemd.calls()
    assert not host.serve()["restarted"]
    assert host.systemd.calls() == calls


def test_the_time_of_a_file_that_needs_no_patch_says_nothing(host: Host) -> None:
    record, file = host.state / "patches/one.json", host.root / "releases/one/site/kernel.py"
    record.write_text(json.dumps({**json.loads(record.read_text()), "outcome": "not_needed"}))
    host.serve()
    time.sleep(0.05)
    # As when another release is given the same file of the installer's cache.
    file.with_name("link").hardlink_to(file)
    assert host.status()["drift"] == []
    assert not host.serve()["changed"]


def test_overrides_of_the_unit_are_refused_and_left_alone(host: Host) -> None:
    host.serve()
    override = "/etc/systemd/system/vllm.service.d/override.conf"
    host.systemd.set(UNIT, DropInPaths=override)
    assert [found["what"] for found in host.status()["drift"]] == ["unit overrides"]
    calls = host.systemd.calls()
    refused = host.serve()
    assert override in refused["msg"]
    assert "mend:  systemctl revert vllm.service" in refused["msg"]
    assert host.systemd.calls() == calls


def test_a_service_that_still_loads_is_waited_for_and_not_restarted(host: Host) -> None:
    host.serve()
    host.server.models = None
    threading.Timer(1.5, lambda: setattr(host.server, "models", [MODEL])).start()
    calls = host.systemd.calls()
    assert not host.serve()["changed"]
    assert host.systemd.calls() == calls


def test_a_hung_engine_is_restarted_by_a_converge(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.serve()
    monkeypatch.setattr(vllm_serve, "_QUICK_SECONDS", 0.5)
    host.server.replies = [30.0, answer("The capital of France is Paris.")]
    assert host.serve()["changed"]
    assert host.systemd.calls().count(f"start {UNIT}") == 2


def cut_off_in_the_gate(host: Host, release: str) -> None:
    """The module's process is killed while its gate waits for the answer."""
    module = Module(host.params(release))
    serve = vllm_serve.Serve(module)
    serve.service.begin(release, serve.unit_text)
    serve.service.start()


def test_an_interrupted_switch_is_undone_by_the_stop_of_its_run(host: Host) -> None:
    host.serve()
    before = host.seen()
    cut_off_in_the_gate(host, "two")
    assert "unfinished switch" in [found["what"] for found in host.status()["drift"]]
    assert vllm_stop._undo(host.service, "another run", check_mode=False) == ""
    assert vllm_stop._undo(host.service, "run1", check_mode=True) == "the switch to two"
    assert "unfinished switch" in [found["what"] for found in host.status()["drift"]]
    assert vllm_stop._undo(host.service, "run1", check_mode=False) == "the switch to two: one serves"
    assert host.seen() == before
    assert host.status()["drift"] == []
    assert vllm_stop._undo(host.service, "run1", check_mode=False) == ""
    assert not host.serve()["changed"]


def test_an_interrupted_first_switch_leaves_the_host_as_it_was(host: Host) -> None:
    before = host.seen()
    cut_off_in_the_gate(host, "one")
    assert [found["what"] for found in host.status()["drift"]] == ["unfinished switch"]
    assert vllm_stop._undo(host.service, "run1", check_mode=False) == "the switch to one: nothing serves"
    assert host.seen() == before


def test_a_stop_leaves_a_switch_of_another_run_that_goes_on(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off_in_the_gate(host, "one")
    params = {"run": "run1", "root": str(host.root), "state": str(host.state), "wait_seconds": 1}
    monkeypatch.setattr(vllm_stop, "AnsibleModule", lambda **_: Module(params))
    monkeypatch.setattr(vllm_stop, "running", lambda _: [])
    monkeypatch.setattr(service_state.time, "sleep", lambda _: None)
    clock = iter(range(100))
    monkeypatch.setattr(service_state.time, "monotonic", lambda: next(clock))
    with host.service.held(0):
        failed = ends(vllm_stop.main)
    assert "another run is switching the service" in failed["msg"]
    assert host.unit.exists()
    done = ends(vllm_stop.main)
    assert (done["changed"], done["undone"]) == (True, "the switch to one: nothing serves")
    assert not host.unit.exists()


@pytest.mark.parametrize("wanted", ["one", "two"])
def test_a_converge_after_an_interruption_ends_as_an_uninterrupted_one(host: Host, wanted: str) -> None:
    # The run was killed and nobody stopped it on the host: power went, or the runner was killed outright.
    host.serve()
    cut_off_in_the_gate(host, "two")
    assert host.serve(wanted)["changed"]
    assert host.service.current.resolve().name == wanted
    assert host.record()["build_id"] == wanted
    assert host.status()["drift"] == []
    assert not host.serve(wanted)["changed"]


def test_a_switch_by_another_run_is_waited_for_and_then_told(host: Host) -> None:
    host.serve()
    with host.service.held(0):
        refused = host.serve(gate={**host.params()["gate"], "deadline_seconds": 1})
    assert "another run has been switching the service for 1 s" in refused["msg"]


def test_the_watchdogs_restart_is_kept_out_of_a_switch(host: Host, tmp_path: Path) -> None:
    # As in the unit's command: flock does nothing, and fails nothing, while the lock is held.
    command = [
        "flock",
        "--nonblock",
        "--conflict-exit-code",
        "0",
        str(service_state.LOCK),
        "touch",
        str(tmp_path / "ran"),
    ]
    with host.service.held(0):
        assert subprocess.run(command, check=False).returncode == 0
        assert not (tmp_path / "ran").exists()
    assert subprocess.run(command, check=False).returncode == 0
    assert (tmp_path / "ran").exists()


def test_caches_of_other_arguments_and_of_gone_releases_go_after_the_gate(host: Host) -> None:
    for name in ("one/abc", "one/old", "two/abc", "gone/abc"):
        (host.home / "cache" / name).mkdir(parents=True)
    host.home.chmod(0o777)
    host.server.replies = [answer("")]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service_checks, "check_cache", lambda *_: None)
        host.serve()
        assert len(list((host.home / "cache").glob("*/*"))) == 4
        host.server.replies = [answer("The capital of France is Paris.")]
        host.serve()
    left = sorted(str(path.relative_to(host.home / "cache")) for path in (host.home / "cache").glob("*/*"))
    assert left == ["one/abc", "two/abc"]


@pytest.mark.parametrize(
    ("weights_bytes", "swap_mib", "seconds"),
    [
        (0, 0, 600),
        # 10,246,621,918 bytes (FACTS) at 50 MB/s: 204 s once, 614 s in three passes.
        (10_246_621_918, 0, 804),
        (10_246_621_918, 4096, 1214),
    ],
)
def test_the_deadline_grows_with_the_model_and_with_swap(weights_bytes: int, swap_mib: int, seconds: int) -> None:
    load = {"bytes": weights_bytes, "mb_per_second": 50, "swap_mib": swap_mib}
    assert vllm_serve.start_deadline(600, load) == seconds
