"""Sessions of the local AWS: StartSession gives a websocket, behind it is a shell on a terminal of the machine."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import secrets
import subprocess
import threading
import uuid
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

from sandbox.standins import session_messages as messages
from sandbox.standins.agents import Agents, ManagedInstance
from sandbox.standins.cloud import Call
from sandbox.standins.local_aws import CREDENTIAL, LocalAws, Refusal
from sandbox.standins.session_messages import Message


class Session:
    """One session: the shell begins when the client has shaken hands."""

    def __init__(self, agent: ManagedInstance) -> None:
        self.id = f"controller-{secrets.token_hex(9)}"
        self.token = secrets.token_urlsafe(32)
        self._agent = agent
        self._shell: subprocess.Popen[bytes] | None = None
        self._sequence = 0

    def end(self) -> None:
        """The agent ends the shell."""
        if self._shell is not None:
            self._shell.kill()

    def serve(self, channel: ServerConnection) -> None:
        """The data channel from its opening to its close."""
        if json.loads(channel.recv())["TokenValue"] != self.token:
            channel.close(1008, "token")
            return
        action = {"ActionType": "SessionType", "ActionParameters": {"SessionType": "Standard_Stream"}}
        asked = {"AgentVersion": "3.3.0.0", "RequestedClientActions": [action]}
        self._send(channel, messages.HANDSHAKE, json.dumps(asked).encode())
        terminal = -1
        expected = 0
        try:
            for data in channel:
                message = messages.unpacked(data if isinstance(data, bytes) else data.encode())
                if message.kind != messages.INPUT:
                    continue
                channel.send(message.acknowledged())
                if message.sequence != expected:
                    continue
                expected += 1
                if message.payload_type == messages.HANDSHAKE_ANSWER:
                    over = {"HandshakeTimeToComplete": 1000000, "CustomerMessage": ""}
                    self._send(channel, messages.HANDSHAKE_OVER, json.dumps(over).encode())
                    terminal = self._begin(channel)
                elif message.payload_type == messages.BYTES:
                    _write(terminal, message.payload)
        finally:
            self.end()

    def _begin(self, channel: ServerConnection) -> int:
        terminal, inner = pty.openpty()
        shell = self._shell = subprocess.Popen(
            ["setsid", "--ctty", *self._agent.machine.command(["sh"], tty=True)],
            cwd=self._agent.machine.folder, env={**self._agent.environment(), "TERM": "xterm-256color"},
            stdin=inner, stdout=inner, stderr=inner,
        )  # fmt: skip
        os.close(inner)
        threading.Thread(target=self._pass_on, args=[channel, terminal, shell], daemon=True).start()
        return terminal

    def _pass_on(self, channel: ServerConnection, terminal: int, shell: subprocess.Popen[bytes]) -> None:
        """What the terminal says, until the shell is gone; then the channel is closed."""
        with contextlib.suppress(ConnectionClosed):
            # The terminal's other end closed: Linux says EIO.
            with contextlib.suppress(OSError):
                while data := os.read(terminal, 1024):
                    self._send(channel, messages.BYTES, data)
            closed = {"MessageType": "channel_closed", "SessionId": self.id, "Output": ""}
            channel.send(Message(messages.CLOSED, json.dumps(closed).encode(), flags=2).packed())
        shell.wait()
        os.close(terminal)
        channel.close()

    def _send(self, channel: ServerConnection, payload_type: int, payload: bytes) -> None:
        flags = 1 if self._sequence == 0 else 0
        channel.send(Message(messages.OUTPUT, payload, self._sequence, payload_type, flags).packed())
        self._sequence += 1


def _write(terminal: int, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(terminal, data) :]


class Sessions:
    """Answers StartSession and TerminateSession."""

    def __init__(self, aws: LocalAws, agents: Agents) -> None:
        self._agents = agents
        self._host = aws.host
        self._cloud = aws.cloud
        self._open: dict[str, Session] = {}
        self._server: Server | None = None
        self._lock = threading.Lock()
        aws.stand_ins.update({"StartSession": self._start, "TerminateSession": self._terminate})

    def _start(self, call: Call) -> dict[str, Any]:
        target = call.parameters["Target"]
        if target not in self._agents or not self._agents[target].online or self._agents[target].terminated:
            raise Refusal("TargetNotConnected", f"{target} is not connected.")
        with self._lock:
            if self._server is None:
                self._server = serve(self._channel, self._host, 0, compression=None, process_request=self._opened)
                threading.Thread(target=self._server.serve_forever, daemon=True).start()
        session = Session(self._agents[target])
        self._open[session.id] = session
        port = self._server.socket.getsockname()[1]
        url = f"ws://{self._host}:{port}/v1/data-channel/{session.id}?role=publish_subscribe"
        return {"SessionId": session.id, "TokenValue": session.token, "StreamUrl": url}

    def _terminate(self, call: Call) -> dict[str, Any]:
        session = self._open.pop(call.parameters["SessionId"], None)
        if session is not None:
            session.end()
        return {"SessionId": call.parameters["SessionId"]}

    def _opened(self, channel: ServerConnection, request: Request) -> Response | None:
        """OpenDataChannel: in the ledger where it is signed; an answer where it is refused."""
        signed = CREDENTIAL.search(request.headers.get("Authorization", ""))
        if signed is not None:
            principal, region, service = signed.groups()
            self._cloud.note(Call(principal, service, "OpenDataChannel", region, {"path": request.path}))
        code = self._cloud.refuse.get("OpenDataChannel")
        return channel.respond(403, code) if code else None

    def _channel(self, channel: ServerConnection) -> None:
        path = channel.request.path if channel.request else ""
        session = self._open.get(path.partition("?")[0].rpartition("/")[2])
        if session is None:
            channel.close(1008, str(uuid.uuid4()))
            return
        with contextlib.suppress(ConnectionClosed):
            session.serve(channel)
