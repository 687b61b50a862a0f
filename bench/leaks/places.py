"""Where a secret could show: each place can be looked through, and can be given one to see that it is found."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from bench.leaks.canaries import Hit, Hunter
from bench.leaks.sampler import Sampler
from fleet.paths import cache_dir, state_dir
from sandbox.containers import podman_path

# Larger ones are weights and wheels, which nobody writes a token into.
_LARGEST_BYTES = 64 * 1024 * 1024
# Where a host's token belongs: in memory, for its one reader.
HOME_OF_TOKEN = ("/run/vllm-secrets/hf_token", "/run/credentials/vllm.service/hf_token")
_SYSTEMCTL = (
    "systemctl list-units --all --no-pager --plain --no-legend 'vllm*' | cut -d' ' -f1 | while read -r unit; do "
    'systemctl show "$unit"; systemctl cat "$unit"; systemctl status --no-pager -n 200 "$unit" || true; done'
)


@dataclass(slots=True)
class Ground:
    """What a hunt goes over: since when, which containers, what commands said, and files that hold what was planted."""

    since: float
    containers: tuple[str, ...]
    said: list[tuple[str, bytes]] = field(default_factory=list)
    planted: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of place.

    Attributes:
        name: what it is.
        look: the hits in it now, and how many things were looked at.
        plant: puts a text in while its block runs.
    """

    name: str
    look: Callable[[Hunter, Ground], tuple[list[Hit], int]]
    plant: Callable[[str, Ground], contextlib.AbstractContextManager[None]]


def all_places() -> list[Place]:
    """Every place there is."""
    return [
        Place("what commands say", _look_at_said, _say),
        Place("the runner's logs and directories", _look_at_runners_files, _write_log),
        Place("other files of the controller, Ansible's caches among them", _look_at_other_files, _write_cache),
        Place("arguments of processes", _look_at_processes("arguments"), _run_with_argument),
        Place("environments of processes", _look_at_processes("environment"), _run_with_environment),
        Place("files of the hosts", _look_at_hosts_files, _write_on_host),
        Place("memory dumps on the hosts", _look_at_hosts_files, _crash_on_host),
        Place("journals of the hosts", _look_at_journals, _log_on_host),
        Place("what systemctl shows", _look_at_systemctl, _describe_in_unit),
        Place("objects in S3", _look_at_objects, _put_object),
        Place("Run Command's records", _look_at_commands, _send_command),
        Place("instances' user data and tags", _look_at_instances, _tag_instance),
    ]


def _look_at_said(hunter: Hunter, ground: Ground) -> tuple[list[Hit], int]:
    return [hit for where, said in ground.said for hit in hunter.hits(said, where)], len(ground.said)


@contextlib.contextmanager
def _say(text: str, ground: Ground) -> Iterator[None]:
    done = subprocess.run(
        [sys.executable, "-c", "print(input())"], input=text.encode(), capture_output=True, check=True
    )
    ground.said.append(("a command that was planted", done.stdout))
    yield
    ground.said.pop()


def _look_at_runners_files(hunter: Hunter, ground: Ground) -> tuple[list[Hit], int]:
    return _look_under([state_dir()], hunter, ground)


def _look_at_other_files(hunter: Hunter, ground: Ground) -> tuple[list[Hit], int]:
    folders = [Path.home(), Path(tempfile.gettempdir()), Path("/tmp"), Path("/var"), Path("/run"), Path("/etc")]  # noqa: S108
    return _look_under(folders, hunter, ground)


def _look_under(folders: list[Path], hunter: Hunter, ground: Ground) -> tuple[list[Hit], int]:
    """Files that changed since the hunt began."""
    hits: list[Hit] = []
    looked = 0
    # The hosts' own files are looked at from inside.
    left_out = {cache_dir() / "containers", Path("/run/vllm-fleet-sandbox"), Path("/run/credentials")}
    for top in dict.fromkeys(folder.resolve() for folder in folders):
        for folder, below, names in os.walk(top):
            below[:] = [name for name in below if Path(folder, name) not in left_out]
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    found = path.lstat()
                    new = found.st_ctime >= ground.since and path not in ground.planted
                    if new and path.is_file() and not path.is_symlink() and found.st_size <= _LARGEST_BYTES:
                        looked += 1
                        hits += hunter.hits(path.read_bytes(), str(path))
    return hits, looked


@contextlib.contextmanager
def _write_log(text: str, _ground: Ground) -> Iterator[None]:
    path = state_dir() / "logs" / "planted.jsonl"
    path.write_text(json.dumps({"message": f"token {text}"}))
    yield
    path.unlink()


@contextlib.contextmanager
def _write_cache(text: str, _ground: Ground) -> Iterator[None]:
    folder = Path.home() / ".ansible" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "planted"
    path.write_text(json.dumps({"ansible_env": {"HF_TOKEN": text}}))
    yield
    path.unlink()


