"""A package index: what it holds and with which digests, as a folder or served in the newer form, as JSON."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class Index:
    """A simple index below a folder; pip of this process and its children is pointed to it alone."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.digests: dict[str, str] = {}
        (folder / "simple").mkdir(parents=True)
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"file://{folder}/simple")
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
            monkeypatch.delenv(name, raising=False)

    def add(self, distribution: str, name: str, content: bytes, digest: str | None = None) -> None:
        """Adds a file; the index tells its sha256, or another one."""
        page = self.folder / "simple" / distribution
        page.mkdir(exist_ok=True)
        (page / name).write_bytes(content)
        told = self.digests[name] = digest or hashlib.sha256(content).hexdigest()
        with (page / "index.html").open("a") as file:
            file.write(f'<a href="{name}#sha256={told}">{name}</a>\n')

    @contextmanager
    def as_json(self) -> Iterator[None]:
        """Serves the files with JSON pages on loopback; pip is pointed there."""
        index = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = index.folder / self.path.strip("/")
                content, kind = path.read_bytes() if path.is_file() else b"", "application/gzip"
                if path.is_dir():
                    files = [
                        {"filename": file.name, "url": file.name, "hashes": {"sha256": index.digests[file.name]}}
                        for file in path.glob("*.gz")
                    ]
                    page = {"meta": {"api-version": "1.0"}, "name": path.name, "files": files}
                    content, kind = json.dumps(page).encode(), "application/vnd.pypi.simple.v1+json"
                self.send_response(200 if content else 404)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()


def wheel(name: str, version: str, files: dict[str, str] | None = None) -> bytes:
    """A wheel of these files; by default of one module that knows its version."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        info = f"{name}-{version}.dist-info"
        files = files or {f"{name}.py": f"version = {version!r}\n"}
        for path, text in files.items():
            file.writestr(path, text)
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: a\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in files))
    return packed.getvalue()


def sdist(version: str, files: dict[str, str], *, says: str = "") -> bytes:
    """An sdist of vLLM whose setup.py must not run; its metadata say `says`, else the version."""
    told = f"Metadata-Version: 2.4\nName: vllm\nVersion: {says or version}\n"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, text in {"PKG-INFO": told, "setup.py": "raise SystemExit('setup.py ran')\n", **files}.items():
            member = tarfile.TarInfo(f"vllm-{version}/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return packed.getvalue()
