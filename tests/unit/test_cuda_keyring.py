"""NVIDIA's keyring package and archive as somebody else would change them: real gpg, dpkg-deb and apt-get, by HTTP."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ansible.module_utils import apt_locks, signed_index

from plugins.modules.cuda_toolkit import Toolkit
from tests.unit.signed_archive import KEYRING, RING, Archive, Key, archive, keys
from tests.unit.test_cuda_toolkit import Failed, toolkit

pytestmark = pytest.mark.skipif(shutil.which("apt-ftparchive") is None, reason="no apt-utils here")
TOOLKIT = "cuda-toolkit-13-2_13.2.0-1_all.deb"


@dataclass
class World:
    """An archive with its keyring package and a toolkit, signed; and packages that were handed to dpkg."""

    archive: Archive
    own: Key
    other: Key
    toolkit: Toolkit
    installed: list[bytes] = field(default_factory=list)

    def keyring(self, ring: bytes, script: str = "") -> bytes:
        """Puts a keyring package with these keys in place of the one that is there."""
        entry = f"deb [signed-by=/{RING}] {self.archive.url} /\n".encode()
        return self.archive.package(KEYRING, {RING: ring, "etc/apt/sources.list.d/cuda.list": entry}, script)

    def unsigned(self, act: Callable[[], object]) -> None:
        """Does something to the archive whose index and signature stay as they were."""
        kept = {name: (self.archive.folder / name).read_bytes() for name in ("InRelease", "Packages")}
        act()
        for name, content in kept.items():
            (self.archive.folder / name).write_bytes(content)


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Key, Key]]:
    with keys() as found:
        yield found


@pytest.fixture
def world(both: tuple[Key, Key], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(apt_locks, "LOCKS", ())
    with archive(tmp_path / "archive") as served:
        found = World(served, *both, toolkit())
        found.toolkit.url = served.url
        found.toolkit.p |= {"key_fingerprint": found.own.fingerprint, "keyring_package": KEYRING}
        really = Toolkit.apt

        def apt(self: Toolkit, *argv: str) -> None:
            if argv[0] == "dpkg":
                found.installed.append(Path(argv[-1]).read_bytes())
            else:
                really(self, *argv)

        monkeypatch.setattr(Toolkit, "apt", apt)
        found.keyring(found.own.public)
        served.package(TOOLKIT, {"usr/local/cuda/bin/nvcc": b"nvcc"})
        served.sign(found.own)
        yield found


def test_the_archives_own_keyring_package_is_installed(world: World) -> None:
    world.toolkit.install_keyring()
    assert world.installed == [(world.archive.folder / KEYRING).read_bytes()]


def scripts(world: World) -> None:
    """The right key, which is public, with a script of somebody else's."""
    world.unsigned(lambda: world.keyring(world.own.public, "#!/bin/sh\ntouch /taken\n"))


def flipped(world: World) -> None:
    # dpkg-deb stores a package's own control part first.
    world.archive.flip(KEYRING, 400)


def index_of_scripts(world: World) -> None:
    """The index lists the changed package, and the signature is the one from before."""
    signed = (world.archive.folder / "InRelease").read_bytes()
    scripts(world)
    world.archive.index()
    (world.archive.folder / "InRelease").write_bytes(signed)


def signed_by_another(world: World) -> None:
    """All is somebody else's, and his key is in the ring beside the archive's own."""
    world.keyring(world.own.public + world.other.public, "#!/bin/sh\ntouch /taken\n")
    world.archive.sign(world.other)


def all_of_another(world: World) -> None:
    world.keyring(world.other.public)
    world.archive.sign(world.other)


def signature_flipped(world: World) -> None:
    at = (world.archive.folder / "InRelease").read_bytes().index(b"SHA256:")
    world.archive.flip("InRelease", at + 30)


