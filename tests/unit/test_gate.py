"""The gate reads the text: every way of answering 200 with nonsense fails (CASES B09, B11 and the field report)."""

from __future__ import annotations

from typing import Any

import gate
import pytest

PARIS = r"\bparis\b"


def body(content: Any, **message: Any) -> dict[str, Any]:
    """A chat completion with this content."""
    return {"choices": [{"message": {"content": content, **message}}]}


def test_a_right_answer_passes() -> None:
    assert gate.read_answer(body("The capital of France is Paris."), PARIS) == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (body(None), "EMPTY_ANSWER"),
        (body(""), "EMPTY_ANSWER"),
        (body("  \n"), "EMPTY_ANSWER"),
        ({"choices": []}, "EMPTY_ANSWER"),
        (body("!!!!!!!!!!!!"), "REPEATED"),
        (body("<pad><pad><pad>"), "SPECIAL_TOKENS"),
        (body("Paris<unk>"), "SPECIAL_TOKENS"),
        (body(": ok: ok: ok: ok"), "WRONG_ANSWER"),
        (body("Comparison is odious"), "WRONG_ANSWER"),
        (body(None, reasoning_content="Let me think"), "OUT_OF_BUDGET"),
    ],
)
def test_nonsense_fails(reply: dict[str, Any], code: str) -> None:
    with pytest.raises(gate.Refused) as refused:
        gate.read_answer(reply, PARIS)
    assert refused.value.code == code


def test_a_reasoning_model_that_ran_out_is_asked_again_with_more(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[int] = []

    def chat(self: gate.Gate, prompt: str, max_tokens: int) -> dict[str, Any]:
        del self, prompt
        budgets.append(max_tokens)
        return body(None, reasoning="hm") if len(budgets) == 1 else body("Paris.")

    monkeypatch.setattr(gate.Gate, "chat", chat)
    asked = gate.Gate(
        {"url": "", "deadline_seconds": 1, "question": "q", "expected": PARIS, "max_tokens": 32, "filler_repeats": 1}
    )
    assert asked.ask() == "Paris."
    assert budgets == [32, 256]
