"""Stand-in for Rust's distribution server: a toolchain at hand and rustup, packed as the real server packs them.

Only for machines where the public server is out of reach; without any toolchain there is no stand-in, and the role asks
the public one.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from sandbox.standins import rust_toolchain
from sandbox.standins.rust_toolchain import Files, Toolchain


@dataclass(frozen=True, slots=True)
class Distribution:
    """What hosts need to know: digest of rustup-init, its version, the target, and the toolchain's version."""

    rustup_init_sha256: str
    rustup_version: str
    target: str
    toolchain: str


def build(root: Path, url: str) -> Distribution | None:
    """Makes the server's files under `root`/rust, once; None where there is no toolchain to give.

    Args:
        root: folder that is served at `url`.
        url: base of the served folder; the manifest's addresses are absolute.
    """
    own = rust_toolchain.own()
    stamp = root / "rust" / ".made"
    recipe = "".join(Path(source).read_text() for source in (__file__, rust_toolchain.__file__))
    made_by = hashlib.sha256(f"{url}{own and own.version}{recipe}".encode()).hexdigest()
    if stamp.is_file() and (record := json.loads(stamp.read_text()))["made_by"] == made_by:
        return Distribution(**record["found"])
    with tempfile.TemporaryDirectory(dir=root) as folder:
        toolchain = own or rust_toolchain.distribution(Path(folder))
        if toolchain is None:
            return None
        shutil.rmtree(root / "rust", ignore_errors=True)
        found = publish(toolchain, root / "rust", f"{url}/rust")
    stamp.write_text(json.dumps({"made_by": made_by, "found": asdict(found)}))
    return found


def publish(toolchain: Toolchain, home: Path, url: str) -> Distribution:
    """Writes rustup-init, the channel's manifest and a package per component under `home`, served at `url`."""
    say = subprocess.run([toolchain.rustup, "--version"], capture_output=True, text=True, check=True).stdout
    program = toolchain.rustup.read_bytes()
    version, target = toolchain.version, toolchain.target
    found = Distribution(hashlib.sha256(program).hexdigest(), say.split()[1], target, version)
    init = home / "rustup" / "archive" / found.rustup_version / target / "rustup-init"
    init.parent.mkdir(parents=True)
    init.write_bytes(program)
    dist = home / "dist"
    dist.mkdir()
    manifest = _manifest(toolchain, dist, f"{url}/dist")
    for channel in (version, ".".join(version.split(".")[:2])):
        file = dist / f"channel-rust-{channel}.toml"
        file.write_text(manifest)
        digest = hashlib.sha256(manifest.encode()).hexdigest()
        file.with_name(f"{file.name}.sha256").write_text(f"{digest}  {file.name}\n")
    return found


def _manifest(toolchain: Toolchain, dist: Path, url: str) -> str:
    """The channel's manifest, version 2, and beside it a package per component."""
    version, target = toolchain.version, toolchain.target
    lines = ['manifest-version = "2"', 'date = "2026-12-01"']
    for name, files in toolchain.components.items():
        file = dist / f"{name}-{version}-{target}.tar.gz"
        _pack(file, f"rust-std-{target}" if name == "rust-std" else name, files)
        lines += _entry(name, version, target, f"{url}/{file.name}", hashlib.sha256(file.read_bytes()).hexdigest())
    lines += _entry("rust", version, target, f"{url}/none", "0" * 64)
    lines.append(
        "components = ["
        + ", ".join(f'{{ pkg = "{name}", target = "{target}", is_extension = false }}' for name in toolchain.components)
        + "]"
    )
    names = ", ".join(f'"{name}"' for name in toolchain.components)
    lines += ["[profiles]", f"minimal = [{names}]", f"default = [{names}]", f"complete = [{names}]", ""]
    return "\n".join(lines)


def _entry(name: str, version: str, target: str, url: str, digest: str) -> list[str]:
    return [
        f"[pkg.{name}]", f'version = "{version}"', f"[pkg.{name}.target.{target}]", "available = true",
        f'url = "{url}"', f'hash = "{digest}"',
    ]  # fmt: skip


def _pack(out: Path, component: str, files: Files) -> None:
    """One component in the installer's format, version 3."""
    top = out.name.removesuffix(".tar.gz")
    with tarfile.open(out, "w:gz", compresslevel=1, dereference=True) as archive:
        texts = {"rust-installer-version": "3\n", "components": f"{component}\n"}
        texts[f"{component}/manifest.in"] = "".join(f"file:{path}\n" for path in files)
        for name, text in texts.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(text.encode())
            archive.addfile(info, io.BytesIO(text.encode()))
        for path, file in files.items():
            archive.add(file, f"{top}/{component}/{path}")
