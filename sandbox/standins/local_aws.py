"""The local AWS as one HTTP server: moto for what it does, this project's stand-ins for what it does not execute."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import BaseWSGIServer, make_server
from werkzeug.wrappers import Request, Response

from sandbox.standins.cloud import Call, Cloud

CREDENTIAL = re.compile(r"Credential=([^/]+)/\d+/([^/]+)/([^/]+)/")


class Refusal(Exception):
    """An error in AWS's own words, for the JSON protocol of Systems Manager."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Handler(MotoRequestHandler):  # type: ignore[misc]
    """moto's, without a line for each request."""

    def log_request(self, *_: object) -> None:
        """Says nothing."""


class LocalAws:
    """One server; `stand_ins` maps an operation of Systems Manager to what answers it, all else is moto's."""

    def __init__(self, bind: str = "127.0.0.1", port: int = 0) -> None:
        self.cloud = Cloud()
        self.stand_ins: dict[str, Callable[[Call], dict[str, Any]]] = {}
        # What happens besides when moto has carried out an operation of EC2's, by the operation's name.
        self.after: dict[str, Callable[[Call], None]] = {}
        self.pages: dict[str, Callable[[Any], Any]] = {}
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server: BaseWSGIServer = make_server(bind, port, self, True, request_handler=_Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        host, found = self._server.server_address[:2]
        self.host = str(host)
        self.url = f"http://{self.host}:{found}"

    def start(self) -> None:
        """Serves in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Serves no more."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """One request: a stand-in's page, a call that is turned away, a stand-in's answer, or moto's."""
        path = environ.get("PATH_INFO", "")
        if path in self.pages:
            return self._page(path, Request(environ))(environ, start_response)
        call = _read(environ)
        if call is None:
            return self._moto(environ, start_response)  # type: ignore[no-any-return]
        if self.cloud.latency_ms:
            time.sleep(self.cloud.latency_ms / 1000)
        if self.cloud.note(call):
            return _refused(call, "ThrottlingException", "Rate exceeded")(environ, start_response)
        if call.operation in self.cloud.refuse:
            return _refused(call, self.cloud.refuse[call.operation], "Refused")(environ, start_response)
        answer = self.stand_ins.get(call.operation) if call.service == "ssm" else None
        if call.service == "ec2" and call.operation in self.after:
            done = Response.from_app(self._moto, environ)
            if done.status_code == 200:
                self.after[call.operation](call)
            return done(environ, start_response)
        if answer is None:
            return self._moto(environ, start_response)  # type: ignore[no-any-return]
        try:
            response = _json(answer(call), 200)
        except Refusal as refusal:
            response = _refused(call, refusal.code, str(refusal))
        return response(environ, start_response)

    def _page(self, path: str, request: Request) -> Response:
        text = request.get_data(as_text=True)
        return _json(self.pages[path](json.loads(text) if text else None), 200)


def _json(answer: Any, status: int) -> Response:
    return Response(json.dumps(answer), status, content_type="application/x-amz-json-1.1")


def _refused(call: Call, code: str, message: str) -> Response:
    if call.service == "ssm":
        return _json({"__type": code, "message": message}, 400)
    throttled, status = code == "ThrottlingException", 403
    if throttled:
        code, status = "SlowDown" if call.service == "s3" else "RequestLimitExceeded", 503
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    if call.service == "s3":
        return Response(error, status, content_type="application/xml")
    text = f"<Response><Errors>{error}</Errors><RequestID>0</RequestID></Response>"
    return Response(text, status, content_type="text/xml")


def _read(environ: dict[str, Any]) -> Call | None:
    """The request as a call; None where it is not signed. A body that is read is put back for moto."""
    signed = CREDENTIAL.search(environ.get("HTTP_AUTHORIZATION", ""))
    if signed is None:
        return None
    principal, region, service = signed.groups()
    if service == "s3":
        operation, parameters = _s3_operation(environ)
        return Call(principal, service, operation, region, parameters)
    request = Request(environ)
    text = request.get_data(as_text=True)
    environ["wsgi.input"] = io.BytesIO(text.encode())
    target = environ.get("HTTP_X_AMZ_TARGET", "")
    if target:
        return Call(principal, service, target.partition(".")[2], region, json.loads(text or "{}"))
    form = {name: values[0] for name, values in parse_qs(text or environ.get("QUERY_STRING", "")).items()}
    return Call(principal, service, form.pop("Action", ""), region, form)


def _s3_operation(environ: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """AWS's name of an S3 request, by method, path and query."""
    method, query = environ["REQUEST_METHOD"], parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
    bucket, _, key = environ.get("PATH_INFO", "").lstrip("/").partition("/")
    parameters: dict[str, Any] = {"Bucket": bucket, "Key": key, **{name: value[0] for name, value in query.items()}}
    if key:
        names = {"GET": "GetObject", "HEAD": "HeadObject", "PUT": "PutObject", "DELETE": "DeleteObject"}
        return names.get(method, f"{method}Object"), parameters
    for word in ("location", "encryption", "publicAccessBlock", "lifecycle", "policy", "versioning"):
        if word in query:
            return f"{method.title()}Bucket{word[0].upper()}{word[1:]}", parameters
    if "delete" in query:
        return "DeleteObjects", parameters
    names = {"GET": "ListObjectsV2" if bucket else "ListBuckets", "HEAD": "HeadBucket", "PUT": "CreateBucket"}
    return names.get(method, f"{method}Bucket"), parameters
