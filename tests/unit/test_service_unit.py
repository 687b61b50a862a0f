"""The role's YAML and templates, through Ansible: what is refused before any module runs, and what the units say."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.paths import PROJECT

ROLE = PROJECT / "roles" / "vllm_service"
BASE: dict[str, Any] = {
    "vllm_service_release": {"build_id": "vllm-1", "path": "/opt/vllm/releases/vllm-1", "python": "/x"},
    "vllm_service_capability": "7.5",
    "vllm_service_weights_bytes": 0,
    "vllm_service_swap_mib": 0,
    "_vllm_service_gpu_bytes": 15360 * 1024 * 1024,
    "ansible_facts": {"vllm_plan": {"dtype": "float16"}},
}


class Played:
    """The role's tasks up to its modules, run once over many sets of variables, each a host of its own."""

    def __init__(self, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
        tasks = yaml.safe_load((ROLE / "tasks" / "configure.yml").read_text())
        facts = [task for task in tasks if "ansible.builtin.set_fact" in task]
        (folder / "facts.yml").write_text(yaml.safe_dump(facts))
        out = folder / "out"
        out.mkdir()
        templates = ("vllm.service", "vllm-watchdog.service", "vllm-watchdog.timer")
        copies = [
            {
                "name": name,
                "ansible.builtin.template": {
                    "src": str(ROLE / "templates" / f"{name}.j2"),
                    "dest": f"{out}/{{{{ inventory_hostname }}}}.{name}",
                    "mode": "0644",
                },
                "tags": ["always"],
            }
            for name in templates
        ]
        play = {
            "hosts": "all",
            "gather_facts": False,
            "tasks": [
                {
                    "name": "Set",
                    "ansible.builtin.include_vars": str(folder / "{{ inventory_hostname }}.json"),
                    "no_log": True,
                    "tags": ["always"],
                },
                # No more than its first phase runs, by the tags below.
                {"name": "Role", "ansible.builtin.import_role": {"name": "vllm_service"}},
                {"name": "Facts", "ansible.builtin.import_tasks": str(folder / "facts.yml"), "tags": ["always"]},
                *copies,
            ],
        }
        (folder / "play.yml").write_text(yaml.safe_dump([play]))
        inventory = {
            "all": {
                "vars": {"ansible_connection": "local", "ansible_python_interpreter": sys.executable},
                "hosts": dict.fromkeys(cases),
            }
        }
        (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
        for name, case in cases.items():
            (folder / f"{name}.json").write_text(json.dumps({**BASE, **case}))
        done = subprocess.run(
            [
                str(Path(sys.executable).parent / "ansible-playbook"),
                *("-i", "hosts.yml", "play.yml", "-vvv", "--tags", "vllm_service_preflight"),
            ],
            cwd=folder,
            env={
                "PATH": "/usr/bin:/bin",
                "HOME": str(folder),
                "ANSIBLE_NOCOLOR": "1",
                "ANSIBLE_FORKS": "2",
                "ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg"),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        self.said, self.out = done.stdout + done.stderr, out

    def message(self, name: str) -> str:
        """What the host's failure said; empty where it went through."""
        if (self.out / f"{name}.vllm.service").exists():
            return ""
        return next(part for part in re.split(r"\n(?=fatal: )", self.said) if part.startswith(f"fatal: [{name}]"))

    def unit(self, name: str, unit: str = "vllm.service") -> str:
        """A rendered unit."""
        return (self.out / f"{name}.{unit}").read_text()


AWKWARD = ["--override-generation-config", """{"a": "it's $5 100% \\\\ back"}"""]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "public": ({"vllm_service_host": "0.0.0.0"}, "no loopback or private address"),
    "hf-token": ({"vllm_service_environment": {"HF_TOKEN": "hf_leak"}}, "HF_TOKEN would be readable by every user"),
    "api-key": ({"vllm_service_environment": {"VLLM_API_KEY": "hf_leak"}}, "VLLM_API_KEY would be readable"),
    "aws": ({"vllm_service_environment": {"AWS_SECRET_ACCESS_KEY": "hf_leak"}}, "AWS_SECRET_ACCESS_KEY would be"),
    "lower": ({"vllm_service_environment": {"my_password": "hf_leak"}}, "my_password would be readable"),
    "argument": ({"vllm_service_arguments": ["--api-key", "hf_leak"]}, "--api-key would be readable"),
    "joined": ({"vllm_service_arguments": ["--hf-token=hf_leak"]}, "--hf-token would be readable"),
    "preload": ({"vllm_service_environment": {"LD_PRELOAD": "/tmp/x.so"}}, "LD_PRELOAD is set by this role or decides"),
    "port": ({"vllm_service_environment": {"VLLM_PORT": "8000"}}, "VLLM_PORT is set by this role"),
    "cache": ({"vllm_service_environment": {"TRITON_CACHE_DIR": "/mnt/efs"}}, "TRITON_CACHE_DIR is set by this role"),
    "stats": ({"vllm_service_arguments": ["--disable-log-stats"]}, "--disable-log-stats takes away the token counters"),
}
TAKEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "token-file": {"vllm_service_token_file": "/run/vllm-secrets/hf_token"},
    "no-watchdog": {"vllm_service_arguments": ["--disable-log-stats"], "vllm_service_watchdog_enabled": False},
    "awkward": {
        "vllm_service_arguments": AWKWARD,
        "vllm_service_environment": {"A_B": 'x"y\\z $H 5% #;', "TOKENIZERS_PARALLELISM": "false"},
    },
    "token-words": {"vllm_service_arguments": ["--long-prefill-token-threshold", "1", "--return-tokens-as-token-ids"]},
    "other-port": {"vllm_service_port": 9000},
    "other-length": {"vllm_service_max_model_len": 8192},
    "large": {"_vllm_service_gpu_bytes": 24 * 1024**3},
    "local": {"vllm_service_model": "/srv/model"},
    "ampere": {"vllm_service_capability": "8.6"},
    "gemma3": {"ansible_facts": {"vllm_plan": {"dtype": "float32"}}},
}


CASES: dict[str, dict[str, Any]] = {name: case for name, (case, _) in REFUSED.items()} | TAKEN


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    return Played(tmp_path_factory.mktemp("play"), CASES)


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_in_the_house_form(played: Played, name: str) -> None:
    message = played.message(name)
    assert REFUSED[name][1] in message
    assert f"where: {name} vllm_service_" in message
    assert "mend:  " in message


@pytest.mark.parametrize("name", TAKEN)
def test_good_input_goes_through(played: Played, name: str) -> None:
    assert played.message(name) == ""


def test_a_value_in_a_secrets_place_is_printed_nowhere(played: Played) -> None:
    # Run with -vvv, which prints what every module is given.
    assert "hf_leak" not in played.said


def directives(text: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def words(line: str) -> list[str]:
    """A command or an assignment as systemd reads it (man systemd.syntax): quotes, C escapes, %% and $$."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', line)
    return [re.sub(r"\\(.)", r"\1", quoted or bare).replace("%%", "%").replace("$$", "$") for quoted, bare in found]


def test_the_unit_survives_what_a_server_does(played: Played) -> None:
    unit = directives(played.unit("plain"))
    # B01, B16, B21, B24, B06.
    assert unit["Restart"] == ["always"]
    assert unit["KillMode"] == ["control-group"]
    assert unit["SendSIGKILL"] == ["yes"]
    assert int(unit["RestartSec"][0]) >= 10
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert unit["TimeoutStartSec"] == ["infinity"]
    assert unit["Type"] == ["exec"]
    assert unit["ExecStartPre"] == ["-/usr/bin/python3 -I /opt/vllm-fleet/service/prestart.py %n @KEY@"]


def environment(played: Played, name: str) -> dict[str, str]:
    assignments = [words(value)[0] for value in directives(played.unit(name))["Environment"]]
    return dict(assignment.split("=", 1) for assignment in assignments)


def test_every_cache_is_under_a_folder_of_the_build_and_the_arguments(played: Played) -> None:
    found = environment(played, "plain")
    cache = found["FLASHINFER_WORKSPACE_BASE"]
    assert re.fullmatch(r"/var/lib/vllm/cache/vllm-1/[0-9a-f]{12}", cache)
    names = (
        "VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH",
        "NUMBA_CACHE_DIR", "XDG_CACHE_HOME",
    )  # fmt: skip
    assert all(found[name].startswith(f"{cache}/") for name in names)
    assert len({found[name] for name in names}) == len(names)
    assert {found["HOME"], found["HF_HOME"]} == {"/var/lib/vllm", "/var/lib/vllm/hf"}


def test_the_folder_follows_what_is_compiled_and_not_the_address(played: Played) -> None:
    caches = {name: environment(played, name)["FLASHINFER_WORKSPACE_BASE"] for name in TAKEN}
    assert caches["other-port"] == caches["plain"]
    assert len({caches[name] for name in ("plain", "other-length", "awkward", "ampere")}) == 4


def test_programs_that_compile_at_run_time_find_their_tools(played: Played) -> None:
    # A27, A39: the JIT's nvcc and ninja, and its number of jobs.
    found = environment(played, "plain")
    assert found["CUDA_HOME"] == "/usr/local/cuda"
    assert found["PATH"].split(":")[:2] == ["/opt/vllm/releases/vllm-1/bin", "/usr/local/cuda/bin"]
    assert found["MAX_JOBS"] == "2"
    assert "VLLM_PORT" not in found
    assert "HF_HUB_OFFLINE" not in found
    assert environment(played, "local")["HF_HUB_OFFLINE"] == "1"


def test_arguments_and_environment_arrive_as_they_are(played: Played) -> None:
    (command,) = directives(played.unit("awkward"))["ExecStart"]
    assert words(command)[-6:-4] == AWKWARD
    # Single, they are systemd's own: a specifier, and in a command a variable.
    assert "$$5 100%%" in command
    assert "$H 5%% #;" in played.unit("awkward")
    assert environment(played, "awkward")["A_B"] == 'x"y\\z $H 5% #;'


@pytest.mark.parametrize(("name", "expected"), [("plain", "16"), ("large", None)])
def test_a_small_gpu_computes_few_sequences_at_a_time(played: Played, name: str, expected: str | None) -> None:
    (command,) = directives(played.unit(name))["ExecStart"]
    argv = words(command)
    assert (argv[argv.index("--max-num-seqs") + 1] if "--max-num-seqs" in argv else None) == expected


def test_turing_gets_its_types_and_nothing_else_does(played: Played) -> None:
    for name, expected in (("plain", True), ("ampere", False)):
        (command,) = directives(played.unit(name))["ExecStart"]
        assert ("--dtype" in words(command)) == expected


def test_a_model_that_is_unstable_in_float16_gets_the_type_of_the_plan(played: Played) -> None:
    (command,) = directives(played.unit("gemma3"))["ExecStart"]
    assert "--dtype float32" in command.replace('"', "")


def test_a_token_fetched_anew_does_not_stop_the_server(played: Played) -> None:
    unit = directives(played.unit("token-file"))
    # A required unit that is restarted takes its dependents with it.
    assert "Requires" not in unit
    assert unit["Wants"] == ["network-online.target vllm-secrets.service"]
    assert unit["LoadCredential"] == ["hf_token:/run/vllm-secrets/hf_token"]
    assert '"HF_TOKEN_PATH=%d/hf_token"' in unit["Environment"]


def test_the_watchdog_is_confined_and_restarts_under_the_lock(played: Played) -> None:
    unit = directives(played.unit("plain", "vllm-watchdog.service"))
    assert unit["ExecStart"] == [
        "+/usr/bin/flock --nonblock --conflict-exit-code 0 /run/vllm-serve.lock /usr/bin/systemctl restart vllm.service"
    ]
    assert unit["ExecCondition"][0].startswith("/usr/bin/python3 -I ")
    # Unprivileged, and not dynamic: the bus that systemd is asked over may not know a dynamic user.
    assert unit["User"] == ["vllm"]
    assert "DynamicUser" not in unit
    assert (unit["IPAddressDeny"], unit["IPAddressAllow"]) == (["any"], ["127.0.0.1"])
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    # A wait for the metrics, the question and the metrics again must not be cut short.
    assert int(unit["TimeoutStartSec"][0]) > 3 * 60
    # Ordered after what it restarts, its own start would wait for that restart, and the restart for it.
    assert not {"After", "Requires", "BindsTo", "PartOf"} & set(unit)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd's own word needs systemd's own program")
@pytest.mark.parametrize(
    ("name", "unit"),
    [("awkward", "vllm.service"), ("plain", "vllm-watchdog.service"), ("plain", "vllm-watchdog.timer")],
)
def test_systemd_takes_the_units(played: Played, tmp_path: Path, name: str, unit: str) -> None:
    text = re.sub(r"(?m)^(Exec\w+=[-+]?)\S+", r"\1/bin/true", played.unit(name, unit))
    (tmp_path / unit).write_text(text)
    (tmp_path / "vllm-watchdog.service").touch()
    if unit.endswith("timer"):
        (tmp_path / "vllm-watchdog.service").write_text("[Service]\nExecStart=/bin/true\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)], capture_output=True, text=True, check=False
    )
    assert [line for line in done.stderr.splitlines() if unit in line] == []
    (tmp_path / unit).write_text(text.replace("[Install]", "[Install]\nNonsense=1") + "[Service]\nNonsense=1\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / unit)], capture_output=True, text=True, check=False
    )
    assert "Nonsense" in done.stderr
