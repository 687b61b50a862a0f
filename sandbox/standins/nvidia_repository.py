"""Stand-in for NVIDIA's apt archive: its layout and package names, a throw-away key, and the real nvcc 13.2.

nvcc, nvvm, its headers and the runtime come from NVIDIA's own wheels on the package index. `cuda` depends on
`cuda-drivers`, as there, so that pulling a driver can be refused for real.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

from fleet.errors import ExitCode, FleetError

CUDA = "13.2"
TOOLKIT = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime")
_KEYRING = "/usr/share/keyrings/cuda-archive-keyring.gpg"


@dataclass(frozen=True, slots=True)
class Repository:
    """Where the repository lies below the served root, and the key it is signed with."""

    path: Path
    key_fingerprint: str


def build(root: Path, cache: Path, url: str, system: str, machine: str = platform.machine()) -> Repository:
    """Makes the repository under `root`/compute/cuda/repos, once per content of this file.

    Args:
        root: folder that is served at `url`.
        cache: folder for what is kept: key and wheels.
        url: base of the served folder, written into the keyring package's source entry.
        system: whose packages, as the archive spells it: `debian12`, `ubuntu2404`.
        machine: whose packages, as `uname -m` names it.
    """
    architecture = {"x86_64": "x86_64", "aarch64": "sbsa"}[machine]
    path = root / "compute" / "cuda" / "repos" / system / architecture
    key = cache / "nvidia-repository-key"
    stamp = path / ".made-by"
    wanted = hashlib.sha256(Path(__file__).read_bytes() + url.encode()).hexdigest()
    fingerprint_file = key / "fingerprint"
    if stamp.is_file() and stamp.read_text() == wanted and fingerprint_file.is_file():
        return Repository(path, fingerprint_file.read_text())
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    fingerprint = _key(key)
    entry = f"deb [signed-by={_KEYRING}] {url}/compute/cuda/repos/{system}/{architecture}/ /\n"
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        work = Path(folder)
        _keyring_package(work, path, key, f"cuda-{system}-{architecture}.list", entry)
        _toolkit_packages(work, path, cache / "cuda-wheels", machine)
    packages = _run(["apt-ftparchive", "packages", "."], cwd=path)
    (path / "Packages").write_bytes(packages)
    (path / "Release").write_bytes(_run(["apt-ftparchive", "release", "."], cwd=path))
    _gpg(key, "--clearsign", "--output", str(path / "InRelease"), str(path / "Release"))
    # gpg starts an agent for each home and leaves it running.
    _run(["gpgconf", "--homedir", str(key), "--kill", "all"])
    stamp.write_text(wanted)
    return Repository(path, fingerprint)


def _key(home: Path) -> str:
    """Makes the key where there is none; its fingerprint."""
    fingerprint = home / "fingerprint"
    if not fingerprint.is_file():
        home.mkdir(mode=0o700, exist_ok=True)
        _gpg(
            home,
            "--passphrase",
            "",
            "--quick-generate-key",
            "stand-in for the CUDA archive",
            "rsa3072",
            "sign",
            "never",
        )
        listing = _gpg(home, "--list-keys", "--with-colons").decode()
        fingerprint.write_text(next(line.split(":")[9] for line in listing.splitlines() if line.startswith("fpr")))
    return fingerprint.read_text()


def _gpg(home: Path, *args: str) -> bytes:
    return _run(["gpg", "--homedir", str(home), "--batch", "--yes", "--quiet", *args])


def _keyring_package(work: Path, out: Path, key: Path, list_name: str, entry: str) -> None:
    tree = work / "cuda-keyring"
    ring, listing = tree / _KEYRING[1:], tree / "etc/apt/sources.list.d" / list_name
    for file in (ring, listing):
        file.parent.mkdir(parents=True)
    ring.write_bytes(_gpg(key, "--export"))
    listing.write_text(entry)
    _package(tree, out, "cuda-keyring", "1.1-1", "all")


def toolkit_wheels(folder: Path, machine: str = platform.machine(), names: Sequence[str] = TOOLKIT) -> list[Path]:
    """The wheels that carry the toolkit's parts, downloaded into the folder where one is missing."""
    patterns = [f"{name.replace('-', '_')}-{CUDA}.*_{machine}.whl" for name in names]
    if not all(any(folder.glob(pattern)) for pattern in patterns):
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [f"{name}=={CUDA}.*" for name in names]
        tags = [word for tag in ("2014", "_2_28") for word in ("--platform", f"manylinux{tag}_{machine}")]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", *tags]
        _run([*pip, "-d", str(folder), *wanted])
    return [max(folder.glob(pattern)) for pattern in patterns]


def unpacked(folder: Path, wheels: Path) -> Path:
    """The toolkit of the wheels, unpacked below a folder: its CUDA_HOME."""
    for wheel in toolkit_wheels(wheels):
        with ZipFile(wheel) as archive:
            archive.extractall(folder)
    home = next(folder.glob("nvidia/cu*"))
    for program in [*home.glob("bin/*"), *home.glob("nvvm/bin/*")]:
        program.chmod(0o755)
    return home


def _toolkit_packages(work: Path, out: Path, wheels: Path, machine: str) -> None:
    debian = {"x86_64": "amd64", "aarch64": "arm64"}[machine]
    tree = work / "cuda-nvcc"
    home = tree / f"usr/local/cuda-{CUDA}"
    for wheel in toolkit_wheels(wheels, machine):
        with ZipFile(wheel) as archive:
            archive.extractall(work / "unpacked")
    shutil.move(work / "unpacked/nvidia/cu13", home)
    (home / "lib64").symlink_to("lib")
    for folder in (home / "bin", home / "nvvm/bin"):
        for program in folder.rglob("*"):
            program.chmod(0o755)
    dashed = CUDA.replace(".", "-")
    version = wheel.name.split("-")[1]
    _package(tree, out, f"cuda-nvcc-{dashed}", f"{version}-1", debian)
    link = work / "cuda-toolkit/usr/local/cuda"
    link.parent.mkdir(parents=True)
    link.symlink_to(f"cuda-{CUDA}")
    _package(
        work / "cuda-toolkit",
        out,
        f"cuda-toolkit-{dashed}",
        f"{version}-1",
        debian,
        f"cuda-nvcc-{dashed}",
    )
    for name, depends in (("cuda-drivers", ""), ("cuda", f"cuda-toolkit-{dashed}, cuda-drivers")):
        tree = work / name
        tree.mkdir()
        _package(tree, out, name, f"{version}-1", debian, depends)


def _package(tree: Path, out: Path, name: str, version: str, architecture: str, depends: str = "") -> None:
    control = tree / "DEBIAN" / "control"
    control.parent.mkdir(parents=True)
    lines = [
        f"Package: {name}",
        f"Version: {version}",
        f"Architecture: {architecture}",
        "Maintainer: stand-in",
    ]
    lines += [f"Depends: {depends}"] if depends else []
    control.write_text("\n".join([*lines, f"Description: {name}, stand-in package", ""]))
    file = out / f"{name}_{version}_{architecture}.deb"
    _run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "-b", str(tree), str(file)])


def _run(argv: list[str], cwd: Path | None = None) -> bytes:
    done = subprocess.run(argv, cwd=cwd, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise FleetError(
            f"{' '.join(argv[:2])} ended with {done.returncode}: {done.stderr.decode().strip()[-400:]}",
            where="the stand-in for NVIDIA's archive",
            mend="check the package index (pip config list), then ./runner.py sandbox up",
            code=ExitCode.HOST_FAILED,
            who="sandbox",
        )
    return done.stdout
