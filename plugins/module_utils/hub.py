"""What a model hub says of a model: its files' sizes and its small files. Standard library alone.

The token is read from its file on this host, here, and goes into one header; it is in no argument, fact or message.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

TIMEOUT_SECONDS = 10
_LARGEST_REPLY_BYTES = 32 * 1024 * 1024


class HubError(Exception):
    """The hub did not tell. `status` is its HTTP status, 0 where it did not answer at all."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a redirect, and leaves the token behind where it leads to another server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        following = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if following is not None and _server(newurl) != _server(req.full_url):
            following.remove_header("Authorization")
        return following


class Hub:
    """One model on one hub, asked as `huggingface_hub` asks it.

    Args:
        endpoint: base address, `https://huggingface.co` or a mirror's (what vLLM takes as HF_ENDPOINT).
        model: name on the hub, `owner/name`.
        token_file: file of the token on this host; one that is not there sends none.
    """

    def __init__(self, endpoint: str, model: str, token_file: str = "") -> None:
        self.endpoint = endpoint.rstrip("/")
        self._model = quote(model, safe="/")
        self._token = _token(token_file)
        self.has_token = bool(self._token)
        self._opener = urllib.request.build_opener(_Redirects())

    def sizes(self) -> dict[str, int]:
        """Size of every file in the model's top folder, bytes, by name.

        Raises:
            HubError: the hub refuses, does not know the model, or does not answer.
        """
        files = parsed(self._get(f"/api/models/{self._model}?blobs=true")).get("siblings")
        if not isinstance(files, list):
            raise HubError(0, f"{self.endpoint} answers without a list of files; it is no model hub")
        # vLLM loads what lies in the top folder.
        return {file["rfilename"]: int(file.get("size") or 0) for file in files if "/" not in file["rfilename"]}

    def read(self, name: str) -> bytes:
        """One small file of the model's main revision.

        Raises:
            HubError: as for `sizes`; a gated model lists its files to everyone and hands out none.
        """
        return self._get(f"/{self._model}/resolve/main/{quote(name)}")

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(self.endpoint + path)
        if self._token:
            request.add_header("Authorization", f"Bearer {self._token}")
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as reply:
                body: bytes = reply.read(_LARGEST_REPLY_BYTES)
        except urllib.error.HTTPError as error:
            error.close()
            raise HubError(error.code, f"{self.endpoint} answers {error.code} for {path}") from None
        except ValueError:
            # The library's own words hold the header, and the token with it.
            raise HubError(0, f"{self.endpoint} cannot be asked: the address or the token is malformed") from None
        except (OSError, HTTPException) as error:
            raise HubError(0, f"{self.endpoint} does not answer: {getattr(error, 'reason', error)}") from None
        return body


def _server(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def _token(path: str) -> str:
    try:
        return Path(path).read_text().strip() if path else ""
    except (OSError, ValueError):
        return ""


def parsed(body: bytes) -> dict[str, Any]:
    """A JSON object, empty where it is none."""
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
