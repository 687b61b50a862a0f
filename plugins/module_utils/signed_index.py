"""What a flat apt archive's index says of a file, believed only where the index is signed by the one key that is known.

A package brings its own scripts, which run as root: that it carries the right public key, which anybody has, says
nothing of the rest of it. The archive's index does, and is signed.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path


class Unsigned(Exception):
    """The index is not what the key signed; says what was found, in words."""


def fingerprints(ring: Path, home: Path) -> list[str]:
    """Fingerprints of the keys in a keyring; those of subkeys are left out, since any key can adopt another as one.

    Args:
        ring: file of public keys.
        home: folder of gpg's own files.
    """
    show = ["gpg", "--homedir", str(home), "--batch", "--show-keys", "--with-colons", str(ring)]
    listing = subprocess.run(show, capture_output=True, text=True, check=False).stdout
    lines = [line.split(":") for line in listing.splitlines() if line.startswith(("pub:", "sub:", "fpr:"))]
    return [found[9] for before, found in pairwise(lines) if (before[0], found[0]) == ("pub", "fpr")]


def sha256_of(name: str, read: Callable[[str], bytes], ring: Path, fingerprint: str, home: Path) -> str:
    """The sha256 that the archive's index has for the file; empty where it does not list it.

    Args:
        name: file name of a package, in the archive's only folder.
        read: gives a file of the archive by its name.
        ring: file of public keys, the one that is known among them.
        fingerprint: of the key that is known.
        home: folder of gpg's own files.

    Raises:
        Unsigned: the index is not signed by that key, or was changed since.
    """
    signed = _signed_text(read("InRelease"), ring, fingerprint, home)
    index = read("Packages")
    found = hashlib.sha256(index).hexdigest()
    # Of its lines for Packages one has a digest of this length.
    wanted = {words[0] for line in signed.splitlines() if len(words := line.split()) == 3 and words[2] == "Packages"}
    if found not in wanted:
        raise Unsigned(f"its Packages has sha256 {found}, which its InRelease does not sign")
    for stanza in index.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if ": " in line)
        if fields.get("Filename", "").rpartition("/")[2] == name:
            return fields.get("SHA256", "")
    return ""


def _signed_text(message: bytes, ring: Path, fingerprint: str, home: Path) -> str:
    """The text that the key has signed, without what may stand around it."""
    gpg = ["gpg", "--homedir", str(home), "--batch", "--quiet"]
    subprocess.run([*gpg, "--import", str(ring)], capture_output=True, check=False)
    out, source = home / "signed", home / "message"
    source.write_bytes(message)
    verify = [*gpg, "--yes", "--status-fd", "1", "--output", str(out), "--verify", str(source)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    signers = [line.split()[-1] for line in done.stdout.splitlines() if line.startswith("[GNUPG:] VALIDSIG ")]
    if done.returncode or fingerprint not in signers or not out.is_file():
        words = " ".join(done.stderr.split())[-200:]
        raise Unsigned(f"its InRelease is signed by {' '.join(signers) or 'nobody known'} ({words})")
    return out.read_text()
