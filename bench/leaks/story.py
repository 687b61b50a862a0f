"""What a fleet goes through while it is hunted over: a whole run, and every way that one goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import boto3

from bench.leaks.places import Ground
from fleet.errors import ExitCode, FleetError
from fleet.paths import PROJECT, state_dir
from fleet.requests import local_aws_inventories, sandbox_inventory
from sandbox.containers import podman_path
from sandbox.standins.aws import SECRET_ID

# A process that has it in its environment was given the controller's keys there, as a user may.
KEYS_IN_ENVIRONMENT = "VLLM_FLEET_HUNT_GAVE_KEYS"
_EC2 = [word for path in local_aws_inventories() for word in ("-i", str(path))]
_SECRETS_HOME = "/opt/vllm-fleet/secrets"


@dataclass(slots=True)
class Story:
    """One host's story.

    Attributes:
        ground: takes what every command says.
        environment: of the commands, without keys: these are in a file, as AWS's own tools keep them.
        keys: the controller's keys by their variables' names.
        instance: the host's id; `container` is where it runs.
        tokens: the token at first, and the one that it is rotated to.
        extra: a value of the user's that looks like no known secret.
        typed: command lines that hold what was typed by hand, which are the user's own.
    """

    ground: Ground
    environment: dict[str, str]
    keys: dict[str, str]
    instance: str
    container: str
    tokens: tuple[str, str]
    extra: str
    typed: set[bytes] = field(default_factory=set)

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Each step by its name, in order."""
        yield "a bare host converges", lambda: self._run(0, "converge", *_EC2, "--limit", self.instance, "--json")
        yield "-vvv --diff", lambda: self._run(0, "converge", *_EC2, "--limit", self.instance, "-vvv", "--diff")
        yield "check mode", lambda: self._run(0, "converge", *_EC2, "--limit", self.instance, "--check", "-vvv")
        yield "by session", self._by_session
        yield "a run that fails", self._fails
        yield "secrets typed by hand", self._typed_by_hand
        yield "Ctrl-C", lambda: self._broken_off(signal.SIGINT, *_EC2, "--limit", self.instance)
        yield "kill -9 of the runner", self._killed
        yield "kill -9 with keys in the environment", self._killed_with_keys
        yield "a module crashes", self._module_crashes
        yield "a looped task fails", self._loop_fails
        yield "bash -x", self._traced
        yield "the fetcher is crashed for a core dump", self._fetcher_crashes
        yield "malformed secrets", self._malformed
        yield "the token is rotated", lambda: self._rotate(0, json.dumps({"HF_TOKEN": self.tokens[1]}))
        yield "status and audit", self._looked_at

    def _run(self, code: int, *words: str, **more: str) -> None:
        self._call(code, [sys.executable, "-m", "fleet", *words], **more)

    def _call(self, code: int, argv: list[str], **more: str) -> None:
        done = subprocess.run(argv, cwd=PROJECT, env={**self.environment, **more}, capture_output=True, check=False)
        self._said(argv, done.stdout + done.stderr, done.returncode, code)

    def _said(self, argv: list[str], said: bytes, found: int, wanted: int) -> None:
        self.ground.said.append((f"what `{' '.join(argv[-6:])[:80]}` says", said))
        if found != wanted:
            raise FleetError(
                f"a step ended with {found}, and {wanted} is wanted: {said[-1500:].decode(errors='replace')}",
                where=" ".join(argv)[:200],
                mend="./runner.py sandbox down; ./runner.py bench leaks",
                who="bench",
            )

    def _host(self, script: str) -> None:
        argv = [str(podman_path()), "exec", "-i", self.container, "bash", "-euc", script]
        self._call(0, argv)

    def _by_session(self) -> None:
        words = [*_EC2, "--limit", self.instance, "--transport", "session", "--check", "-vvv"]
        self._run(0, "converge", *words)

    def _fails(self) -> None:
        words = [*_EC2, "--limit", self.instance, "-vvv", "--diff"]
        self._run(1, "converge", *words, "-e", "vllm_service_host=0.0.0.0")
        self._run(6, "converge", *words, "-e", "vllm_service_arguments=[--enable-nonsense]")

    def _typed_by_hand(self) -> None:
        for words in (
            f"hf_token={self.extra}",
            f"hf_tokn={self.extra}",
            f"vllm_service_model={self.tokens[0]}",
            f"vllm_service_environment={json.dumps({'API_TOKEN': self.extra})}",
            f"vllm_service_arguments={json.dumps([f'--api-key={self.extra}'])}",
        ):
            argv = [sys.executable, "-m", "fleet", "converge", *_EC2, "--json", "-e", words]
            self.typed.add(b"\0".join(word.encode() for word in argv))
            self._call(2, argv)

    def _broken_off(self, number: int, *words: str, **more: str) -> None:
        """A converge that is ended once the host is at work."""
        earlier = set((state_dir() / "logs").glob("*-converge.jsonl"))
        argv = [sys.executable, "-m", "fleet", "converge", *words]
        process = subprocess.Popen(
            argv, cwd=PROJECT, env={**self.environment, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        while not any(
            '"role": "' in log.read_text() for log in set((state_dir() / "logs").glob("*-converge.jsonl")) - earlier
        ):
            time.sleep(0.1)
            if process.poll() is not None:
                self._said(argv, process.communicate()[0], process.returncode, -number)
        process.send_signal(number)
        said = process.communicate(timeout=180)[0]
        self._said(argv, said, process.returncode, 130 if number == signal.SIGINT else -number)

    def _killed(self) -> None:
        self._broken_off(signal.SIGKILL, *_EC2, "--limit", self.instance)
        self._settle()

    def _settle(self) -> None:
        """What a killed runner left at work on the host comes to its end."""
        marked = "! grep -lz ^VLLM_FLEET_RUN= /proc/[0-9]*/environ 2>/dev/null"
        self._host(f"for n in $(seq 120); do {marked} && exit 0; sleep 2; done; exit 1")

    def _killed_with_keys(self) -> None:
        kept = {name: value for name, value in self.environment.items() if name != "AWS_SHARED_CREDENTIALS_FILE"}
        self.environment, before = kept, self.environment
        try:
            more = {**self.keys, KEYS_IN_ENVIRONMENT: "1"}
            self._broken_off(signal.SIGKILL, "-i", str(sandbox_inventory()), "--limit", self.container, **more)
        finally:
            self.environment = before
        self._settle()

    def _module_crashes(self) -> None:
        """A folder where a module writes a file."""
        self._host(f"mv {_SECRETS_HOME}/request.json /root/; mkdir {_SECRETS_HOME}/request.json")
        self._run(1, "converge", *_EC2, "--limit", self.instance, "-vvv", "--diff")
        self._host(f"rmdir {_SECRETS_HOME}/request.json; mv /root/request.json {_SECRETS_HOME}/")

    def _loop_fails(self) -> None:
        self._host("chmod 0444 /run/vllm-secrets/hf_token")
        playbook = str(Path(sys.executable).parent / "ansible-playbook")
        environment = {"ANSIBLE_CONFIG": str(PROJECT / "ansible.cfg")}
        words = ["-i", str(sandbox_inventory()), "--limit", self.container, "-vvv", "--diff", "playbooks/verify.yml"]
        self._call(2, [playbook, *words], **environment)
        self._host("chmod 0400 /run/vllm-secrets/hf_token")

    def _traced(self) -> None:
        traced = f"set -x; {sys.executable} -m fleet converge {' '.join(_EC2)} --limit {self.instance} --check -vvv"
        self._call(0, ["bash", "-xc", traced], SHELLOPTS="xtrace")
        self._host("bash -xc 'systemctl reload vllm-secrets.service; systemctl cat vllm-secrets.service vllm.service'")

    def _fetcher_crashes(self) -> None:
        """Killed in the middle of its question, with the role's keys in its memory, and dumps allowed."""
        self._host(
            "mkdir -p /root/crash; cd /root/crash; ulimit -c unlimited\n"
            "set -a; eval \"$(systemctl show -P Environment vllm-secrets.service | tr ' ' '\\n')\"; set +a\n"
            f"cp {_SECRETS_HOME}/request.json . && sed -i 's#/run/vllm-secrets#/run/crash#' request.json\n"
            "mkdir -p /run/crash\n"
            "for wait in 0.2 0.4 0.6 0.8 1.0 1.3; do\n"
            f"  {_SECRETS_HOME}/bin/python -I {_SECRETS_HOME}/fetch_secret.py request.json & fetcher=$!\n"
            '  sleep "$wait"; kill -ABRT "$fetcher" 2>/dev/null || true; wait "$fetcher" || true\n'
            "done\n"
            "rm -r /run/crash"
        )

    def _malformed(self) -> None:
        """Each is refused in words that do not hold it, and what lies there stays."""
        for text in (
            f"HF_TOKEN={self.tokens[1]}",
            json.dumps({"OTHER": self.tokens[1]}),
            json.dumps({"HF_TOKEN": f"{self.tokens[1]}\n"}),
            "",
        ):
            self._rotate(1, text)

    def _rotate(self, code: int, text: str) -> None:
        boto3.client("secretsmanager").put_secret_value(SecretId=SECRET_ID, SecretString=text or "{}")
        self._run(code, "rotate", *_EC2, "--limit", self.instance)

    def _looked_at(self) -> None:
        self._run(0, "status", *_EC2, "--limit", self.instance, "--json")
        self._host("systemctl status --no-pager -n 300 vllm.service vllm-secrets.service; ps auxeww; env")
        argv = [sys.executable, "-m", "fleet", "audit", *_EC2, "--limit", self.instance]
        done = subprocess.run(argv, cwd=PROJECT, env=self.environment, capture_output=True, check=False)
        # Findings are no concern of this hunt.
        wanted = done.returncode if done.returncode in (ExitCode.OK, ExitCode.DRIFT) else ExitCode.DRIFT
        self._said(argv, done.stdout + done.stderr, done.returncode, wanted)


def environment_of(found: dict[str, str], credentials: Path) -> dict[str, str]:
    """The environment of a user's commands: the local AWS's addresses, and the keys in a file."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    own = {name: value for name, value in found.items() if name not in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    return {**without, **own, "AWS_SHARED_CREDENTIALS_FILE": str(credentials)}
