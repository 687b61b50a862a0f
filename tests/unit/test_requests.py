"""Bad input ends in the house form before anything starts; secrets are not taken from the command line."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet.errors import ExitCode, FleetError
from fleet.events import HostResult, HostTally, Outcome
from fleet.execution import arguments
from fleet.paths import PROJECT
from fleet.requests import Request, known_variables, parse_extra_vars, sandbox_inventory
from sandbox.pip_config import PipConfig

KNOWN = known_variables()


def test_values_are_read_as_yaml() -> None:
    assert parse_extra_vars(["swapfile_size_mib=64", "vllm_service_arguments=[--x]"], KNOWN) == {
        "swapfile_size_mib": 64,
        "vllm_service_arguments": ["--x"],
    }


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("swapfile_size=64", "nearest: swapfile_size_mib"),
        ("no_sign", "name=value is wanted"),
        ("hf_token=x", "looks like a secret"),
        ("vllm_service_model=hf_0123456789abcdefABCDEF", "looks like a secret"),
        ("vllm_service_environment={A: 1, HF_TOKEN: x}", "HF_TOKEN looks like a secret"),
        ("vllm_service_arguments=[--a=1, --api-key=x]", "--api-key looks like a secret"),
        ("vllm_service_model=AKIAIOSFODNN7EXAMPLE", "looks like a secret"),
        ("swapfile_size_mib=lots", "swapfile_size_mib: .*lots.* int"),
        ("vllm_service_environment=[a]", "vllm_service_environment: .*dict"),
        ("vllm_service_arguments=[a", "vllm_service_arguments: no YAML"),
    ],
)
def test_bad_words_are_refused(word: str, words: str) -> None:
    with pytest.raises(FleetError, match=words) as error:
        parse_extra_vars([word], KNOWN)
    assert error.value.code is ExitCode.BAD_INPUT
    assert "\n  where: " in str(error.value)
    assert "\n  mend:  " in str(error.value)


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["converge", "-i", "/nowhere/hosts", "--yes"], 2, "no such inventory"),
        (["converge", "-i", "inventory", "-e", "nonsense=1", "--yes"], 2, "no role has a variable 'nonsense'"),
        (["converge", "--nonsense", "--yes"], 2, "No such option"),
        (["nonsense"], 2, "No such command"),
        (["converge", "--max-errors", "101%"], 2, "'101%' is neither a number of hosts nor a share of them"),
        (["converge", "--max-errors", "1"], 2, "only Run Command stops after a number of failures"),
    ],
)
def test_the_command_line_ends_bad_input_with_its_code(argv: list[str], code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet", *argv], cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "  where: " in done.stderr
    assert "  mend:  " in done.stderr


def test_status_without_hosts_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet", "status"], cwd=PROJECT, env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "runner: no sandbox is up, and no inventory is given\n  where: command line\n  mend:  ./runner.py sandbox up\n"
    )


def test_an_error_is_json_too_where_json_is_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet", "converge", "--json", "-e", "swapfile_size=64"],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["where"], error["mend"]) == (2, "-e swapfile_size", "-e swapfile_size_mib=VALUE")
    assert done.stderr.startswith("runner: no role has a variable 'swapfile_size'")


def test_a_value_is_taken_as_its_role_takes_it() -> None:
    given = ["vllm_service_arguments=--x", "swapfile_size_mib='64'", "swapfile_path={{ somewhere }}"]
    assert parse_extra_vars(given, KNOWN) == {
        "vllm_service_arguments": ["--x"],
        "swapfile_size_mib": 64,
        "swapfile_path": "{{ somewhere }}",
    }


def test_the_command_that_goes_on_asks_for_the_same() -> None:
    given = [
        "rust_toolchain='1.95'",
        "vllm_service_arguments=[--x, 'a b']",
        "swapfile_size_mib=64",
        "preflight_model=m",
    ]
    variables = parse_extra_vars(given, KNOWN)
    request = Request("p.yml", (Path("/a b.yml"),), variables, limit="h", tags="rust", forks=5, flags=("--check",))
    words = shlex.split(request.again())
    assert words[:10] == [
        "./runner.py", "converge", "-i", "/a b.yml", "--limit", "h", "--tags", "rust", "--check", "--forks",
    ]  # fmt: skip
    assert words[10] == "5"
    # A text that reads as a number stays a text.
    assert parse_extra_vars(words[12::2], KNOWN) == variables
    assert variables["rust_toolchain"] == "1.95"
    assert Request("p.yml", (sandbox_inventory(),)).again() == "./runner.py converge"
    request = Request("p.yml", (Path("/a.yml"),), max_errors="5%")
    assert request.again() == "./runner.py converge -i /a.yml --max-errors 5%"


def test_a_commands_own_switch_sets_its_variable_and_is_asked_for_again(tmp_path: Path) -> None:
    switches = {"--stop": "triton_patch_search_stops_service"}
    request = Request("p.yml", (Path("/a.yml"),), limit="h", command="benchmark kernels", switches=switches)
    assert request.again() == "./runner.py benchmark kernels -i /a.yml --limit h --stop"
    assert arguments(request, tmp_path)["extravars"]["triton_patch_search_stops_service"] is True
    assert set(switches.values()) <= set(KNOWN)
    stopping = arguments(request.stopping(), tmp_path)["extravars"]
    assert "triton_patch_search_stops_service" not in stopping


def test_help_names_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fleet", "--help"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    for command in ("converge", "status", "repatch", "benchmark", "sandbox", "test"):
        assert command in done.stdout


def test_tallies_keep_the_first_message_and_a_refusal() -> None:
    tally = HostTally()
    tally.add(HostResult("h", "r", "t", Outcome.CHANGED, 1.0))
    tally.add(HostResult("h", "r", "t", Outcome.FAILED, 1.0, "first", {"refused": True}))
    tally.add(HostResult("h", "r", "t", Outcome.FAILED, 1.0, "second"))
    assert (tally.ok, tally.changed, tally.failed, tally.refused, tally.message) == (1, 1, 2, True, "first")


def test_pip_configuration_goes_along_with_the_folders_it_names(tmp_path: Path) -> None:
    index = tmp_path / "index" / "simple"
    index.mkdir(parents=True)
    config = PipConfig({"extra-index-url": (f"file://{index}",), "find-links": (str(tmp_path),), "cert": ("/c",)})
    assert config.local_paths == (index.parent, tmp_path)
    text = config.render(("/srv/wheels",))
    assert f"find-links =\n    {tmp_path}\n    /srv/wheels\n" in text
    # pip keeps the line break of a folded single value.
    assert "cert = /c\n" in text


def test_ctrl_c_ends_a_command_with_its_own_code(tmp_path: Path) -> None:
    # An inventory that takes its time: the signal comes while Ansible reads it.
    inventory = tmp_path / "slow.sh"
    inventory.write_text(f"#!/bin/sh\ntouch {tmp_path}/reading\nsleep 100\n")
    inventory.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "fleet", "status", "-i", str(inventory)], cwd=PROJECT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    while not (tmp_path / "reading").exists():
        assert process.poll() is None
        time.sleep(0.05)
    inventory.write_text("#!/bin/sh\necho '{}'\n")  # the stop reads it as well
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 130, said
    assert said.rstrip().endswith("runner: stopped; what was done stays done, a build goes on; converge again to go on")
