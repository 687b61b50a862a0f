"""A server that answers as it is told, a systemctl without systemd behind it, and an Ansible module's ends."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "tiny"
IDLE = 'vllm:num_requests_running{engine="0"} 0.0\n'


def answer(content: Any, prompt_tokens: int = 200, completion_tokens: int = 8, **more: Any) -> dict[str, Any]:
    """A chat completion as vLLM sends it."""
    message = {"content": content, **{k: v for k, v in more.items() if k.startswith("reasoning")}}
    return {
        "choices": [{"message": message, "finish_reason": more.get("finish_reason", "stop")}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
    }


class Server:
    """A real HTTP server on loopback.

    Attributes:
        replies: chat completions in turn, the last one for ever: a body, (status, body), or seconds to hang.
        tokens: what the token counters at /metrics say; None for no counters.
        tokens_per_look: how far the counters move with every look at them.
        models: names at /v1/models; None answers 503.
        asked: bodies of the chat completions that came.
    """

    def __init__(self) -> None:
        self.replies: list[Any] = [answer("The capital of France is Paris.")]
        self.tokens: float | None = 100.0
        self.tokens_per_look = 0.0
        self.models: Any = [MODEL]
        self.asked: list[dict[str, Any]] = []
        self.ended = threading.Event()
        self.url = ""
        self.port = 0

    def chat(self, asked: dict[str, Any]) -> tuple[int, Any]:
        """The next reply."""
        self.asked.append(asked)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, float):
            self.ended.wait(reply)
            return 500, {}
        if isinstance(reply, tuple):
            return reply[0], reply[1]
        if self.tokens is not None:
            self.tokens += 1
        return 200, reply

    def metrics(self) -> str:
        """Counters with the names that vLLM 0.32.0 gives them."""
        if self.tokens is None:
            return IDLE
        self.tokens += self.tokens_per_look
        labels = '{engine="0",model_name="tiny"}'
        return (
            f"{IDLE}vllm:prompt_tokens_total{labels} 500.0\n"
            f"vllm:generation_tokens_total{labels} {self.tokens}\n"
            f"vllm:kv_cache_usage_perc{labels} 0.25\n"
        )


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Serves until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self.send(200, server.metrics())
            elif self.path == "/v1/models" and server.models is not None:
                listed = (
                    server.models if isinstance(server.models, dict) else {"data": [{"id": m} for m in server.models]}
                )
                self.send(200, json.dumps(listed))
            else:
                self.send(503, "")

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = server.chat(asked)
            self.send(status, body if isinstance(body, str) else json.dumps(body))

        def send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.port = http.server_address[1]
    server.url = f"http://127.0.0.1:{server.port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        http.shutdown()
        http.server_close()


_SYSTEMCTL = """#!{python}
import json, sys, time, pathlib
home = pathlib.Path({home!r})
words = [w for w in sys.argv[1:] if w != "--quiet"]
verb, rest = words[0], words[1:]
path = home / "units.json"
units = json.loads(path.read_text()) if path.exists() else {{}}
with (home / "calls").open("a") as calls:
    calls.write(" ".join(words) + "\\n")
name = next((w for w in rest if not w.startswith("-")), "")
unit = units.setdefault(name, {{"ActiveState": "inactive", "UnitFileState": "disabled", "NRestarts": "0"}})
code = 0
if verb == "show":
    asked = next(w for w in rest if w.startswith("--property=")).split("=", 1)[1].split(",")
    known = {{"NeedDaemonReload": "no", "ActiveEnterTimestampMonotonic": "0", **unit}}
    for one in asked:
        print(known.get(one, "") if "--value" in rest else f"{{one}}={{known.get(one, '')}}")
elif verb == "is-active":
    code = 0 if unit["ActiveState"] == "active" else 3
elif verb == "is-enabled":
    code = 0 if unit["UnitFileState"] == "enabled" else 1
