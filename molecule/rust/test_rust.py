"""The toolchain that the source asks for runs for every user, without a login shell."""

from __future__ import annotations

from typing import Any

CARGO = "/opt/rust/cargo/bin"


def test_the_wanted_toolchain_runs(host: Any) -> None:
    # vLLM's rust-toolchain.toml asks for channel 1.95 (FACTS).
    for tool in ("cargo", "rustc"):
        said = host.check_output(f"env -i RUSTUP_HOME=/opt/rust/rustup {CARGO}/{tool} --version")
        assert said.startswith(f"{tool} 1.95.")


def test_another_user_can_compile_with_it(host: Any) -> None:
    said = host.check_output(
        "d=$(mktemp -d) && chown nobody $d && cd $d && echo 'fn main() { println!(\"{}\", 6 * 7); }' >m.rs && "
        f"setpriv --reuid nobody --clear-groups env -i PATH=/usr/bin:/bin RUSTUP_HOME=/opt/rust/rustup {CARGO}/rustc "
        "m.rs && ./m; rm -rf $d"
    )
    assert said == "42"


def test_nothing_is_in_a_home_folder(host: Any) -> None:
    assert host.check_output("ls -d /root/.cargo /root/.rustup 2>/dev/null || true") == ""
