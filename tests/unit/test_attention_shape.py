"""The attention that the kernel check compiles for, and what the compiler's figures say of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.attention_shape import attention_shape, largest_group, least_bytes
from ansible.module_utils.host_plan import Wishes

from fleet.paths import PROJECT
from tests.unit.examples import FIGURES, figure

# Gemma 4's own figures; E2B's are the field report's.
E2B = [[256, 8, 1, 512], [512, 8, 1, 0]]
A4B = [[256, 16, 8, 1024], [512, 16, 2, 0]]
GEMMA2 = [[256, 8, 4, 0], [256, 8, 4, 4096]]
LLAMA = [[128, 32, 8, 0]]


def shaped(attention: list[list[int]], arguments: str = "") -> tuple[int, list[list[int]]]:
    """Block size and layers of one GPU, in float16."""
    shape = attention_shape(attention, "float16", Wishes(arguments=tuple(arguments.split())))
    assert shape["dtype"] == "float16"
    keys = ["head_size", "heads", "kv_heads", "sliding_window"]
    assert all(list(layer) == keys for layer in shape["layers"])
    return shape["block_size"], [list(layer.values()) for layer in shape["layers"]]


@pytest.mark.parametrize(
    ("attention", "arguments", "block_size", "layers"),
    [
        (E2B, "", 16, [[512, 8, 1, 0], [256, 8, 1, 512]]),
        (E2B, "--block-size 32", 32, [[512, 8, 1, 0], [256, 8, 1, 512]]),
        (E2B, "--block-size=auto", 16, [[512, 8, 1, 0], [256, 8, 1, 512]]),
        # 2 x 512 bytes a token beside 8 x 256: the wide heads' blocks have twice the tokens.
        (A4B, "", 32, [[512, 16, 2, 0], [256, 16, 8, 1024]]),
        # On two GPUs 512 beside 4 x 256, on eight 512 beside 256, since a GPU has at least one KV head.
        (A4B, "--tensor-parallel-size 2", 32, [[512, 8, 1, 0], [256, 8, 4, 1024]]),
        (A4B, "-tp 8", 16, [[512, 2, 1, 0], [256, 2, 1, 1024]]),
        (A4B, "-tp 0", 32, [[512, 16, 2, 0], [256, 16, 8, 1024]]),
        # 3 x 256 is no multiple of 512.
        ([[256, 12, 3, 512], [512, 8, 1, 0]], "", 16, [[512, 8, 1, 0], [256, 12, 3, 512]]),
        # Heads of two widths and one kind of window keep blocks of one size.
        ([[64, 8, 8, 0], [128, 8, 1, 0]], "", 16, [[128, 8, 1, 0], [64, 8, 8, 0]]),
        (GEMMA2, "", 16, [[256, 8, 4, 0], [256, 8, 4, 4096]]),
        (LLAMA, "-tp 4", 16, [[128, 8, 2, 0]]),
    ],
)
def test_the_shape_is_that_of_one_gpu(
    attention: list[list[int]], arguments: str, block_size: int, layers: list[list[int]]
) -> None:
    assert shaped(attention, arguments) == (block_size, layers)


def test_what_is_not_known_has_no_shape() -> None:
    assert attention_shape([], "float16", Wishes()) == {}


@pytest.mark.parametrize(
    ("head", "heads", "kv_heads", "dtype", "expected"),
    [
        # FACTS: 8 rows where at most 8 query heads share a KV head, 16 to 16, then the next power of 2.
        (512, 8, 1, "float16", 49_152),
        (512, 9, 1, "float16", 65_536),
        (512, 16, 1, "float16", 65_536),
        (512, 17, 1, "float16", 98_304),
        (512, 32, 1, "float16", 98_304),
        (512, 64, 8, "float16", 49_152),
        # Odd widths and uneven groups are rounded up.
        (300, 8, 1, "float16", 49_152),
        (512, 17, 2, "float16", 65_536),
        (256, 8, 1, "float32", 49_152),
        # Nothing was said of these.
        (512, 33, 1, "float16", None),
        (512, 8, 1, "float32", None),
        (1024, 8, 1, "float16", None),
    ],
)
def test_the_least_is_of_the_narrowest_launch(
    head: int, heads: int, kv_heads: int, dtype: str, expected: int | None
) -> None:
    assert least_bytes(FIGURES, head, heads, kv_heads, dtype) == expected


def test_every_phase_must_fit() -> None:
    uneven = [figure(512, 16, 65_536), figure(512, 8, 49_152, phase="decode")]
    assert least_bytes(uneven, 512, 8, 1, "float16") == 65_536
    assert least_bytes([], 512, 8, 1, "float16") is None


@pytest.mark.parametrize(("limit", "most"), [(65_536, 16), (98_304, 32), (65_535, 8), (49_151, 0)])
def test_the_largest_group_that_fits(limit: int, most: int) -> None:
    assert largest_group(FIGURES, 512, "float16", limit) == most
    assert largest_group(FIGURES, 512, "float32", limit) == 0


def test_the_figures_that_are_kept_say_what_was_measured() -> None:
    kept = json.loads((PROJECT / "roles" / "triton_patch" / "files" / "launch_shapes.json").read_text())
    figures = kept["capabilities"]["7.5"]["shapes"]
    # FACTS: head 512 in float16.
    assert [least_bytes(figures, 512, group, 1, "float16") for group in (8, 16, 32)] == [49_152, 65_536, 98_304]
    # Gemma 2 and 3 in float32: more than their windowed layers' 33,792 (FACTS), by Triton 3.7.1 and vLLM 0.33.0.
    assert least_bytes(figures, 256, 16, 1, "float32") == 49_152
    assert largest_group(figures, 512, "float16", 65_536) == 16
    # Whatever head is served at 7.5, a figure says whether it can be.
    for head in (64, 128, 256, 512):
        for dtype in ("float16", "float32"):
            assert all(least_bytes(figures, head, group, 1, dtype) for group in (1, 8, 16, 32, 64)), (head, dtype)


def test_the_roles_hand_the_shape_on(tmp_path: Path) -> None:
    text = {"model_type": "gemma4_text", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
    wanted: dict[str, Any] = {"dtype": "float16", "block_size": 16, "layers": [
        {"head_size": 512, "heads": 4, "kv_heads": 1, "sliding_window": 0},
        {"head_size": 256, "heads": 4, "kv_heads": 1, "sliding_window": 512}]}  # fmt: skip
    default = yaml.safe_load((PROJECT / "roles" / "triton_patch" / "vars" / "main.yml").read_text())
    given = {"dtype": "float32", "block_size": 64, "layers": [{**wanted["layers"][0], "heads": 2}]}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "known": (text, {}),
        "unknown": ({"model_type": "mamba"}, {}),
        "given": (text, {"triton_patch_shape": given}),
    }
    for name, (config, _) in cases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        (tmp_path / name / "chat_template.jinja").write_text("{{ messages }}")
    shape = {"content": "{{ triton_patch_shape | to_json }}", "mode": "0600"}
    play = {
        "hosts": "all",
        "gather_facts": False,
        "tasks": [
            *({"ansible.builtin.include_role": {"name": name, "public": True, "apply": {"check_mode": True}}}
              for name in ("preflight", "triton_patch")),
            {"ansible.builtin.copy": {"dest": f"{tmp_path}/{{{{ inventory_hostname }}}}.json", **shape}},
        ],
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    every = {
        "ansible_connection": "local", "ansible_python_interpreter": sys.executable,
        "preflight_method": "wheel", "preflight_capability": "7.5", "preflight_torch_prefixes": [],
        "preflight_writes": [], "triton_patch_releases": [], "triton_patch_limit_bytes": 65536,
        "preflight_model": f"{tmp_path}/{{{{ inventory_hostname }}}}",
    }  # fmt: skip
    hosts = {name: variables for name, (_, variables) in cases.items()}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"vars": every, "hosts": hosts}}))
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", "hosts.yml", "play.yml"],
        cwd=tmp_path, env={**os.environ, "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"), "PIP_NO_INDEX": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in cases}
    assert found == {"known": wanted, "unknown": default["_triton_patch_shape"], "given": given}
