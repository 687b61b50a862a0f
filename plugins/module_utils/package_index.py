"""Whether the package index that this host's pip is configured with can be reached, asked of pip itself."""

from __future__ import annotations

import re
import subprocess
from urllib.parse import urlsplit, urlunsplit

from ansible.module_utils import host_pip_config

_BROKEN = re.compile(r"connection broken by '(?:.*?>: )?(.*)': /")
_SECONDS = 10


def silence(python: str, distribution: str) -> tuple[str, str]:
    """The index's address and why it cannot be reached; two empty strings where it answers, or where none is asked.

    Args:
        python: interpreter whose pip is asked.
        distribution: what the index is asked for; an index that answers without it is no silence.
    """
    ask = [python, "-m", "pip", "index", "versions", distribution, "--retries", "1", "--timeout", str(_SECONDS)]
    done = subprocess.run([*ask, "--disable-pip-version-check"], capture_output=True, text=True, check=False)
    broken = _BROKEN.findall(done.stdout + done.stderr)
    if done.returncode == 0 or not broken:
        return "", ""
    index = host_pip_config.read(python).get("index-url")
    return _without_login(index[-1]) if index else "that is pip's own default", broken[-1]


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
