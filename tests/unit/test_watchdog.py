"""The watchdog restarts a hung engine and nothing else (CASES B02, B04, B05); each case on a real HTTP server."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import watchdog

from fleet.paths import PROJECT
from tests.unit.doubles import MODEL, Server, Systemd, answer, serving

PROGRAM = PROJECT / "roles/vllm_service/files/watchdog.py"
PATIENCE = 0.3
RUNNING = watchdog.Unit(active=True, invocation="a", age_seconds=5000)
LOAD_SECONDS = 600


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as started:
        yield started


def looks(server: Server, count: int, unit: watchdog.Unit = RUNNING, start: Any = None) -> list[watchdog.Memory]:
    """Several looks in a row, each with the memory of the one before."""
    memory = start or watchdog.Memory()
    found = []
    for _ in range(count):
        memory = watchdog.look(watchdog.Server(server.url, MODEL, PATIENCE), unit, memory, LOAD_SECONDS)
        found.append(replace(memory))
    return found


def told(memories: list[watchdog.Memory]) -> list[tuple[str, int]]:
    return [(memory.verdict, memory.failures) for memory in memories]


def proven() -> watchdog.Memory:
    return watchdog.Memory(invocation="a", proven=True, progress=[500.0, 100.0, 0.25])


def test_an_idle_server_is_asked_for_one_token_and_is_well(server: Server) -> None:
    assert told(looks(server, 3)) == [("answering", 0)] * 3
    assert [asked["max_tokens"] for asked in server.asked] == [1, 1, 1]


def test_a_busy_server_whose_tokens_move_is_not_even_asked(server: Server) -> None:
    server.replies, server.tokens_per_look = [30.0], 7.0
    assert told(looks(server, 5, start=proven())) == [("working", 0)] * 5
    assert server.asked == []


def test_a_busy_server_that_leaves_a_question_waiting_is_well(server: Server) -> None:
    # Nothing is remembered, so a question is asked; it waits in the queue while tokens move.
    server.replies, server.tokens_per_look = [30.0], 7.0
    assert told(looks(server, 1)) == [("working", 0)]
    assert len(server.asked) == 1


def test_a_slow_answer_within_the_patience_is_well() -> None:
    class Slow(Server):
        def chat(self, asked: dict[str, Any]) -> tuple[int, Any]:
            time.sleep(PATIENCE / 3)
            return super().chat(asked)

    with serving(Slow()) as slow:
        assert told(looks(slow, 2)) == [("answering", 0)] * 2


def test_a_hung_engine_behind_a_live_server_is_counted(server: Server) -> None:
    server.replies = [30.0]
    assert told(looks(server, 3, start=proven())) == [("hanging", 1), ("hanging", 2), ("hanging", 3)]


def test_an_engine_that_answers_500_is_counted(server: Server) -> None:
    server.replies = [(500, {"error": "EngineDeadError"})]
    assert told(looks(server, 2, start=proven())) == [("hanging", 1), ("hanging", 2)]


def test_one_answer_wipes_the_count(server: Server) -> None:
    server.replies = [30.0]
    before = looks(server, 2, start=proven())[-1]
    server.replies = [answer("Hello")]
    assert told(looks(server, 1, start=before)) == [("answering", 0)]


def test_a_dead_server_is_counted_once_it_has_served() -> None:
    with serving(Server()) as gone:
        pass
    assert told(looks(gone, 2, start=proven())) == [("hanging", 1), ("hanging", 2)]


def test_a_load_is_left_alone_for_as_long_as_the_gate_would_wait() -> None:
    with serving(Server()) as gone:
        pass
    assert told(looks(gone, 3, replace(RUNNING, age_seconds=LOAD_SECONDS - 1))) == [("loading", 0)] * 3
    assert told(looks(gone, 1, replace(RUNNING, age_seconds=LOAD_SECONDS + 1))) == [("hanging", 1)]


def test_a_first_question_that_still_compiles_is_part_of_the_load(server: Server) -> None:
    server.replies = [30.0]
    assert told(looks(server, 2, replace(RUNNING, age_seconds=90))) == [("loading", 0)] * 2


def test_what_was_seen_of_an_earlier_start_does_not_count(server: Server) -> None:
    server.replies = [30.0]
    before = watchdog.Memory(invocation="earlier", proven=True, failures=2, progress=[1.0])
    assert told(looks(server, 1, replace(RUNNING, age_seconds=30), before)) == [("loading", 0)]


def test_a_stopped_unit_is_not_asked(server: Server) -> None:
    assert told(looks(server, 1, replace(RUNNING, active=False), proven())) == [("stopped", 0)]
    assert server.asked == []


def test_without_counters_nothing_is_done(server: Server) -> None:
    server.tokens, server.replies = None, [30.0]
    assert told(looks(server, 2, start=proven())) == [("blind", 0)] * 2


def test_a_refused_question_says_nothing_of_the_engine(server: Server) -> None:
    server.replies = [(404, {"message": "no such model"})]
    assert told(looks(server, 2, start=proven())) == [("blind", 0)] * 2


def test_a_long_prompt_moves_the_cache_and_counts_as_work(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both counters stand until a prompt's last chunk; cache usage moves with each.
    server.replies = [30.0]
    moved = Server.metrics(server).replace("0.25", "0.75")
    monkeypatch.setattr(server, "metrics", lambda: moved)
    assert told(looks(server, 1, start=proven())) == [("working", 0)]


class Program:
    """The program as its unit runs it."""

    def __init__(self, server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.systemd = folder, Systemd(folder / "systemd", monkeypatch)
        self.systemd.set("vllm.service", ActiveState="active", InvocationID="a", ActiveEnterTimestampMonotonic="1")
        self.request = folder / "request.json"
        self.request.write_text(
            json.dumps({
                "url": server.url, "model": MODEL, "unit": "vllm.service",
                "failures": 3, "answer_seconds": PATIENCE, "load_seconds": 0,
            })
        )  # fmt: skip
        monkeypatch.setenv("RUNTIME_DIRECTORY", str(folder))

    def run(self) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), str(self.request)], capture_output=True, text=True, check=False
        )
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout


def test_the_third_failure_in_a_row_restarts_and_says_why(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(server, tmp_path, monkeypatch)
    assert program.run() == (1, "<5>answering (0 of 3): a question of one token was answered\n")
    assert program.run() == (1, "")
    server.replies = [30.0]
    assert [program.run()[0] for _ in range(2)] == [1, 1]
    code, words = program.run()
    assert code == 0
    assert "vllm_watchdog: the engine hangs, seen 3 times in a row" in words
    assert "\n<3>  where: " in words
    assert "\n<3>  mend:  " in words


def test_a_restart_while_it_looked_is_not_followed_by_another(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(server, tmp_path, monkeypatch)
    server.replies = [30.0]
    assert [program.run()[0] for _ in range(2)] == [1, 1]
    whole = server.chat

    def chat(asked: dict[str, Any]) -> tuple[int, Any]:
        program.systemd.set("vllm.service", InvocationID="b")
        return whole(asked)

    monkeypatch.setattr(server, "chat", chat)
    assert program.run()[0] == 1
    assert json.loads((tmp_path / "state.json").read_text())["failures"] == 0


@pytest.mark.parametrize("kept", ["", "{", "[]", '{"invocation": "a", "new": 1}'])
def test_a_broken_memory_is_forgotten(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: str
) -> None:
    program = Program(server, tmp_path, monkeypatch)
    (tmp_path / "state.json").write_text(kept)
    assert program.run()[0] == 1


def test_a_systemd_that_cannot_be_asked_is_told_and_restarts_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = Program(server, tmp_path, monkeypatch)
    systemctl = program.systemd.home / "bin" / "systemctl"
    systemctl.write_text("#!/bin/sh\necho 'Transport endpoint is not connected' >&2\nexit 1\n")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(program.request)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "systemd does not say how vllm.service is: Transport endpoint is not connected" in done.stderr
    assert not (tmp_path / "state.json").exists()


def test_a_fault_of_the_program_restarts_nothing(tmp_path: Path) -> None:
    # The unit goes on to its command on exit status 0 alone.
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "missing.json")], capture_output=True, check=False
    )
    assert done.returncode == 1
