"""A flat apt archive as NVIDIA's is, over HTTP: made and signed by dpkg-deb, apt-ftparchive and gpg."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

RING = "usr/share/keyrings/cuda-archive-keyring.gpg"
KEYRING = "cuda-keyring_1.1-1_all.deb"


class Key:
    """A throw-away key."""

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        home.mkdir(mode=0o700)
        self.gpg("--passphrase", "", "--quick-generate-key", name, "ed25519", "sign", "never")
        listing = self.gpg("--list-keys", "--with-colons").decode()
        self.fingerprint = next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr"))
        self.public = self.gpg("--export")

    def gpg(self, *words: str) -> bytes:
        return run("gpg", "--homedir", str(self.home), "--batch", "--yes", "--quiet", *words)


class Archive:
    """The archive's folder, served at `url`."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url

    def package(self, name: str, files: Mapping[str, bytes], script: str = "") -> bytes:
        """Puts a package under its name and version, such as cuda-keyring_1.1-1_all.deb; its bytes."""
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder) / "tree"
            (tree / "DEBIAN").mkdir(parents=True, mode=0o755)
            own, version, architecture = name.removesuffix(".deb").split("_")
            fields = {"Package": own, "Version": version, "Architecture": architecture, "Maintainer": "a <a@b.example>"}
            lines = [f"{key}: {value}\n" for key, value in {**fields, "Description": own}.items()]
            (tree / "DEBIAN" / "control").write_text("".join(lines))
            if script:
                (tree / "DEBIAN" / "postinst").write_text(script)
                (tree / "DEBIAN" / "postinst").chmod(0o755)
            for path, content in files.items():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                (tree / path).write_bytes(content)
            run("dpkg-deb", "--root-owner-group", "-Zgzip", "-b", str(tree), str(self.folder / name))
        return (self.folder / name).read_bytes()

    def index(self) -> None:
        """Lists what is there, with digests."""
        (self.folder / "Packages").write_bytes(run("apt-ftparchive", "packages", ".", cwd=self.folder))
        (self.folder / "Release").unlink(missing_ok=True)
        (self.folder / "InRelease").unlink(missing_ok=True)
        (self.folder / "Release").write_bytes(run("apt-ftparchive", "release", ".", cwd=self.folder))

    def sign(self, key: Key) -> None:
        """Signs the index."""
        self.index()
        key.gpg("--clearsign", "--output", str(self.folder / "InRelease"), str(self.folder / "Release"))

    def flip(self, name: str, at: int) -> None:
        """Changes one bit of a file."""
        content = bytearray((self.folder / name).read_bytes())
        content[at] ^= 1
        (self.folder / name).write_bytes(content)


@contextmanager
def keys() -> Iterator[tuple[Key, Key]]:
    """The archive's key and somebody else's; gpg's agents are ended with them."""
    # An agent's socket lies beside its keys, and its path must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        homes = [Path(folder) / name for name in ("own", "other")]
        try:
            yield Key(homes[0], "archive"), Key(homes[1], "somebody else")
        finally:
            for home in homes:
                run("gpgconf", "--homedir", str(home), "--kill", "all")


@contextmanager
def archive(folder: Path) -> Iterator[Archive]:
    """An archive, empty and served on loopback."""
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield Archive(folder, f"http://127.0.0.1:{served.server_port}")
        served.shutdown()


def run(*argv: str, cwd: Path | None = None) -> bytes:
    """What a program prints; it must succeed."""
    environment = {**os.environ, "LC_ALL": "C"}
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, check=True).stdout