def _look_at_processes(kind: str) -> Callable[[Hunter, Ground], tuple[list[Hit], int]]:
    def look(hunter: Hunter, _ground: Ground) -> tuple[list[Hit], int]:
        sampler = Sampler(hunter, lambda found, _: found != kind)
        sampler.look()
        return sampler.hits, sampler.processes

    return look


@contextlib.contextmanager
def _run_with_argument(text: str, _ground: Ground) -> Iterator[None]:
    with _process([sys.executable, "-c", "input()", text]):
        yield


@contextlib.contextmanager
def _run_with_environment(text: str, _ground: Ground) -> Iterator[None]:
    with _process([sys.executable, "-c", "input()"], HF_TOKEN=text):
        yield


@contextlib.contextmanager
def _process(argv: list[str], **environment: str) -> Iterator[None]:
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, env={**os.environ, **environment}, text=True)
    while Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")[0] != argv[0].encode():
        time.sleep(0.01)
    yield
    process.communicate("\n")


def _look_at_hosts_files(hunter: Hunter, ground: Ground) -> tuple[list[Hit], int]:
    """Every file there is, by grep, which is fast enough for a whole vLLM; packed ones that are new, unpacked."""
    hits: list[Hit] = []
    looked = 0
    for name in ground.containers:
        patterns = b"\n".join(hunter.texts)
        listed = _inside(name, "find / /run /tmp /dev/shm -xdev -type f -size -1024M 2>/dev/null | sort -u | wc -l")
        looked += int(listed)
        found = _inside(
            name,
            "cat >/dev/shm/patterns; find / /run /tmp /dev/shm -xdev -type f ! -path /dev/shm/patterns -print0 "
            "2>/dev/null | sort -zu | xargs -0 -r grep -laF -f /dev/shm/patterns 2>/dev/null || true; "
            "rm /dev/shm/patterns",
            patterns,
        ).decode(errors="replace")
        strange = [path for path in found.splitlines() if path not in HOME_OF_TOKEN]
        if strange:
            hits += hunter.hits(_inside(name, "tar -cf - -T -", "\n".join(strange).encode()), name)
        # tar leaves out the first slash.
        hits += [Hit("one of them", "some form", f"{name}:{path}") for path in strange if path[1:] not in str(hits)]
        packed = f"find / -xdev -type f -name '*.gz' -newermt @{ground.since:.0f} -print0 | tar -cf - --null -T -"
        hits += hunter.hits(_inside(name, packed), name)
    return list(dict.fromkeys(hits)), looked


@contextlib.contextmanager
def _write_on_host(text: str, ground: Ground) -> Iterator[None]:
    name = ground.containers[0]
    _inside(name, "cat >/var/lib/vllm-fleet/planted.json", text.encode())
    yield
    _inside(name, "rm /var/lib/vllm-fleet/planted.json")


@contextlib.contextmanager
def _crash_on_host(text: str, ground: Ground) -> Iterator[None]:
    """A program that has read the text and is killed so that the kernel writes its memory down."""
    name = ground.containers[0]
    program = "import os, sys; held = sys.stdin.read(); os.abort()"
    _inside(
        name,
        "mkdir /root/planted; cd /root/planted; ulimit -c unlimited\n"
        f"python3 -c '{program}' || true; ls -A | grep -q .",
        text.encode(),
    )
    yield
    _inside(name, "rm -r /root/planted")


def _look_at_journals(hunter: Hunter, ground: Ground) -> tuple[list[Hit], int]:
    hits: list[Hit] = []
    looked = 0
    for name in ground.containers:
        entries = _inside(name, f"journalctl --all --no-pager -o export --since=@{ground.since:.0f}")
        looked += entries.count(b"__CURSOR=")
        hits += hunter.hits(entries, f"{name}: journal")
        # An export may break a text up where it is not all printable; the plain form does not.
        hits += hunter.hits(_inside(name, "journalctl --all --no-pager -o cat"), f"{name}: journal")
    return list(dict.fromkeys(hits)), looked


@contextlib.contextmanager
def _log_on_host(text: str, ground: Ground) -> Iterator[None]:
    name = ground.containers[0]
    _inside(name, "systemd-cat -t planted; journalctl --sync; journalctl --rotate", text.encode())
    yield
    _inside(name, "journalctl --rotate; journalctl --vacuum-time=1s")


def _look_at_systemctl(hunter: Hunter, ground: Ground) -> tuple[list[Hit], int]:
    shown = [(name, _inside(name, _SYSTEMCTL)) for name in ground.containers]
    return [hit for name, text in shown for hit in hunter.hits(text, f"{name}: systemctl")], len(shown)


