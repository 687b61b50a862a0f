#!/usr/bin/env python3
"""Fetches one sdist as a file: `fetch_sdist.py NAME VERSION SHA256 OUT` (downloading with pip would run its setup.py).

What it prints on standard output is why there is none to be had; nothing where it was fetched.

Runs in the tools environment, which carries unearth, the index client; indexes come from pip's configuration.
"""

from __future__ import annotations

import sys
from pathlib import Path

import host_pip_config
from unearth import HashMismatchError, PackageFinder


def main(name: str, version: str, sha256: str, out: Path) -> int:
    """Downloads and checks; a file is there afterwards only where its digest is right."""
    config = host_pip_config.read(sys.executable)
    finder = PackageFinder(index_urls=config.get("index-url", []), no_binary=[name])
    for url in config.get("extra-index-url", []):
        finder.add_index_url(url)
    for place in config.get("find-links", []):
        finder.add_find_links(place)
    found = finder.find_best_match(f"{name}=={version}").best
    if found is None or found.link.is_wheel:
        has = list(dict.fromkeys(each.version for each in finder.find_all_packages(name) if not each.link.is_wheel))
        newest = ", ".join(has[:3]) or "none at all"
        print(f"the package index has no sdist of {name} {version}; its newest are {newest}")
        return 0
    try:
        # Without a digest of ours unearth takes the one that the index tells.
        archive = finder.download(found.link, out.parent, {"sha256": [sha256]} if sha256 else None)
    except HashMismatchError as error:
        print(" ".join(str(error).split()))
        return 0
    archive.replace(out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2], sys.argv[3], Path(sys.argv[4])))
