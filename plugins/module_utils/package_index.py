"""Whether the package index that this host's pip is configured with can be reached, asked of pip itself."""

from __future__ import annotations

import ast
import re
import subprocess
from urllib.parse import urlsplit, urlunsplit

_BROKEN = re.compile(r"connection broken by '(?:.*?>: )?(.*)': /")
_SECONDS = 10


def silence(python: str, distribution: str) -> tuple[str, str]:
    """The index's address and why it cannot be reached; two empty strings where it answers, or where none is asked.

    Args:
        python: interpreter whose pip is asked.
        distribution: what the index is asked for; an index that answers without it is no silence.
    """
    pip = [python, "-m", "pip"]
    ask = ["index", "versions", distribution, "--retries", "1", "--timeout", str(_SECONDS)]
    done = subprocess.run([*pip, *ask, "--disable-pip-version-check"], capture_output=True, text=True, check=False)
    broken = _BROKEN.findall(done.stdout + done.stderr)
    if done.returncode == 0 or not broken:
        return "", ""
    listing = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=False).stdout
    found = [line.partition("=")[2] for line in listing.splitlines() if line.partition("=")[0].endswith(".index-url")]
    return _without_login(str(ast.literal_eval(found[-1]))) if found else "that is pip's own default", broken[-1]


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
