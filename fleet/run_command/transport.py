"""A run by Systems Manager: prepared, sent once, followed to its end; events and exit code as of a push run."""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from fleet import aws
from fleet.aws_errors import told
from fleet.errors import FleetError
from fleet.events import Event, HostResult, Outcome
from fleet.execution import Finished, Listener, play_arguments
from fleet.requests import Request
from fleet.run_command import agents, commands, document
from fleet.run_command.bundle import Packed, bundle, packed
from fleet.run_command.fates import End, Fate
from fleet.run_command.following import Following, Patience
from fleet.run_command.hosts import Host, Resolved, resolved
from fleet.run_command.store import PREFIX, Store
from fleet.run_command.systems import python_of
from fleet.run_command.wheels import wheels

# The least that AWS takes for a command's delivery, seconds. A host whose turn comes late must still get it, so the
# run's own limit counts, and hosts that do not answer are found by their agents.
_LEAST_DELIVERY_S = 30


@dataclass(frozen=True, slots=True)
class _Group:
    """Hosts that one command can have: one region, architecture and Python."""

    region: str
    architecture: str
    python: str
    hosts: tuple[Host, ...]


def execute(request: Request, on_event: Callable[[Event], None], patience: Patience | None = None) -> Finished:
    """Runs the request's playbook on its EC2 hosts, each by one command.

    Raises FleetError before anything is sent where hosts, bucket, document or rights are not as they must be.
    """
    listener = Listener(request, on_event)
    with listener.interruptible(), tempfile.TemporaryDirectory() as private:
        found = resolved(request)
        groups, unreachable = _grouped(request, found.hosts)
        run_id = uuid.uuid4().hex
        for host, end in unreachable.items():
            listener.tell(_result(host, end, ""))
        following: Following | None = None
        if groups:
            store, region = _store(request, found.hosts)
            versions = {
                group.region: document.installed(aws.client("ssm", group.region), group.region) for group in groups
            }
            project = bundle()
            following = Following(listener, store, run_id, private, patience or Patience(), request.stall_s)
            sent = _send(request, groups, found, versions, store, region, project, run_id)
            following.follow(sent)
        return listener.finish(following.rc if following else 0)


def _grouped(request: Request, hosts: Sequence[Host]) -> tuple[list[_Group], dict[str, End]]:
    """The hosts by what their command needs, and those that Systems Manager does not reach."""
    unreachable = {}
    by_kind: dict[tuple[str, str, str], list[Host]] = {}
    for region, found in itertools.groupby(sorted(hosts, key=lambda host: host.region), lambda host: host.region):
        there = list(found)
        known = agents.agents(region, [host.instance_id for host in there])
        for host in there:
            agent = known.get(host.instance_id)
            if agent is None:
                unreachable[host.instance_id] = End(Fate.NO_AGENT)
                continue
            wanted = setting(request, host, "vllm_fleet_python")
            python = python_of(host.instance_id, agent.platform, agent.version, wanted)
            by_kind.setdefault((region, host.architecture, python), []).append(host)
    return [_Group(*kind, tuple(found)) for kind, found in sorted(by_kind.items())], unreachable


def setting(request: Request, host: Host, name: str) -> str:
    """A variable of the transport's own: the request's, else the host's; read here, where no template is filled in."""
    found = str(request.extra_vars.get(name) or host.variables.get(name) or "")
    if "{{" in found:
        raise FleetError(
            f"{name} is a template ({found}), and a plain value is wanted: it is read before any host is reached",
            where=f"{host.instance_id} {name}",
            mend=f"./runner.py converge -e {name}=VALUE, or write the value in group_vars",
        )
    return found


def _store(request: Request, hosts: Sequence[Host]) -> tuple[Store, str]:
    """The fleet's bucket, and the region that it is in."""
    buckets = sorted({setting(request, host, "vllm_fleet_bucket") for host in hosts})
    if len(buckets) != 1 or not buckets[0]:
        raise FleetError(
            f"the hosts name {len(buckets)} buckets ({', '.join(buckets)})" if buckets[0] else "no bucket is named",
            where="vllm_fleet_bucket",
            mend="./runner.py converge -e vllm_fleet_bucket=NAME, or set it in group_vars/aws_ec2.yml",
        )
    region = region_of(buckets[0], hosts[0].region)
    return Store(aws.client("s3", region), buckets[0]), region


def region_of(bucket: str, near: str) -> str:
    """Where a bucket is: S3 says so to whoever asks in another region too."""
    with told(f"s3://{bucket}"):
        try:
            answer = aws.client("s3", near).head_bucket(Bucket=bucket)
        except ClientError as error:
            answer = error.response
            headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
            if answer["Error"]["Code"] not in ("301", "400") or "x-amz-bucket-region" not in headers:
                raise
    headers = answer["ResponseMetadata"]["HTTPHeaders"]
    return str(headers.get("x-amz-bucket-region") or near)


def _send(
    request: Request, groups: Sequence[_Group], found: Resolved, versions: dict[str, str], store: Store, region: str,
    project: Packed, run_id: str,
) -> list[commands.Command]:  # fmt: skip
    """Puts what the hosts need, and sends a command to each fifty of a group."""
    store.ensure(project)
    prepared = []
    for group in groups:
        made = wheels(group.architecture, group.python)
        store.ensure(made)
        for begin in range(0, len(group.hosts), commands.MOST_IDS):
            part = group.hosts[begin : begin + commands.MOST_IDS]
            job = packed("jobs/{}.json.gz", gzip.compress(_job(request, part, found.groups, run_id), mtime=0))
            store.put(job)
            prepared.append((group, part, made, job))
    rate = commands.Rate(request.forks, request.max_errors, max(_LEAST_DELIVERY_S, request.limit_s), request.limit_s)
    return [
        commands.send(
            group.region,
            [host.instance_id for host in part],
            versions[group.region],
            {
                "RunId": run_id,
                "Bucket": store.bucket,
                "Prefix": PREFIX,
                "Region": region,
                "EndpointUrl": setting(request, part[0], "vllm_fleet_endpoint_url"),
                "Python": group.python,
                "WheelsSha256": made.sha256,
                "BundleSha256": project.sha256,
                "JobSha256": job.sha256,
                "ExecutionTimeout": str(rate.execution_s),
            },
            rate,
        )
        for group, part, made, job in prepared
    ]


def _job(request: Request, hosts: Sequence[Host], groups: dict[str, list[str]], run_id: str) -> bytes:
    """What ansible-runner is asked for on each host, each host's own variables, and who is in which group."""
    kwargs: dict[str, Any] = play_arguments(request)
    own = {host.instance_id: {"variables": host.variables} for host in hosts}
    return json.dumps({"run": run_id, "kwargs": kwargs, "hosts": own, "groups": groups}, sort_keys=True).encode()


def _result(host: str, end: End, task: str) -> HostResult:
    return HostResult(
        host=host, role="", task="Systems Manager", outcome=Outcome.UNREACHABLE, seconds=0.0,
        message=end.message(host, task),
    )  # fmt: skip
