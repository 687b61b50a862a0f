"""What is known of vLLM's versions, each with its source: which host rules one out, and on which torch each was shown.

Read from the sdists 0.26.0, 0.27.0, 0.27.1 and 0.28.0 to 0.33.0 on 2026-12-02 where no other source is named.
"""

from __future__ import annotations

from dataclasses import dataclass

# vLLM refuses float16 for these (_FLOAT16_NOT_SUPPORTED_MODELS, the same in all nine), and bfloat16 needs 8.0.
NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
# The oldest release whose kernels were compiled for 7.5 and patched.
FIRST_BELOW_8 = "0.26.0"
NEWEST_KNOWN = "0.33.0"
_SDISTS = f"sdists 0.26.0 to {NEWEST_KNOWN}"
_FIELD = "field report, g5g.4xlarge"


@dataclass(frozen=True, slots=True)
class Rule:
    """Versions from `since` on and below `below` (empty: without end) are ruled out where all conditions hold.

    A condition that is not set holds everywhere: `mixed_heads` the model's heads differ in width, `float16_of` one of
    these models is asked for in float16, `capability_below` and `capability_from` the GPU's, `gcc_below` and
    `rust_below` the tools of a CUDA build from source, `unpublished` the published wheel lacks the capability.
    """

    id: str
    why: str
    source: str
    since: str = ""
    below: str = ""
    mixed_heads: bool = False
    float16_of: tuple[str, ...] = ()
    capability_below: str = ""
    capability_from: str = ""
    gcc_below: str = ""
    rust_below: str = ""
    unpublished: bool = False


RULES = (
    Rule(
        "mixed heads",
        "{model_type} has heads of several widths",
        f"{_FIELD}: AmbiguousGlobalPerLayerAttributeError with 0.26.0, and 0.27.1 lacks the mend too",
        below="0.27.2rc0",
        mixed_heads=True,
    ),
    Rule(
        "kernel patch",
        "for capability {capability} no older one was patched and compiled",
        _SDISTS,
        below=FIRST_BELOW_8,
        capability_below="8.0",
    ),
    Rule(
        "float16",
        "vLLM refuses {model_type} in float16, which is asked for",
        f"vllm/config/model.py, {_SDISTS}",
        since="0.26.0",
        float16_of=NO_FLOAT16,
    ),
    Rule(
        "compiler",
        "g++ is {gcc}, and 11.3 or newer is wanted",
        f"CMakeLists.txt, {_SDISTS}",
        since="0.26.0",
        gcc_below="11.3",
    ),
    Rule(
        "compiler",
        "g++ is {gcc}, and units for capability 8.0 and newer want 13",
        "sdists 0.32.0 and 0.33.0",
        since="0.32.0",
        gcc_below="13",
        capability_from="8.0",
    ),
    Rule(
        "Rust",
        "Rust is held at {rust}, and its front end wants 1.95",
        f"rust-toolchain.toml, {_SDISTS}",
        since="0.26.0",
        rust_below="1.95",
    ),
    Rule(
        "published wheel",
        "no published wheel for {architecture} holds capability {capability}",
        f"device code of the wheel of {NEWEST_KNOWN}, 2026-12-01; {_FIELD}: the images before it",
        below=f"{NEWEST_KNOWN}.post1",
        unpublished=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known of vLLM `since` to `until` (both included) on torch from `torch` on, below `torch_below`.

    verdict: proven (it served), compiles, refused, or unknown. `evidence` says what was seen, `date` when.
    """

    since: str
    until: str
    torch: str
    torch_below: str
    verdict: str
    evidence: str
    date: str
    source: str


_PINNED = "vLLM's own pin"
JUDGEMENTS = (
    Judgement("0.27.2rc0", "0.27.2rc0", "2.12", "2.13", "proven", "served Gemma 4 E2B on a T4G", "2026-11", _FIELD),
    Judgement(
        "0.26.0", "0.26.0", "2.12", "2.13", "compiles", "built and started, then died of Gemma 4's heads", "2026-11",
        _FIELD,
    ),
    Judgement(
        "0.33.0", "0.33.0", "2.12", "2.13", "compiles",
        "its 67 units for 7.5 compile with torch 2.12.0's headers and nvcc 13.0.88; without int8_scaled_mm's, what was "
        "linked of them loads in torch 2.12.0+cu130, and vLLM, its Triton attention and Gemma 4 import; nobody has "
        "shown it serving",
        "2026-12-02", "docs/evidence.md",
    ),
    Judgement("0.26.0", "0.26.0", "2.11", "2.12", "proven", _PINNED, "2026-12-02", "requirements/cuda.txt"),
    Judgement("0.27.0", "0.32.0", "2.13", "2.14", "proven", _PINNED, "2026-12-02", "requirements/cuda.txt"),
    Judgement("0.33.0", "0.33.0", "2.14", "2.15", "proven", _PINNED, "2026-12-02", "requirements/cuda.txt"),
    Judgement(
        "0.26.0", NEWEST_KNOWN, "0", "2.11", "refused",
        "its extensions ask for libtorch's stable ABI of 2.11 (TORCH_TARGET_VERSION)", "2026-12-02",
        f"CMakeLists.txt, {_SDISTS}",
    ),
)  # fmt: skip
