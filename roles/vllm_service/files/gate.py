#!/usr/bin/env python3
"""Asks a vLLM server a question and reads the answer: `gate.py REQUEST.json` prints `{"ok", "code", "detail", "text"}`.

A server that answers 200 with nonsense, nothing, or one token over and over is not up. The gate waits for the server,
then puts filler before the question, so that prefill does real work, and checks by the server's own count that it did
and that tokens were decoded one by one; `quick` asks the bare question.
Standard library alone; sources of the rules: CASES B02, B05, B09, B11 and the field report.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

_SPECIAL = re.compile(r"<(pad|unk|eos|bos|s|/s|\|[a-z_]+\|?|[a-z_]+\|)>", re.I)
# One unit of up to 24 characters, eight times in a row.
_REPEATED = re.compile(r"(\S.{0,23}?)\1{7}", re.S)
_CHAT_TEMPLATE = re.compile(r"chat.?template", re.I)
# Four blocks of the KV cache, and a first decode step behind the prefill: the two kernels that differ (FACTS).
_PROMPT_TOKENS, _ANSWER_TOKENS = 64, 2
_FILLER = (
    "The harbor keeps a quiet record of every boat that came in before the rain. "
    "Seven ladders lean on the north wall and nobody remembers who carried them there. "
)


class Refused(Exception):
    """The server is not fit to serve; `code` is a fixed word, `detail` the evidence."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code, self.detail = code, detail


def read_answer(body: dict[str, Any], expected: str) -> str:
    """The answer's text where it is the expected one; raises Refused for every way of not being it."""
    choice = (body.get("choices") or [{}])[0]
    message = choice.get("message") or {}
    text = message.get("content")
    thinks = message.get("reasoning_content") or message.get("reasoning")
    cut_off = choice.get("finish_reason") == "length" and text and "<think>" in text and "</think>" not in text
    if cut_off or (thinks and not (text or "").strip()):
        raise Refused("OUT_OF_BUDGET", "the model was still reasoning when its tokens ran out")
    if not text or not text.strip():
        raise Refused("EMPTY_ANSWER", f"content is {text!r}")
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.S)
    if _SPECIAL.search(text):
        raise Refused("SPECIAL_TOKENS", f"the answer holds special tokens: {text[:120]!r}")
    squeezed = re.sub(r"\s+", " ", text)
    if _REPEATED.search(squeezed) or (len(squeezed) >= 4 and len(set(squeezed.replace(" ", ""))) == 1):
        raise Refused("REPEATED", f"the same over and over: {text[:120]!r}")
    if not re.search(expected, text, re.I):
        raise Refused("WRONG_ANSWER", f"{text[:200]!r} does not match {expected!r}")
    return text


def read_usage(body: dict[str, Any]) -> None:
    """Prefill and decode both did work, by the server's own count; raises Refused where not."""
    usage = body.get("usage") or {}
    prompt, answer = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    if prompt < _PROMPT_TOKENS:
        raise Refused("NO_PREFILL", f"the prompt had {prompt} tokens and {_PROMPT_TOKENS} are wanted: more filler")
    if answer < _ANSWER_TOKENS:
        raise Refused(
            "NO_DECODE", f"the answer had {answer} tokens and {_ANSWER_TOKENS} are wanted: ask for a sentence"
        )


class Gate:
    """One server under question."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.url: str = request["url"]
        self.deadline = time.monotonic() + request["deadline_seconds"]

    def pass_through(self) -> str:
        """Waits until the server lists the model, then asks; returns the answer's text."""
        self.wait_for_model()
        return self.ask()

    def wait_for_model(self) -> None:
        """Until the model is listed, the unit has failed, or the time is up."""
        unit = self.request["unit"]
        starts = _restarts(unit)
        while time.monotonic() < self.deadline:
            try:
                found = self.call("/v1/models")
                if not isinstance(found, dict) or not isinstance(found.get("data"), list):
                    raise Refused("NOT_VLLM", f"{self.url} is served by something that lists no models")
                listed = [model.get("id") for model in found["data"]]
                if self.request["model"] not in listed:
                    raise Refused("MODEL_NAME", f"{listed} are served and {self.request['model']!r} is wanted")
                return
            except urllib.error.HTTPError as error:
                if error.code in (401, 403, 404):
                    raise Refused("NOT_VLLM", f"{self.url}/v1/models is answered with {error.code}") from error
            except (OSError, ValueError, http.client.HTTPException):
                # Refused or cut off: still loading.
                pass
            if _restarts(unit) - starts >= 2 or _state(unit) in ("failed", "inactive"):
                raise Refused("UNIT_FAILED", f"{unit} is {_state(unit)} after {_restarts(unit)} restarts")
            time.sleep(1)
        raise Refused("TIMED_OUT", f"the model was not listed within {self.request['deadline_seconds']} s")

    def ask(self) -> str:
        """Asks the question, with more tokens once where a reasoning model ran out of them."""
        filler = "" if self.request.get("quick") else _FILLER * self.request["filler_repeats"]
        budget = self.request["max_tokens"]
        for attempt in (budget, budget * 8):
            body = self.chat(filler + self.request["question"], attempt)
            try:
                text = read_answer(body, self.request["expected"])
                if not self.request.get("quick"):
                    read_usage(body)
                return text
            except Refused as refused:
                if refused.code != "OUT_OF_BUDGET" or attempt != budget:
                    raise
        raise AssertionError("unreachable")

    def chat(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """One greedy chat completion."""
        payload = {
            "model": self.request["model"],
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": max_tokens,
        }
        try:
            body = self.call("/v1/chat/completions", payload)
            if not isinstance(body, dict):
                raise Refused("NOT_VLLM", f"the answer is no object: {str(body)[:120]}")
            return body
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:300]
            refused = error.code == 400 and _CHAT_TEMPLATE.search(text)
            raise Refused("CHAT_TEMPLATE" if refused else f"HTTP_{error.code}", text) from error
        except ValueError as error:
            raise Refused("NOT_VLLM", f"the answer is no JSON: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Refused("NO_ANSWER", str(error)) from error

    def call(self, path: str, payload: dict[str, Any] | None = None) -> Any:
        """GET, or POST of JSON; the body as JSON. Never through a proxy: the server is on this host."""
        data = None if payload is None else json.dumps(payload).encode()
        headers = {"Content-Type": "application/json"}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        left = max(1.0, self.deadline - time.monotonic())
        left = min(left, self.request.get("answer_seconds", left))
        with opener.open(urllib.request.Request(self.url + path, data, headers), timeout=left) as reply:
            return json.loads(reply.read())


def _show(unit: str, name: str) -> str:
    done = subprocess.run(
        ["systemctl", "show", "--value", f"--property={name}", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


def _restarts(unit: str) -> int:
    return int(_show(unit, "NRestarts") or 0)


def _state(unit: str) -> str:
    return _show(unit, "ActiveState")


def main(path: str) -> int:
    """Prints the verdict; the exit status is 0 where the server is fit to serve."""
    began = time.monotonic()
    try:
        text = Gate(json.loads(Path(path).read_text())).pass_through()
        verdict = {"ok": True, "code": "OK", "detail": "", "text": text}
    except Refused as refused:
        verdict = {"ok": False, "code": refused.code, "detail": refused.detail, "text": ""}
    verdict["seconds"] = round(time.monotonic() - began, 1)
    print(json.dumps(verdict))
    return 0 if verdict["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