@contextlib.contextmanager
def _describe_in_unit(text: str, ground: Ground) -> Iterator[None]:
    name, unit = ground.containers[0], "/run/systemd/system/vllm-planted.service"
    content = f"[Unit]\nDescription={text}\n[Service]\nExecStart=/bin/sleep 600\n"
    _inside(name, f"cat >{unit}; systemctl daemon-reload; systemctl start vllm-planted.service", content.encode())
    yield
    _inside(name, f"systemctl stop vllm-planted.service; rm {unit}; systemctl daemon-reload; journalctl --sync")
    _inside(name, "journalctl --rotate; journalctl --vacuum-time=1s")


def _look_at_objects(hunter: Hunter, _ground: Ground) -> tuple[list[Hit], int]:
    s3 = boto3.client("s3")
    hits: list[Hit] = []
    looked = 0
    for bucket in s3.list_buckets()["Buckets"]:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket["Name"]):
            for found in page.get("Contents", []):
                content = s3.get_object(Bucket=bucket["Name"], Key=found["Key"])["Body"].read()
                looked += 1
                hits += hunter.hits(found["Key"].encode() + b"\n" + content, f"s3://{bucket['Name']}/{found['Key']}")
                hits += hunter.hits(content, f"s3://{bucket['Name']}/{found['Key']}")
    return list(dict.fromkeys(hits)), looked


@contextlib.contextmanager
def _put_object(text: str, _ground: Ground) -> Iterator[None]:
    s3 = boto3.client("s3")
    bucket = s3.list_buckets()["Buckets"][0]["Name"]
    s3.put_object(Bucket=bucket, Key="planted.gz", Body=gzip.compress(json.dumps({"t": text}).encode()))
    yield
    s3.delete_object(Bucket=bucket, Key="planted.gz")


def _look_at_commands(hunter: Hunter, _ground: Ground) -> tuple[list[Hit], int]:
    ssm = boto3.client("ssm")
    records: list[tuple[str, Any]] = []
    for command in ssm.list_commands()["Commands"]:
        records.append((f"command {command['CommandId']}", command))
        found = ssm.list_command_invocations(CommandId=command["CommandId"], Details=True)["CommandInvocations"]
        for invocation in found:
            where = {"CommandId": command["CommandId"], "InstanceId": invocation["InstanceId"]}
            output = ssm.get_command_invocation(**where)
            records.append((f"invocation {where}", [invocation, output]))
    texts = [(where, json.dumps(record, default=str).encode()) for where, record in records]
    return [hit for where, text in texts for hit in hunter.hits(text, where)], len(texts)


@contextlib.contextmanager
def _send_command(text: str, _ground: Ground) -> Iterator[None]:
    """A command whose output has the text; its record cannot be taken back."""
    ssm = boto3.client("ssm")
    instance = ssm.describe_instance_information()["InstanceInformationList"][0]["InstanceId"]
    step = {"action": "aws:runShellScript", "name": "say", "inputs": {"runCommand": [f"echo {shlex.quote(text)}"]}}
    content = json.dumps({"schemaVersion": "2.2", "mainSteps": [step]})
    ssm.create_document(Name="planted", DocumentType="Command", Content=content)
    sent = ssm.send_command(DocumentName="planted", InstanceIds=[instance])["Command"]["CommandId"]
    while ssm.get_command_invocation(CommandId=sent, InstanceId=instance)["Status"] in ("Pending", "InProgress"):
        time.sleep(0.2)
    yield
    ssm.delete_document(Name="planted")


def _look_at_instances(hunter: Hunter, _ground: Ground) -> tuple[list[Hit], int]:
    ec2 = boto3.client("ec2")
    hits: list[Hit] = []
    found = [instance for each in ec2.describe_instances()["Reservations"] for instance in each["Instances"]]
    for instance in found:
        where = instance["InstanceId"]
        hits += hunter.hits(json.dumps(instance, default=str).encode(), where)
        data = ec2.describe_instance_attribute(InstanceId=where, Attribute="userData")["UserData"].get("Value", "")
        hits += hunter.hits(data.encode(), f"{where} user data")
    return hits, len(found)


@contextlib.contextmanager
def _tag_instance(text: str, _ground: Ground) -> Iterator[None]:
    ec2 = boto3.client("ec2")
    where = ec2.describe_instances()["Reservations"][0]["Instances"][0]["InstanceId"]
    ec2.create_tags(Resources=[where], Tags=[{"Key": "planted", "Value": text}])
    yield
    ec2.delete_tags(Resources=[where], Tags=[{"Key": "planted"}])


def _inside(container: str, script: str, stdin: bytes = b"") -> bytes:
    """What a shell script in a container prints."""
    argv = [str(podman_path()), "exec", "-i", container, "sh", "-euc", script]
    return subprocess.run(argv, input=stdin, capture_output=True, check=True, timeout=600).stdout
