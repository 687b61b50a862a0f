"""Which Rust a host needs, and whether it runs, asked of the real rustup."""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from plugins.modules.rust_toolchain import Toolchain, wanted_toolchains

RUSTUP = shutil.which("rustup", path=f"{os.environ['PATH']}:{Path.home() / '.cargo' / 'bin'}")
needs_rustup = pytest.mark.skipif(RUSTUP is None, reason="no rustup on this machine")


class Ended(Exception):
    """The module came to its end; `result` is what it told."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__(result.get("msg", ""))
        self.result = result


class Module:
    """What the toolchain asks of an Ansible module."""

    def __init__(self, *, check_mode: bool = False, **params: Any) -> None:
        self.params = {"toolchain": "", "releases": [], "server": "http://127.0.0.1:9", "sha256": {}, **params}
        self.check_mode = check_mode

    def exit_json(self, **result: Any) -> None:
        raise Ended(result)

    def fail_json(self, **result: Any) -> None:
        raise Ended({**result, "failed": True})


def release(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "method": "source", "built": False, "fetched": True, "rust_toolchain": "1.95", **more}


@pytest.mark.parametrize(
    ("pinned", "releases", "toolchains", "unknown", "words"),
    [
        ("", [release("a", method="wheel")], [], [], "nothing is built from source here, so no Rust is needed"),
        ("1.96.1", [release("a", method="wheel")], [], [], "nothing is built from source here, so no Rust is needed"),
        ("", [release("a")], ["1.95"], [], "Rust 1.95 is needed: the sources of a ask for it"),
        ("1.96.1", [release("a")], ["1.96.1"], [], "Rust 1.96.1 is needed for a: rust_toolchain says so"),
        (
            "",
            [release("a"), release("b", rust_toolchain="1.91"), release("c", method="wheel")],
            ["1.91", "1.95"],
            [],
            "Rust 1.91 and 1.95 is needed: the sources of a, b ask for it",
        ),
        (
            "",
            [release("a", fetched=False, rust_toolchain="")],
            [],
            ["a"],
            "the source of a will say which Rust it needs once it is fetched",
        ),
        ("", [release("a", rust_toolchain="")], [], [], "the sources of a ask for no Rust toolchain"),
    ],
)
def test_the_sources_decide_which_rust(
    pinned: str, releases: list[dict[str, Any]], toolchains: list[str], unknown: list[str], words: str
) -> None:
    assert wanted_toolchains(pinned, releases) == (toolchains, unknown, words)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """An installation with this machine's own rustup, its toolchain under the name of its channel, such as 1.95."""
    assert RUSTUP is not None
    bin_folder = tmp_path / "cargo" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("rustup", "cargo", "rustc"):
        (bin_folder / name).symlink_to(Path(RUSTUP).resolve())
    (tmp_path / "rustup" / "toolchains").mkdir(parents=True)
    (tmp_path / "rustup" / "toolchains" / f"{channel()}-{facts()['host']}").symlink_to(sysroot())
    return tmp_path


def facts() -> dict[str, str]:
    said = subprocess.run([rustc(), "-vV"], capture_output=True, text=True, check=True).stdout
    return dict(line.split(": ", 1) for line in said.splitlines() if ": " in line)


def rustc() -> str:
    return str(Path(str(RUSTUP)).with_name("rustc"))


def channel() -> str:
    return ".".join(facts()["release"].split(".")[:2])


def sysroot() -> str:
    return subprocess.run([rustc(), "--print", "sysroot"], capture_output=True, text=True, check=True).stdout.strip()


def run(**more: Any) -> dict[str, Any]:
    with pytest.raises(Ended) as caught:
        Toolchain(Module(**more)).run()
    return caught.value.result


@needs_rustup
def test_a_channel_of_two_numbers_is_met_by_its_version(home: Path) -> None:
    found = run(home=str(home), releases=[release("a", rust_toolchain=channel())])
    assert not found["changed"]
    assert found["versions"][channel()]["cargo"].startswith(f"cargo {channel()}.")
    assert run(home=str(home), toolchain="9.9", releases=[release("a")], check_mode=True)["changed"]


@needs_rustup
def test_another_toolchain_than_the_one_asked_for_does_not_count(home: Path) -> None:
    # The name says 1.50, and what lies there is another version.
    (home / "rustup" / "toolchains" / f"1.50-{facts()['host']}").symlink_to(sysroot())
    assert run(home=str(home), toolchain="1.50", releases=[release("a")], check_mode=True)["changed"]


def test_a_host_that_builds_nothing_is_left_alone(tmp_path: Path) -> None:
    found = run(home=str(tmp_path / "rust"), releases=[release("a", method="wheel")])
    assert found == {
        "changed": False, "versions": {}, "decision": "nothing is built from source here, so no Rust is needed",
    }  # fmt: skip
    assert not (tmp_path / "rust").exists()


def test_a_bare_host_in_check_mode_says_what_it_does_not_know_yet(tmp_path: Path) -> None:
    unfetched = release("a", fetched=False, rust_toolchain="")
    found = run(home=str(tmp_path / "rust"), releases=[unfetched], check_mode=True)
    assert (found["changed"], found["decision"]) == (
        True,
        "the source of a will say which Rust it needs once it is fetched",
    )


def test_an_unknown_machine_or_server_is_told(tmp_path: Path) -> None:
    found = run(home=str(tmp_path / "rust"), releases=[release("a")], rustup_version="1.28.2")
    assert found["failed"]
    assert found["msg"].startswith("rust: no digest of rustup-init is known for")
    digests = {os.uname().machine: "0" * 64}
    found = run(home=str(tmp_path / "rust"), releases=[release("a")], rustup_version="1.28.2", sha256=digests)
    assert "cannot be read" in found["msg"]
    assert "\n  where: " in found["msg"]
    assert "\n  mend:  " in found["msg"]


# Stands where rustup-init does: puts the toolchain in place that it is asked for.
INIT = b"""#!/bin/sh
mkdir -p "$CARGO_HOME/bin" "$RUSTUP_HOME"
for name in rustc cargo; do
  printf '#!/bin/sh\\necho %s 1.95.0\\n' "$name" >"$CARGO_HOME/bin/$name"
  chmod 755 "$CARGO_HOME/bin/$name"
done
"""


@pytest.mark.parametrize("flipped", [False, True])
def test_a_changed_rustup_init_is_refused_before_it_runs(tmp_path: Path, flipped: bool) -> None:
    served = bytearray(INIT)
    served[-2] ^= flipped
    machine = os.uname().machine
    file = tmp_path / "server" / "rustup/archive/1.28.2" / f"{machine}-unknown-linux-gnu" / "rustup-init"
    file.parent.mkdir(parents=True)
    file.write_bytes(served)
    home = tmp_path / "rust"
    with serving(tmp_path / "server") as url:
        digests = {machine: hashlib.sha256(INIT).hexdigest()}
        more = {"server": url, "rustup_version": "1.28.2", "sha256": digests}
        found = run(home=str(home), releases=[release("a")], **more)
    if not flipped:
        assert found["versions"] == {"1.95": {"rustc": "rustc 1.95.0", "cargo": "cargo 1.95.0"}}
        return
    found_digest = hashlib.sha256(served).hexdigest()
    assert found["msg"].startswith(f"rust: rustup-init has sha256 {found_digest}, and {digests[machine]} is wanted\n")
    assert "\n  where: " in found["msg"] and "\n  mend:  " in found["msg"]
    assert list(home.iterdir()) == []


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A folder over HTTP; its address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
