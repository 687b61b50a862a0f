"""A variable that no role has, or of a wrong type, is found before anything reaches a host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.paths import PROJECT

# Nothing listens there: whoever is asked for more than its variables is unreachable.
NOWHERE = {"ansible_host": "127.0.0.9", "ansible_port": 1}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"swapfile_size": 64}, "no role has a variable 'swapfile_size'", "rename swapfile_size to swapfile_size_mib"),
    ({"rust_zzz": 1}, "no role has a variable 'rust_zzz'", "take rust_zzz out of the inventory"),
    ({"vllm_service_port": "eighty"}, "'eighty'", "grep '`vllm_service_port`' roles/*/README.md"),
    ({"preflight_method": "guess"}, "got: guess", "grep '`preflight_method`' roles/*/README.md"),
    ({"vllm_source_build_releases": [{"name": "a"}]}, "missing required arguments", "vllm_source_build_releases"),
    ({"triton_patch_shape": {"heads": 8, "kv_heads": 1}}, "missing required arguments: block_size", "grep '`triton"),
    (
        {"triton_patch_shape": {"dtype": "float16", "block_size": 16, "layers": [{"head_size": "wide"}]}},
        "missing required arguments: heads, kv_heads, sliding_window found in triton_patch_shape -> layers",
        "grep '`triton_patch_shape`'",
    ),
    ({"vllm_service_model": "{{ oops"}, "Syntax error in template", "grep '`vllm_service_model`'"),
    ({"vllm_service_port": "eighty", "swapfile_size": 64}, "swapfile_size'; vllm_service_port", "mib; grep"),
]
RELEASE = {"name": "a", "method": "wheel", "distribution": "vllm", "version": "0.33.0", "target_device": "cuda"}


def inventory(path: Path, hosts: dict[str, dict[str, Any]]) -> Path:
    """An inventory of hosts with these variables each, out of reach."""
    path.write_text(yaml.safe_dump({"vllm": {"hosts": {name: NOWHERE | mine for name, mine in hosts.items()}}}))
    return path


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one run of the playbook says of each host."""
    good = {"good": {"vllm_source_build_releases": [RELEASE], "vllm_service_model": "{{ what_a_role_finds.later }}"}}
    hosts = {f"host{n}": mine for n, (mine, _, _) in enumerate(WRONG)} | good
    path = inventory(tmp_path_factory.mktemp("inventory") / "hosts.yml", hosts)
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(path), "playbooks/site.yml"],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("fatal: ")]
    return {line.split("[", 1)[1].split("]", 1)[0]: line for line in lines}


@pytest.mark.parametrize(("number", "wrong"), list(enumerate(WRONG)))
def test_what_is_wrong_is_told_and_the_host_is_not_reached(
    told: dict[str, str], number: int, wrong: tuple[dict[str, Any], str, str]
) -> None:
    variables, what, mend = wrong
    line = told[f"host{number}"]
    assert "FAILED!" in line
    text = line.split('"msg": "', 1)[1].replace('\\"', '"')
    assert text.startswith("variables: ")
    assert what in text
    assert f"\\n  where: host{number} " in text
    assert all(name in text.split("where: ")[1] for name in variables)
    assert mend in text.split("mend:  ")[1]


def test_right_variables_let_the_run_go_on_to_the_host(told: dict[str, str]) -> None:
    assert "UNREACHABLE!" in told["good"]


def test_the_command_ends_with_the_code_of_bad_input(tmp_path: Path) -> None:
    path = inventory(tmp_path / "hosts.yml", {"one": {"swapfile_size": 64}})
    done = subprocess.run(
        [sys.executable, "-m", "fleet", "converge", "-i", str(path), "--yes"],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "no role has a variable 'swapfile_size'" in done.stdout + done.stderr
