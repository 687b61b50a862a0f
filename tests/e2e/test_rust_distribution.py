"""A machine without rustup: the distribution's compiler, packed as Rust's server packs it, installs and compiles."""

from __future__ import annotations

import functools
import http.server
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.standins import rust_distribution, rust_toolchain


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serves tmp_path, address returned."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_the_distributions_compiler_is_installed_by_rustup(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a machine without rustup: none on the PATH, none in the home.
    monkeypatch.setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert rust_toolchain.own() is None
    found = rust_distribution.build(tmp_path, server)
    assert found is not None
    began = (tmp_path / "rust" / "dist").stat().st_mtime_ns
    assert rust_distribution.build(tmp_path, server) == found
    assert (tmp_path / "rust" / "dist").stat().st_mtime_ns == began  # made once
    init = tmp_path / "rust" / "rustup" / "archive" / found.rustup_version / found.target / "rustup-init"
    init.chmod(0o755)
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "RUSTUP_DIST_SERVER": f"{server}/rust",
        "RUSTUP_HOME": str(tmp_path / "rustup"), "CARGO_HOME": str(tmp_path / "cargo"),
    }  # fmt: skip

    def run(*argv: str) -> str:
        done = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(str(init), "-y", "--no-modify-path", "--profile", "minimal", "--default-toolchain", found.toolchain)
    for program in ("rustc", "cargo"):
        assert run(str(tmp_path / "cargo" / "bin" / program), "--version").split()[1] == found.toolchain
    # Its own libraries, though the machine may have them too.
    libraries = tmp_path / "rustup" / "toolchains" / f"{found.toolchain}-{found.target}" / "lib"
    assert list(libraries.glob("librustc_driver-*"))
    assert list(libraries.glob("libLLVM*"))
    (tmp_path / "main.rs").write_text('fn main() { println!("{}", [2, 3].iter().product::<i32>()); }')
    run(str(tmp_path / "cargo" / "bin" / "rustc"), "main.rs")
    assert run(str(tmp_path / "main")) == "6\n"
