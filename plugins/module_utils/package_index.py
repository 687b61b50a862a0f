"""What the host's own package index has of a distribution, asked of its pip, and the tags of a repository."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from ansible.module_utils import host_pip_config
from ansible.module_utils.version_choice import Candidate, version_key

_BROKEN = re.compile(r"connection broken by '(?:.*?>: )?(.*)': /")
_SECONDS = 10
# `pip index versions` tells neither yanked files nor Requires-Python nor which kind a file is; its own finder does.
# It reads pip's whole configuration: indexes, links, certificates, logins. The same from pip 21.2 on.
_ASK = """
import json, sys
from pip._internal.commands import create_command
from pip._internal.models.target_python import TargetPython
from pip._internal.utils.logging import setup_logging
from pip._vendor.packaging.specifiers import SpecifierSet
command = create_command("index")
options, _ = command.parse_args(["versions", sys.argv[1], "--retries", "1", "--timeout", sys.argv[2]])
setup_logging(verbosity=0, no_color=True, user_log_file=None)
with command.main_context():
    finder = command._build_package_finder(
        options=options, session=command._build_session(options), target_python=TargetPython(),
        ignore_requires_python=True)
    python = ".".join(map(str, sys.version_info[:3]))
    found = [(str(each.version), each.link.is_wheel, each.link.requires_python or "")
             for each in finder.find_all_candidates(sys.argv[1]) if each.link.yanked_reason is None]
print(json.dumps([[*each, SpecifierSet(each[2]).contains(python)] for each in found]))
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """What there is, and why it could not be asked: `index` did not answer, or `error` for any other reason."""

    candidates: tuple[Candidate, ...] = ()
    index: str = ""
    error: str = ""


def ask_index(python: str, distribution: str) -> Answer:
    """Every version of a distribution that the index has for this host and that is not yanked.

    Args:
        python: interpreter whose pip is asked; wheels that it cannot use do not count.
        distribution: what the index is asked for; an index that answers without it is no silence.
    """
    argv = [python, "-c", _ASK, distribution, str(_SECONDS)]
    done = subprocess.run(argv, cwd="/", capture_output=True, text=True, check=False)
    broken = _BROKEN.findall(done.stdout + done.stderr)
    files = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []
    if broken and not files:
        index = host_pip_config.read(python).get("index-url")
        return Answer(index=_without_login(index[-1]) if index else "that is pip's own default", error=broken[-1])
    if done.returncode:
        return Answer(error=f"pip of {python}: {(done.stderr.strip().splitlines() or ['no words'])[-1]}")
    by_version: dict[str, list[tuple[bool, str, bool]]] = {}
    for version, is_wheel, requires, fits in files:
        by_version.setdefault(version, []).append((is_wheel, requires, fits))
    return Answer(
        tuple(
            Candidate(
                version,
                wheel=any(is_wheel for is_wheel, *_ in found),
                sdist=any(not is_wheel for is_wheel, *_ in found),
                requires_python="" if any(fits for *_, fits in found) else found[0][1],
            )
            for version, found in by_version.items()
        )
    )


def ask_repository(repository: str) -> Answer:
    """Every version that a git repository has a tag `v<version>` of."""
    try:
        done = subprocess.run(
            ["git", "ls-remote", "--tags", "--refs", repository],
            cwd="/", capture_output=True, text=True, check=False, timeout=6 * _SECONDS,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "GIT_TERMINAL_PROMPT": "0"},
        )  # fmt: skip
    except FileNotFoundError:
        return Answer(error="git is not installed")
    except subprocess.TimeoutExpired:
        return Answer(error=f"git ls-remote took more than {6 * _SECONDS} s")
    if done.returncode:
        return Answer(error=(done.stderr.strip().splitlines() or ["no words"])[0])
    tags = [line.rpartition("refs/tags/")[2] for line in done.stdout.splitlines()]
    return Answer(tuple(Candidate(tag[1:]) for tag in tags if tag.startswith("v") and version_key(tag)))


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
