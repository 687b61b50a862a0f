"""The plan of one host under construction: what was asked for, what is decided and what stands against it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ansible.module_utils.refusals import Refusal

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was asked for. Empty strings and `auto` leave the decision to the host's own facts.

    `releases` are the entries of `vllm_source_build_releases`; `candidates` what the index or the repository has for an
    entry, by its name, as Candidates and why it did not answer; `versions_before` what an earlier run chose.
    """

    method: str = "auto"
    capability: str = "auto"
    capabilities: tuple[str, ...] = ()
    cuda: str = ""
    releases: tuple[Mapping[str, Any], ...] = ()
    candidates: Mapping[str, tuple[Sequence[Any], str]] = field(default_factory=dict)
    versions_before: Mapping[str, str] = field(default_factory=dict)
    gcc: str = ""
    rust_toolchain: str = ""
    arguments: tuple[str, ...] = ()
    token_file: str = ""
    swap_margin_mib: int = 1024
    swapfile_path: str = ""
    writes: tuple[Mapping[str, Any], ...] = ()
    disk_enforced: bool = True
    index_silence: tuple[str, str] = ("", "")
    kernel_figures: Mapping[str, Any] = field(default_factory=dict)

    def argument(self, *names: str) -> str:
        """The value of an argument of vLLM's server, `--name value` or `--name=value`; the last one counts."""
        found = ""
        for word, following in pairwise((*self.arguments, "")):
            name, sign, value = word.partition("=")
            if name in names:
                found = value if sign else following
        return found

    def number(self, default: int, *names: str) -> int:
        """The value of an argument that is a whole number from 1 on, else the default."""
        found = self.argument(*names)
        return int(found) if re.fullmatch(r"0*[1-9]\d*", found, re.ASCII) else default


@dataclass(slots=True)
class Plan:
    """The plan under construction; `facts()` is what other roles read."""

    capability: str = ""
    architecture: str = ""
    method: str = ""
    dtype: str = "auto"
    swap_mib: int = 0
    shared_memory_optin_bytes: int = 0
    weights_bytes: int = 0
    attention: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    decisions: list[dict[str, str]] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    def decide(self, topic: str, decision: str, why: str) -> None:
        """Note a decision in words."""
        self.decisions.append({"topic": topic, "decision": decision, "why": why})

    def refuse(self, what: str, where: str, mend: str) -> None:
        """Note a refusal."""
        self.refusals.append(Refusal(what, where, mend))

    @property
    def below_8(self) -> bool:
        """Whether the GPU is older than capability 8.0: no bfloat16, 64 KiB of shared memory, no FlashAttention."""
        return version_pair(self.capability) < (8, 0)

    def facts(self) -> dict[str, Any]:
        """The plan as `vllm_plan`; sizes in MiB and bytes as named, `attention` as `attention_shape` returns it."""
        return {
            "capability": self.capability,
            "architecture": self.architecture,
            "method": self.method,
            "dtype": self.dtype,
            "swap_mib": self.swap_mib,
            "shared_memory_optin_bytes": self.shared_memory_optin_bytes,
            "weights_bytes": self.weights_bytes,
            "attention": self.attention,
            "versions": self.versions,
            "decisions": self.decisions,
            "refusals": [{"what": r.what, "where": r.where, "mend": r.mend} for r in self.refusals],
        }


def version_pair(text: str) -> tuple[int, int]:
    """`"13.2"` as `(13, 2)`; `(0, 0)` where no version can be read."""
    found = re.match(r"(\d+)(?:\.(\d+))?", text or "")
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)