elif verb in ("start", "restart", "reload"):
    file = home / "units" / name
    hook = home / f"on-{{verb}}.py"
    if hook.exists():
        exec(hook.read_text())
    if not file.exists():
        code = 5
    elif (home / "start-fails").exists():
        code, unit["ActiveState"] = 1, "failed"
    elif verb != "reload" and unit["ActiveState"] != "active" or verb == "restart":
        unit["ActiveState"] = "active"
        unit["ActiveEnterTimestampMonotonic"] = str(int(time.monotonic() * 1e6))
        unit["InvocationID"] = str(time.monotonic())
        for line in file.read_text().splitlines():
            if line.startswith("ExecStartPre=") and "prestart.py" in line:
                (home / "started").write_text(line.split()[-1] + "\\n")
elif verb == "stop":
    unit["ActiveState"] = "inactive"
elif verb == "enable":
    unit["UnitFileState"] = "enabled"
elif verb == "disable":
    unit["UnitFileState"] = "disabled"
elif verb == "daemon-reload":
    for known in units.values():
        known["NeedDaemonReload"] = "no"
path.write_text(json.dumps(units))
sys.exit(code)
"""


class Systemd:
    """A `systemctl` on the PATH that keeps states in a file: what our code asks of systemd, and no more."""

    def __init__(self, home: Path, monkeypatch: Any) -> None:
        from ansible.module_utils import service_state, systemd_unit

        self.home = home
        self.units = home / "units"
        self.units.mkdir(parents=True)
        programs = home / "bin"
        programs.mkdir()
        for name, text in (
            ("systemctl", _SYSTEMCTL.format(python=sys.executable, home=str(home))),
            ("journalctl", f"#!/bin/sh\ncat {home}/journal 2>/dev/null\n"),
        ):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin")
        monkeypatch.setattr(systemd_unit, "UNITS", self.units)
        monkeypatch.setattr(service_state, "LOCK", home / "lock")
        monkeypatch.setattr(service_state, "STARTED", home / "started")

    def calls(self) -> list[str]:
        """What systemctl was called with, without the questions."""
        log = self.home / "calls"
        lines = log.read_text().splitlines() if log.exists() else []
        return [line for line in lines if not line.startswith(("show", "is-"))]

    def state(self, unit: str) -> dict[str, str]:
        """A unit's properties."""
        found: dict[str, dict[str, str]] = json.loads((self.home / "units.json").read_text())
        return found[unit]

    def set(self, unit: str, **properties: str) -> None:
        """Changes a unit's properties behind our code's back."""
        path = self.home / "units.json"
        units = json.loads(path.read_text()) if path.exists() else {}
        units[unit] = {**units.get(unit, {}), **properties}
        path.write_text(json.dumps(units))


def with_sshd(folder: Path) -> str:
    """A PATH whose `ss` knows of an SSH server alone."""
    folder.mkdir()
    (folder / "ss").write_text(
        "#!/bin/sh\necho 'tcp LISTEN 0 128 0.0.0.0:22 0.0.0.0:* users:((\"sshd\",pid=700,fd=3))'\n"
    )
    (folder / "ss").chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


class Ended(Exception):
    """A module came to its end; `result` is what it would have told."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("msg", ""))
        self.result = result


class Module:
    """What our modules ask of an Ansible module."""

    def __init__(self, params: dict[str, Any], *, check_mode: bool = False, tmpdir: str = "/tmp") -> None:
        self.params, self.check_mode, self.tmpdir = params, check_mode, tmpdir
        self.warned: list[str] = []

    def warn(self, warning: str) -> None:
        self.warned.append(warning)

    def exit_json(self, **result: Any) -> None:
        raise Ended({"failed": False, "warnings": self.warned, **result})

    def fail_json(self, **result: Any) -> None:
        raise Ended({**result, "failed": True})


def ends(run: Callable[[], Any]) -> dict[str, Any]:
    """Runs a module's body; its result."""
    try:
        run()
    except Ended as end:
        return end.result
    raise AssertionError("the module came to no end")


def wait_for(claim: Callable[[], bool], seconds: float = 5) -> bool:
    """Whether the claim comes true in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if claim():
            return True
        time.sleep(0.02)
    return claim()
