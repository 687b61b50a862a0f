"""The end of a run in words and as JSON, from what a host says of itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from fleet import summary
from fleet.collector import Collector
from fleet.errors import ExitCode
from fleet.events import HostResult, HostTally, Outcome
from fleet.execution import Finished
from fleet.requests import Request
from fleet.running import Ran

RELEASE = {"build_id": "vllm-1", "current": True, "patch": {"outcome": "applied", "reason": "64 KiB [x]"}}
STATUS: dict[str, Any] = {
    "decisions": [{"topic": "dtype", "decision": "float16", "why": "[bold]7.5[/bold]"}],
    "releases": [{"build_id": "vllm-0", "current": False, "patch": None}, RELEASE],
    "serving": {"active": True, "url": "http://10.0.0.1:8000", "model": "m", "question": "q", "build_id": "vllm-1"},
}


def ran(status: dict[str, Any], *, message: str = "") -> Ran:
    """A run on one host that said this of itself."""
    collected = Collector()
    collected(HostResult("h", "", "status", Outcome.OK, 0.1, "", {"vllm_status": status}))
    collected(HostResult("h", "rust", "installed", Outcome.FAILED if message else Outcome.CHANGED, 61.0, message))
    tally = HostTally(ok=2, changed=1, failed=int(bool(message)), message=message)
    return Ran(Request("p.yml", ()), Finished(ExitCode.OK, {"h": tally}), collected, Path("/l"), 62.0)


def shown(status: dict[str, Any], *, message: str = "") -> str:
    """What a person reads."""
    file = io.StringIO()
    summary.show(Console(file=file, width=160), ran(status, message=message), {"rust": "stands in"})
    return file.getvalue()


def test_json_says_address_release_patch_and_running_against_wanted() -> None:
    found = summary.as_json(ran(STATUS))
    assert found["code"] == 0
    host = found["hosts"]["h"]
    assert {key: host[key] for key in ("address", "release", "patch", "running", "wanted")} == {
        "address": "http://10.0.0.1:8000",
        "release": "vllm-1",
        "patch": "applied",
        "running": "vllm-1",
        "wanted": "vllm-1",
    }
    assert (host["ok"], host["changed"], host["failed"], host["unreachable"]) == (2, 1, 0, 0)


def test_a_service_that_was_altered_says_how() -> None:
    drift = [{"what": "unit overrides", "found": "/etc/x.conf", "wanted": ""}]
    said = shown({**STATUS, "serving": {**STATUS["serving"], "drift": drift}})
    assert "drift    unit overrides: /etc/x.conf, nothing is wanted" in said


def test_a_host_that_does_not_serve_has_no_address_and_drifts() -> None:
    stopped = {**STATUS, "serving": {**STATUS["serving"], "active": False}}
    host = summary.as_json(ran(stopped))["hosts"]["h"]
    assert (host["address"], host["running"], host["wanted"]) == (None, None, "vllm-1")
    assert "drift    nothing runs, vllm-1 is wanted" in shown(stopped)
    assert "drift" not in shown(STATUS)


def test_a_bare_host_has_nothing() -> None:
    host = summary.as_json(ran({}))["hosts"]["h"]
    assert [host[key] for key in ("address", "release", "patch", "running", "wanted")] == [None] * 5
    assert "drift" not in shown({})


def test_a_check_says_its_own_plan_and_not_the_last_runs() -> None:
    collected = Collector()
    plan = {"decisions": [{"topic": "version of a", "decision": "not 0.34.0", "why": "float16 is asked for"}]}
    collected(HostResult("h", "preflight", "plan", Outcome.OK, 0.1, "", {"ansible_facts": {"vllm_plan": plan}}))
    collected(HostResult("h", "", "status", Outcome.OK, 0.1, "", {"vllm_status": STATUS}))
    run = Ran(Request("p.yml", ()), Finished(ExitCode.OK, {"h": HostTally(ok=2)}), collected, Path("/l"), 1.0)
    assert summary.as_json(run)["hosts"]["h"]["decisions"] == plan["decisions"]
    file = io.StringIO()
    summary.show(Console(file=file, width=160), run, {})
    assert "plan     version of a: not 0.34.0 — float16 is asked for" in file.getvalue()
    assert STATUS["decisions"][0]["why"] not in file.getvalue()


def patched(flags: tuple[str, ...] = (), *, changed: bool, restarted: bool) -> Ran:
    """A repatch of one host that serves, with this outcome."""
    collected = Collector()
    patches = [{**RELEASE["patch"], "build_id": "vllm-1", "changed": changed}]  # type: ignore[dict-item]
    collected(HostResult("h", "triton_patch", "patched", Outcome.OK, 1.0, "", {"patches": patches}))
    if restarted:
        collected(HostResult("h", "vllm_service", "serves", Outcome.CHANGED, 9.0, "", {"restarted": True}))
    collected(HostResult("h", "", "status", Outcome.OK, 0.1, "", {"vllm_status": STATUS}))
    request = Request("p.yml", (), flags=flags, command="repatch")
    return Ran(request, Finished(ExitCode.OK, {"h": HostTally(ok=2)}), collected, Path("/l"), 62.0)


def test_a_repatch_says_of_each_host_what_came_of_it_and_whether_it_restarted() -> None:
    for run, words in (
        (patched(changed=True, restarted=True), " restarted"),
        (patched(changed=False, restarted=False), " not restarted"),
        # Nothing is in place yet, so the server was not compared with it.
        (patched(("--check",), changed=True, restarted=False), " would be restarted"),
        (patched(("--check",), changed=False, restarted=True), " would be restarted"),
        (patched(("--check",), changed=False, restarted=False), " would not be restarted"),
    ):
        file = io.StringIO()
        summary.show_patches(Console(file=file, width=160), run)
        [line] = [line for line in file.getvalue().splitlines() if "vllm-1" in line and "64 KiB [x]" in line][:1]
        assert line.split()[:6] == ["h", "vllm-1", "applied", "64", "KiB", "[x]"]
        assert line.rstrip().endswith(words)
    host = summary.as_json(patched(changed=True, restarted=True))["hosts"]["h"]
    assert host["patches"] == [
        {"build_id": "vllm-1", "outcome": "applied", "reason": "64 KiB [x]", "changed": True}
    ]  # fmt: skip
    assert host["restarted"]
    assert not summary.as_json(ran(STATUS))["hosts"]["h"]["restarted"]


def test_a_role_whose_tags_were_not_asked_for_did_not_run() -> None:
    name = "Validating arguments against arg spec 'main' - A swapfile"
    collected = Collector()
    collected(HostResult("h", "swapfile", name, Outcome.OK, 0.1))
    assert not collected.roles["swapfile"].ran
    collected(HostResult("h", "swapfile", "Swapfile as wanted", Outcome.OK, 0.1))
    assert collected.roles["swapfile"].ran
    collected(HostResult("h", "rust", name, Outcome.FAILED, 0.1))
    assert collected.roles["rust"].ran


def test_words_are_shown_as_they_are() -> None:
    text = shown(STATUS, message="rust: [red]no\x1b[2J\n  where: h\n  mend:  x")
    for words in ("[bold]7.5[/bold]", "64 KiB [x]", "[red]no\\x1b[2J", "stands in", "failed: installed", "1m01s"):
        assert words in text
    assert '{"model":"m","messages":[{"role":"user","content":"q"}]}' in text
