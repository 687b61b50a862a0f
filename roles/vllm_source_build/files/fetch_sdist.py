#!/usr/bin/env python3
"""Fetches one sdist as a file: `fetch_sdist.py NAME VERSION SHA256 OUT` (downloading with pip would run its setup.py).

Runs in the tools environment, which carries unearth, the index client; indexes come from pip's configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import host_pip_config
from unearth import HashMismatchError, PackageFinder


def main(name: str, version: str, sha256: str, out: Path) -> int:
    """Downloads and checks; the exit status is 0 only for a file whose digest is right."""
    config = host_pip_config.read(sys.executable)
    finder = PackageFinder(index_urls=config.get("index-url", []), no_binary=[name])
    for url in config.get("extra-index-url", []):
        finder.add_index_url(url)
    for place in config.get("find-links", []):
        finder.add_find_links(place)
    found = finder.find_best_match(f"{name}=={version}").best
    if found is None or found.link.is_wheel:
        print(f"no sdist of {name} {version} on the configured index", file=sys.stderr)
        return 1
    try:
        # Without a digest of ours unearth takes the one that the index tells.
        archive = finder.download(found.link, out.parent, {"sha256": [sha256]} if sha256 else None)
    except HashMismatchError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    archive.replace(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
