"""Whether kernels fit, on small sources with a scripted compiler: outcomes, codes, and what is asked only once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.patch_registry import ATTENTION

from fleet import patch_check
from fleet.errors import ExitCode, FleetError
from fleet.patch_check import Asked, Fit, Verdict, asked, check
from fleet.patch_trees import apply_all
from fleet.progress import terminal
from fleet.steps import Durations, Steps
from fleet.vllm_sources import Tree
from tests.unit.test_patch_sources import SOURCE, SOURCES, UPSTREAM_FIX

LAYERS = [
    {"head_size": 512, "heads": 8, "kv_heads": 1, "sliding_window": 0},
    {"head_size": 256, "heads": 8, "kv_heads": 1, "sliding_window": 512},
]
# Stands for the compiler: stock asks for 98,304 bytes, upstream's fix for 65,536, the patch for what is given.
CHECKER = """\
import json, pathlib, sys
request = json.loads(pathlib.Path(sys.argv[1]).read_text())
with open({log!r}, "a") as log:
    log.write(json.dumps(request) + "\\n")
text = pathlib.Path(request["sources"]["vllm/v1/attention/ops/triton_unified_attention.py"]).read_text()
compile(text, "attention", "exec")
{more}
shared = {patched} if "vllm-fleet patch" in text else 98304 if "return 32" in text else 65536
layer = {{"head_size": 512, "heads": 8, "kv_heads": 1}}
launch = {{"kernel": "unified_attention", "phase": "prefill", "tile": 32, "block_m": 16, "warps": 4, **layer}}
launches = [launch | {{"shared_bytes": shared, "registers": 64, "stack_bytes": 0}}]
fits = shared <= request["limit_bytes"]
print(json.dumps({{"triton": "3.7.1", "torch": "2.13.0", "launches": launches, "fits": fits}}))
"""

Scripted = Callable[..., Callable[[], list[dict[str, Any]]]]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that the patches touch, a neighbor, and the torch pin."""
    root = tmp_path / "tree"
    neighbor = str(Path(ATTENTION).with_name("neighbor.py"))
    for name, text in {**SOURCES, neighbor: "", "requirements/cuda.txt": "torch==2.13.0\n"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Puts a scripted compiler in place (bytes of the patched source, more lines); returns what lists its requests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(patch_check, "python_with", lambda _triton, _steps: Path(sys.executable))

    def put(patched: int = 65536, more: str = "") -> Callable[[], list[dict[str, Any]]]:
        log = tmp_path / "requests"
        log.write_text("")
        program = tmp_path / "checker.py"
        program.write_text(CHECKER.format(log=str(log), patched=patched, more=more))
        monkeypatch.setattr(patch_check, "CHECKER", program)
        return lambda: [json.loads(line) for line in log.read_text().splitlines()]

    return put


def judged(tree: Path, **more: Any) -> Verdict:
    shape = {"dtype": "float16", "block_size": 16, "layers": LAYERS}
    request: dict[str, Any] = {"triton": "3.7.1", "capability": "7.5", "limit_bytes": 65536, "shape": shape, **more}
    return check(Asked(Tree(tree, ""), **request), Steps(terminal(stderr=True), Durations(), "test"))


def test_stock_and_patched_are_asked_once(scripted: Scripted, tree: Path) -> None:
    asked_for = scripted()
    before = {path: path.read_bytes() for path in tree.rglob("*.py")}
    found = judged(tree)
    assert (found.outcome, found.error) == (Fit.FITS_PATCHED, None)
    assert [launches[0]["shared_bytes"] for launches in (found.stock, found.patched)] == [98304, 65536]
    assert {path: path.read_bytes() for path in tree.rglob("*.py")} == before
    assert len(asked_for()) == 2
    assert judged(tree) == found
    # The patch is in already: what it was before is judged, and that is known.
    apply_all(tree, "7.5")
    assert judged(tree) == found
    assert len(asked_for()) == 2


def test_whatever_decides_the_answer_asks_anew(scripted: Scripted, tree: Path) -> None:
    asked_for = scripted()
    judged(tree)
    changes: list[dict[str, Any]] = [{"limit_bytes": 98304}, {"capability": "7.2"}, {"shape": {"dtype": "float32"}}]
    for number, change in enumerate(changes):
        judged(tree, **change)
        assert len(asked_for()) == 2 * number + 4, change
    (tree / Path(ATTENTION).with_name("neighbor.py")).write_text("changed = 1\n")
    judged(tree)
    assert len(asked_for()) == 10
    (tree / "vllm" / "other.py").write_text("nobody asks\n")
    judged(tree)
    assert len(asked_for()) == 10
    assert len(scripted(more="more = 1")()) == 0
    judged(tree)
    assert len(asked_for()) == 2


def test_upstreams_own_fix_is_seen_by_the_compiler(scripted: Scripted, tree: Path) -> None:
    scripted()
    (tree / ATTENTION).write_text(UPSTREAM_FIX)
    found = judged(tree)
    assert (found.outcome, found.patched, found.error) == (Fit.NOT_NEEDED, [], None)


def test_from_8_0_on_nothing_is_compiled(scripted: Scripted, tree: Path) -> None:
    asked_for = scripted()
    (tree / ATTENTION).write_text("nothing to anchor in\n")
    assert judged(tree, capability="8.6").outcome is Fit.NOT_NEEDED
    assert asked_for() == []


def test_what_does_not_fit_patched_is_refused_with_what_would(scripted: Scripted, tree: Path) -> None:
    scripted(patched=98304)
    found = judged(tree)
    assert found.outcome is Fit.DOES_NOT_FIT
    assert found.error is not None
    assert found.error.code is ExitCode.REFUSED
    assert "asks for 98,304 bytes of shared memory of 65,536" in found.error.what
    # FACTS: 16 rows and the narrowest tile, 16, at 512 take 65,536 bytes; 32 query heads to a KV head do not fit.
    assert "at most 16 query heads per KV head where they are 512 wide" in found.error.mend


@pytest.mark.parametrize(
    "drifted",
    [
        SOURCE.replace("_get_tile_size", "_pick_tile"),
        SOURCE[: SOURCE.index("    TILE_SIZE_DECODE")] + "    TILE_SIZE_DECODE = _get_tile_size(",
        SOURCE + "# vllm-fleet patch triton-tile-clamp: end\n",
        None,
    ],
    ids=["renamed", "truncated", "damaged", "missing"],
)
def test_a_drifted_source_is_a_conflict(scripted: Scripted, tree: Path, drifted: str | None) -> None:
    scripted()
    (tree / ATTENTION).unlink()
    if drifted is not None:
        (tree / ATTENTION).write_text(drifted)
    found = judged(tree)
    assert (found.outcome, found.patched) == (Fit.CONFLICT, [])
    assert found.error is not None
    assert found.error.code is ExitCode.REFUSED
    assert found.error.where.startswith(str(tree / ATTENTION))


def test_a_drifted_source_that_fits_is_no_conflict(scripted: Scripted, tree: Path) -> None:
    scripted()
    (tree / ATTENTION).write_text(UPSTREAM_FIX.replace("_get_tile_size", "_pick_tile"))
    assert judged(tree).outcome is Fit.NOT_NEEDED


@pytest.mark.parametrize(
    ("more", "words", "code"),
    [
        ("raise SystemExit('no launch came')", "no launch came", ExitCode.REFUSED),
        ("import os; os.kill(os.getpid(), 9)", "ended by signal 9", ExitCode.REFUSED),
        ("import time; time.sleep(60)", "longer than 1 s", ExitCode.STALLED),
    ],
)
def test_a_check_without_a_verdict_is_told_and_not_kept(
    scripted: Scripted, tree: Path, monkeypatch: pytest.MonkeyPatch, more: str, words: str, code: ExitCode
) -> None:
    monkeypatch.setattr(patch_check, "_TIMEOUT_S", 1.0)
    scripted(more=more)
    with pytest.raises(FleetError, match=words) as error:
        judged(tree)
    assert error.value.code is code
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "no config.json"),
        ("{", "is no JSON"),
        ("[]", "tells no attention"),
        ("{}", "tells no attention"),
        ('{"num_attention_heads": 8, "hidden_size": 1024, "kv_lora_rank": 512}', "tells no attention"),
    ],
)
def test_a_model_that_tells_no_attention(tmp_path: Path, tree: Path, config: str | None, words: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(FleetError, match=words) as error:
        asked(Tree(tree, ""), tmp_path, "7.5", None, None)
    assert error.value.code is ExitCode.BAD_INPUT
    assert error.value.where == str(tmp_path / "config.json")


def test_what_is_not_given_comes_from_the_model_the_tree_and_the_capability(tmp_path: Path, tree: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512}
    types = ["sliding_attention", "full_attention"]
    text = {**heads, "sliding_window": 512, "num_hidden_layers": 2, "layer_types": types}
    config = {"model_type": "gemma4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = asked(Tree(tree, ""), tmp_path, "7.5", None, None)
    # FACTS: torch 2.13.0 brings Triton 3.7.1; a T4G has 65,536 bytes.
    assert (found.triton, found.limit_bytes, found.shape["dtype"]) == ("3.7.1", 65536, "float16")
    assert found.shape["layers"] == LAYERS
    given = asked(Tree(tree, ""), tmp_path, "7.0", "3.6.0", 49152)
    assert (given.triton, given.limit_bytes) == ("3.6.0", 49152)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "gemma3"}))
    # FACTS: float16 is refused for gemma3 as unstable, and 7.5 has no bfloat16.
    assert asked(Tree(tree, ""), tmp_path, "7.5", None, None).shape["dtype"] == "float32"
    for capability in ("7.6", "turing", "99.0"):
        with pytest.raises(FleetError, match="is not known") as error:
            asked(Tree(tree, ""), tmp_path, capability, None, None)
        assert error.value.code is ExitCode.BAD_INPUT
    (tree / "requirements" / "cuda.txt").write_text("torch==2.99.0\n")
    with pytest.raises(FleetError, match=r"torch 2\.99\.0, whose Triton is not known"):
        asked(Tree(tree, ""), tmp_path, "7.5", None, None)
    assert asked(Tree(tree, ""), tmp_path, "8.6", None, None).limit_bytes == 0
