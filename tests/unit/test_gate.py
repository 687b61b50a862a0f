"""The gate reads the text: every way of answering 200 with nonsense fails (CASES B05, B09, B11 and the field report).

Each case is asked of a real HTTP server on loopback.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gate
import pytest

from fleet.paths import PROJECT
from tests.unit.doubles import MODEL, Server, Systemd, answer, serving

PARIS = r"\bparis\b"
PROGRAM = PROJECT / "roles/vllm_service/files/gate.py"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as started:
        yield started


@pytest.fixture(autouse=True)
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    made = Systemd(tmp_path / "systemd", monkeypatch)
    made.set("vllm.service", ActiveState="active", NRestarts="0")
    return made


def request(server: Server, **more: Any) -> dict[str, Any]:
    """What the module asks of the gate by default."""
    return {
        "url": server.url, "model": MODEL, "unit": "vllm.service", "deadline_seconds": 10, "max_tokens": 32,
        "question": "What is the capital of France?", "expected": PARIS, "filler_repeats": 6, **more,
    }  # fmt: skip


def verdict(server: Server, tmp_path: Path, **more: Any) -> dict[str, Any]:
    """Runs the program as the module does."""
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps(request(server, **more)))
    done = subprocess.run([sys.executable, str(PROGRAM), str(asked)], capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if found["ok"] else 1)
    return found


def refused(server: Server) -> str:
    """The code with which the gate refuses."""
    with pytest.raises(gate.Refused) as found:
        gate.Gate(request(server)).pass_through()
    return found.value.code


def test_a_right_answer_passes_behind_a_real_prefill(server: Server, tmp_path: Path) -> None:
    found = verdict(server, tmp_path)
    assert (found["ok"], found["text"]) == (True, "The capital of France is Paris.")
    (asked,) = server.asked
    (message,) = asked["messages"]
    # Six times two sentences of filler: well over the 64 tokens that are wanted, at four characters a token.
    assert len(message["content"]) > 4 * 64
    assert message["content"].endswith("What is the capital of France?")
    assert (asked["temperature"], asked["model"]) == (0, MODEL)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (answer(None), "EMPTY_ANSWER"),
        (answer(""), "EMPTY_ANSWER"),
        (answer("  \n"), "EMPTY_ANSWER"),
        ({"choices": []}, "EMPTY_ANSWER"),
        ({}, "EMPTY_ANSWER"),
        ([], "NOT_VLLM"),
        ("<html>", "NOT_VLLM"),
        (answer("!!!!!!!!!!!!"), "REPEATED"),
        (answer("! ! ! !"), "REPEATED"),
        (answer("Paris Paris Paris Paris Paris Paris Paris Paris Paris"), "REPEATED"),
        (answer("Paris is is is is is is is is is"), "REPEATED"),
        (answer("<pad><pad><pad>"), "SPECIAL_TOKENS"),
        (answer("Paris<unk>"), "SPECIAL_TOKENS"),
        (answer("Paris<end_of_turn|>"), "SPECIAL_TOKENS"),
        (answer(": ok: ok: ok: ok"), "WRONG_ANSWER"),
        (answer("The capital of France is Lyon."), "WRONG_ANSWER"),
        (answer("Comparison is odious"), "WRONG_ANSWER"),
        (answer("Paris.", prompt_tokens=9), "NO_PREFILL"),
        (answer("Paris", completion_tokens=1), "NO_DECODE"),
        ((500, {"error": "engine"}), "HTTP_500"),
        # vLLM's own words on a model without a template (CASES B11).
        ((400, {"message": "As of transformers v4.44, default chat template is no longer allowed"}), "CHAT_TEMPLATE"),
        ((400, {"message": "ChatTemplateResolutionError: no template"}), "CHAT_TEMPLATE"),
        ((400, {"message": "max_tokens is too large"}), "HTTP_400"),
    ],
)
def test_nonsense_fails(server: Server, reply: Any, code: str) -> None:
    server.replies = [reply]
    assert refused(server) == code
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "first",
    [
        answer(None, reasoning_content="Let me think", finish_reason="length"),
        answer("", reasoning="Let me think"),
        answer("<think>France has Paris as", finish_reason="length"),
    ],
)
def test_a_reasoning_model_that_ran_out_is_asked_again_with_more(server: Server, first: dict[str, Any]) -> None:
    server.replies = [first, answer("<think>hm</think>Paris.")]
    assert gate.Gate(request(server)).pass_through() == "Paris."
    assert [asked["max_tokens"] for asked in server.asked] == [32, 256]


def test_one_that_never_ends_reasoning_is_refused_after_the_second(server: Server) -> None:
    server.replies = [answer(None, reasoning="hm")]
    assert refused(server) == "OUT_OF_BUDGET"
    assert len(server.asked) == 2


def test_reasoning_alone_does_not_count_as_the_answer(server: Server) -> None:
    server.replies = [answer("<think>Paris?</think>I do not know.")]
    assert refused(server) == "WRONG_ANSWER"


def test_a_quick_question_is_bare_and_may_be_short(server: Server, tmp_path: Path) -> None:
    server.replies = [answer("Paris", prompt_tokens=9, completion_tokens=1)]
    assert verdict(server, tmp_path, quick=True)["ok"]
    assert server.asked[0]["messages"][0]["content"] == "What is the capital of France?"


def test_an_answer_that_does_not_come_ends_with_the_patience(server: Server, tmp_path: Path) -> None:
    server.replies = [30.0]
    began = time.monotonic()
    found = verdict(server, tmp_path, quick=True, answer_seconds=0.5, deadline_seconds=30)
    assert (found["ok"], found["code"]) == (False, "NO_ANSWER")
    assert time.monotonic() - began < 10


def test_a_start_is_waited_for_and_not_asked_before_the_model_is_listed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.models = None
    sleeps: list[float] = []

    def load(seconds: float) -> None:
        sleeps.append(seconds)
        assert server.asked == []
        if len(sleeps) == 2:
            server.models = [MODEL]

    monkeypatch.setattr(time, "sleep", load)
    assert "Paris" in gate.Gate(request(server, deadline_seconds=20)).pass_through()
    assert len(sleeps) == 2


@pytest.mark.parametrize(
    "state", [{"ActiveState": "failed", "NRestarts": "0"}, {"ActiveState": "inactive", "NRestarts": "0"}]
)
def test_a_unit_that_failed_ends_the_wait_at_once(server: Server, systemd: Systemd, state: dict[str, str]) -> None:
    server.models = None
    systemd.set("vllm.service", **state)
    began = time.monotonic()
    assert refused(server) == "UNIT_FAILED"
    assert time.monotonic() - began < 5


def test_a_model_under_another_name_and_a_server_of_another_kind_are_told(server: Server) -> None:
    server.models = ["another"]
    assert refused(server) == "MODEL_NAME"
    server.models = {"detail": "hello"}
    assert refused(server) == "NOT_VLLM"


def test_a_load_that_takes_too_long_is_timed_out(server: Server, tmp_path: Path) -> None:
    server.models = None
    assert verdict(server, tmp_path, deadline_seconds=1)["code"] == "TIMED_OUT"
