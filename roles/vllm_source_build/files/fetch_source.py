#!/usr/bin/env python3
"""Fetches the source of one release: `fetch_source.py SPEC.json`, detached from whoever asked.

The folder of the source holds `sdist.tar.gz` or the git clone `checkout`, both left as they came (builds work on a
copy), and `source.json`, written last: digest (sha256 or commit) and the Rust toolchain that the source asks for.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

from job import LIB, Job, JobError, started, write_whole


class Fetch(Job):
    """One source, into its folder."""

    def stages(self) -> list[Callable[[], None]]:
        """What is done, in order."""
        return [self.make_tools, self.fetch] if self.request["kind"] == "sdist" else [self.fetch]

    @property
    def request(self) -> dict[str, str]:
        """What to fetch: kind, path, and what it is held to."""
        found: dict[str, str] = self.spec["source"]
        return found

    def fetch(self) -> None:
        """The source, checked, and its record."""
        folder = Path(self.request["path"])
        with self.source_lock():
            (folder / "source.json").unlink(missing_ok=True)
            if self.request["kind"] == "sdist":
                digest, toolchain = self.fetch_sdist(folder / "sdist.tar.gz")
            else:
                digest, toolchain = self.clone(folder / "checkout")
            described = {key: value for key, value in self.request.items() if key != "path"}
            write_whole(
                folder / "source.json",
                {**described, "digest": digest, "rust_toolchain": _channel(toolchain)},
            )

    def fetch_sdist(self, archive: Path) -> tuple[str, str]:
        """The sdist as a file; its sha256 and its rust-toolchain.toml."""
        request = self.request
        lack = self.command(
            [
                str(self.tools / "bin/python"), str(LIB / "fetch_sdist.py"), request["distribution"],
                request["version"], request["digest"], str(archive),
            ],
            capture=True,
            mend="check the package index that pip is configured with (pip config list), then converge again",
        )  # fmt: skip
        if lack.strip():
            raise JobError(
                lack.strip(),
                f"vllm_source_build_releases: {request['distribution']} {request['version']}",
                "set version and sha256 in that entry to what the index has, or version: newest",
                refused=True,
            )
        with tarfile.open(archive) as tar:
            content = {member.name.partition("/")[2]: tar.extractfile(member) for member in tar if _is_told(member)}
            texts = {name: file.read().decode() for name, file in content.items() if file}
        told = texts.get("PKG-INFO", "").splitlines()
        versions = [line.split(": ", 1)[1] for line in told if line.startswith("Version: ")]
        if versions != [request["version"]]:
            raise JobError(
                f"the sdist says version {' '.join(versions) or 'nothing'}, and {request['version']} is wanted",
                str(archive),
                "set vllm_source_build_releases[].version to what the sdist says",
            )
        return hashlib.sha256(archive.read_bytes()).hexdigest(), texts.get("rust-toolchain.toml", "")

    def clone(self, checkout: Path) -> tuple[str, str]:
        """A shallow clone of the tag in a fixed folder; its commit and its rust-toolchain.toml."""
        request = self.request
        shutil.rmtree(checkout, ignore_errors=True)
        self.check_tag()
        tag = f"refs/tags/{request['tag']}"
        git = ["git", "-C", str(checkout)]
        self.command(["git", "init", "-q", str(checkout)])
        # By its full name: `git clone --branch` takes a branch of that name first, and a branch moves.
        self.command(
            [*git, "fetch", "-q", "--depth", "1", request["repository"], f"{tag}:{tag}"],
            mend=f"git ls-remote --tags {request['repository']}; set repository and tag in vllm_source_build_releases",
        )
        self.command([*git, "checkout", "-q", "--detach", tag])
        commit = self.command([*git, "rev-parse", "HEAD"], capture=True).strip()
        if request["digest"] not in ("", commit):
            shutil.rmtree(checkout)
            raise JobError(
                f"tag {request['tag']} is commit {commit}, and {request['digest']} is wanted",
                request["repository"],
                "ask its maintainers why the tag moved, then set commit in vllm_source_build_releases",
                refused=True,
            )
        toolchain = checkout / "rust-toolchain.toml"
        return commit, toolchain.read_text() if toolchain.is_file() else ""

    def check_tag(self) -> None:
        """The repository has the tag; else its newest ones are named."""
        repository, tag = self.request["repository"], self.request["tag"]
        listing = self.command(
            ["git", "ls-remote", "--tags", "--refs", "--sort=-version:refname", repository],
            capture=True,
            mend=f"git ls-remote --tags {repository}; set repository and tag in vllm_source_build_releases",
        )
        tags = [line.partition("refs/tags/")[2] for line in listing.splitlines()]
        if tag not in tags:
            raise JobError(
                f"{repository} has no tag {tag}; its newest are {', '.join(tags[:3]) or 'none at all'}",
                f"vllm_source_build_releases: {self.request['version']}",
                f"git ls-remote --tags {repository}; set repository and tag in vllm_source_build_releases",
                refused=True,
            )


def _is_told(member: tarfile.TarInfo) -> bool:
    """Whether a member, one folder down, tells something of the whole source."""
    return member.isfile() and member.name.partition("/")[2] in ("PKG-INFO", "rust-toolchain.toml")


def _channel(text: str) -> str:
    """The channel that a rust-toolchain.toml names; empty where there is none."""
    return str(tomllib.loads(text).get("toolchain", {}).get("channel", ""))


if __name__ == "__main__":
    started(Fetch(Path(sys.argv[1])))
