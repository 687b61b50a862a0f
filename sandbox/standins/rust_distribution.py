"""Stand-in for Rust's distribution server: this machine's own toolchain and rustup, under their true versions.

Only for machines where the public server is out of reach; without a toolchain here there is no stand-in, and the role
asks the public one.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Distribution:
    """What hosts need to know: digest of rustup-init, its version, the target, and the toolchain's version."""

    rustup_init_sha256: str
    rustup_version: str
    target: str
    toolchain: str


def build(root: Path, url: str) -> Distribution | None:
    """Makes the server's files under `root`/rust, once per toolchain; None where this machine has none to give.

    Args:
        root: folder that is served at `url`.
        url: base of the served folder; the manifest's addresses are absolute.
    """
    rustup, rustc = shutil.which("rustup", path=_path()), shutil.which("rustc", path=_path())
    if rustup is None or rustc is None:
        return None
    facts = dict(line.split(": ", 1) for line in _say([rustc, "-vV"]).splitlines() if ": " in line)
    version, target = facts["release"], facts["host"]
    sysroot = Path(_say([rustc, "--print", "sysroot"]))
    rustup_version = _say([rustup, "--version"]).split()[1]
    program = Path(rustup).resolve().read_bytes()
    found = Distribution(hashlib.sha256(program).hexdigest(), rustup_version, target, version)
    home = root / "rust"
    stamp = home / ".made-by"
    wanted = hashlib.sha256(f"{found}{url}{Path(__file__).read_text()}".encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return found
    shutil.rmtree(home, ignore_errors=True)
    dist = home / "dist"
    dist.mkdir(parents=True)
    init = home / "rustup" / "archive" / rustup_version / target / "rustup-init"
    init.parent.mkdir(parents=True)
    init.write_bytes(program)
    manifest = _manifest(sysroot, dist, f"{url}/rust/dist", version, target)
    for channel in (version, ".".join(version.split(".")[:2])):
        file = dist / f"channel-rust-{channel}.toml"
        file.write_text(manifest)
        digest = hashlib.sha256(manifest.encode()).hexdigest()
        file.with_name(f"{file.name}.sha256").write_text(f"{digest}  {file.name}\n")
    stamp.write_text(wanted)
    return found


def _manifest(sysroot: Path, dist: Path, url: str, version: str, target: str) -> str:
    """The channel's manifest, version 2, and beside it a package per component."""
    lines = ['manifest-version = "2"', 'date = "2026-12-01"']
    components = {"rustc": "rustc", "cargo": "cargo", "rust-std": f"rust-std-{target}"}
    for name, component in components.items():
        file = dist / f"{name}-{version}-{target}.tar.gz"
        listing = (sysroot / "lib" / "rustlib" / f"manifest-{name}-{target}").read_text().splitlines()
        _pack(sysroot, file, component, [line for line in listing if ":share/" not in line])
        lines += _entry(name, version, target, f"{url}/{file.name}", hashlib.sha256(file.read_bytes()).hexdigest())
    lines += _entry("rust", version, target, f"{url}/none", "0" * 64)
    lines.append(
        "components = ["
        + ", ".join(f'{{ pkg = "{name}", target = "{target}", is_extension = false }}' for name in components)
        + "]"
    )
    names = ", ".join(f'"{name}"' for name in components)
    lines += ["[profiles]", f"minimal = [{names}]", f"default = [{names}]", f"complete = [{names}]", ""]
    return "\n".join(lines)


def _entry(name: str, version: str, target: str, url: str, digest: str) -> list[str]:
    return [
        f"[pkg.{name}]", f'version = "{version}"', f"[pkg.{name}.target.{target}]", "available = true",
        f'url = "{url}"', f'hash = "{digest}"',
    ]  # fmt: skip


def _pack(sysroot: Path, out: Path, component: str, listing: list[str]) -> None:
    """One component in the installer's format, version 3."""
    top = out.name.removesuffix(".tar.gz")
    with tarfile.open(out, "w:gz", compresslevel=1) as archive:
        texts = {"rust-installer-version": "3\n", "components": f"{component}\n"}
        texts[f"{component}/manifest.in"] = "".join(f"{line}\n" for line in listing)
        for name, text in texts.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
        for line in listing:
            path = line.split(":", 1)[1]
            archive.add(sysroot / path, f"{top}/{component}/{path}")


def _path() -> str:
    return f"{os.environ['PATH']}:{Path.home() / '.cargo' / 'bin'}"


def _say(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