def another_name(world: World) -> None:
    """A package of the archive's own, under a name that its index does not have."""
    world.toolkit.p["keyring_package"] = "cuda-keyring_1.2-1_all.deb"
    shutil.copy(world.archive.folder / KEYRING, world.archive.folder / "cuda-keyring_1.2-1_all.deb")


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (scripts, f"{KEYRING} has sha256 .* is signed"),
        (flipped, "dpkg-deb -x ended with|has sha256 .* is signed"),
        (index_of_scripts, "its Packages has sha256 .*, which its InRelease does not sign"),
        (signed_by_another, "its InRelease is signed by [0-9A-F]{40} "),
        (all_of_another, "the archive's key is [0-9A-F]{40}, and [0-9A-F]{40} is wanted"),
        (signature_flipped, "its InRelease is signed by nobody known .*BAD signature"),
        (another_name, "and the archive's signed index has no such file"),
    ],
)
def test_a_changed_keyring_package_is_refused_before_dpkg_sees_it(
    world: World, tamper: Callable[[World], None], words: str
) -> None:
    tamper(world)
    with pytest.raises(Failed, match=words) as caught:
        world.toolkit.install_keyring()
    assert "\n  where: " in str(caught.value)
    assert "\n  mend:  " in str(caught.value)
    assert world.installed == []


def test_a_subkey_is_no_key_of_the_ring(world: World, tmp_path: Path) -> None:
    # Whoever has a key can adopt any other, the archive's too, as a subkey of his.
    world.other.gpg("--passphrase", "", "--quick-add-key", world.other.fingerprint, "ed25519", "sign", "never")
    listing = world.other.gpg("--list-keys", "--with-colons").decode()
    assert sum(line.startswith("fpr") for line in listing.splitlines()) == 2
    ring = tmp_path / "ring.gpg"
    ring.write_bytes(world.own.public + world.other.gpg("--export"))
    home = tmp_path / "gpg"
    home.mkdir(mode=0o700)
    assert signed_index.fingerprints(ring, home) == [world.own.fingerprint, world.other.fingerprint]


@pytest.fixture
def apt_at(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """apt-get keeps to folders of its own and downloads without installing; its cache."""
    ring = tmp_path / "ring.gpg"
    ring.write_bytes(world.own.public)
    for name in ("etc/sources.list.d", "etc/preferences.d", "state/lists/partial", "cache/archives/partial"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "etc" / "sources.list").write_text(f"deb [signed-by={ring}] {world.archive.url} /\n")
    (tmp_path / "status").touch()
    settings = {
        "Dir::Etc": tmp_path / "etc", "Dir::State": tmp_path / "state", "Dir::State::status": tmp_path / "status",
        "Dir::Cache": tmp_path / "cache", "APT::Sandbox::User": "root", "APT::Get::Download-Only": "true",
        "Acquire::http::Proxy": "DIRECT", "Acquire::Retries": "0",
    }  # fmt: skip
    (tmp_path / "apt.conf").write_text("".join(f'{name} "{value}";\n' for name, value in settings.items()))
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    world.toolkit.environment["APT_CONFIG"] = str(tmp_path / "apt.conf")
    return tmp_path / "cache" / "archives"


def test_a_signed_package_comes_from_apt(world: World, apt_at: Path) -> None:
    world.toolkit.apt(*world.toolkit.get("update"))
    world.toolkit.install("install", "cuda-toolkit-13-2")
    assert [path.name for path in apt_at.glob("*.deb")] == [TOOLKIT]


def toolkit_flipped(world: World) -> None:
    world.archive.flip(TOOLKIT, -1)


def toolkit_of_another(world: World) -> None:
    world.archive.sign(world.other)


def toolkit_unsigned(world: World) -> None:
    world.archive.index()


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (toolkit_flipped, "apt-get -q ended with 100: .*Hash Sum mismatch"),
        (toolkit_of_another, "apt-get -q ended with 100: .*is not signed"),
        (toolkit_unsigned, "apt-get -q ended with 100: .*(does not have a Release file|is not signed)"),
    ],
)
def test_a_changed_package_of_the_archive_is_refused_by_apt(
    world: World, apt_at: Path, tamper: Callable[[World], None], words: str
) -> None:
    tamper(world)
    with pytest.raises(Failed, match=f"(?s){words}"):
        world.toolkit.apt(*world.toolkit.get("update"))
        world.toolkit.install("install", "cuda-toolkit-13-2")
    assert list(apt_at.glob("*.deb")) == []
