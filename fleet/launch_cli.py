"""`launch` and `terminate` at the command line."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated, Any

import typer
from botocore.exceptions import ClientError

from fleet import aws, aws_errors, execution, launching
from fleet.errors import ExitCode, FleetError
from fleet.events import Event, HostResult, Outcome
from fleet.options import AsJson, Yes, agree, errors
from fleet.paths import PROJECT
from fleet.requests import Request

app = typer.Typer()
Fleet = Annotated[str, typer.Option("--fleet", help="The fleet's name, as in its tag.")]
Region = Annotated[str, typer.Option("--region", help="AWS's region; else the environment's.")]


class Role(StrEnum):
    """What an instance is for."""

    VLLM = "vllm"
    BUILDER = "builder"


@app.command()
def launch(
    name: Annotated[str, typer.Argument(help="The instances' name.")],
    instance_type: Annotated[str, typer.Option("--type", help="Instance type, as g5g.4xlarge.")],
    count: Annotated[int, typer.Option("--count", min=1, help="How many there shall be.")] = 1,
    spot: Annotated[bool, typer.Option("--spot", help="Spot instances: cheaper, and may be taken.")] = False,
    role: Annotated[Role, typer.Option("--role", help="What they are for.")] = Role.VLLM,
    capability: Annotated[str, typer.Option("--capability", help="What a builder builds for.")] = "7.5",
    fleet: Fleet = "vllm",
    region: Region = "",
    subnet: Annotated[str, typer.Option("--subnet", help="Subnet; else a default one.")] = "",
    volume_gib: Annotated[int, typer.Option("--volume-gib", min=0, help="Root volume; 0: image and room.")] = 0,
    image: Annotated[str, typer.Option("--image", help="Image; else the newest Deep Learning AMI.")] = "",
    check: Annotated[bool, typer.Option("--check", help="Change nothing, say what would change.")] = False,
    as_json: AsJson = False,
) -> None:
    """Launch instances that are missing of a name; those that are there stay as they are."""
    with errors(as_json=as_json):
        where = _region(region)
        # A server's GPU answers for itself; a builder has none.
        builds_for = capability if role is Role.BUILDER else ""
        wanted = launching.Wanted(
            name, instance_type, where, fleet, role, builds_for, count, spot, subnet, image, volume_gib
        )
        made = launching.plan(wanted, *(_client(service, where) for service in ("ec2", "ssm", "iam")))
        launched: list[str] = []
        if made.missing and not check:
            done = _played("playbooks/launch.yml", launching.variables(made), where)
            launched = [str(one) for result in done for one in _made(result)]
        _tell(made, launched, check=check, as_json=as_json)


@app.command()
def terminate(
    names: Annotated[list[str], typer.Argument(help="Names of instances of the fleet.")],
    fleet: Fleet = "vllm",
    region: Region = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """End the fleet's instances of these names; what is gone already is fine."""
    with errors(as_json=as_json):
        where = _region(region)
        for name in names:
            launching.check_name(name, "NAME")
        launching.check_name(fleet, "--fleet")
        with aws_errors.told(where):
            ec2 = _client("ec2", where)
            launching.refuse_untagged(ec2, names)
            ids = [str(one["InstanceId"]) for one in launching.named(ec2, fleet, names)]
        if ids and not yes:
            agree(f"End {', '.join(ids)} of fleet {fleet} in {where}?", where)
        if ids:
            _played("playbooks/terminate.yml", {"terminate_region": where, "terminate_ids": ids}, where)
        if as_json:
            print(json.dumps({"changed": bool(ids), "ended": ids}))
        else:
            print(f"ended: {', '.join(ids)}" if ids else "nothing to end: no instance of these names is there")


def _region(given: str) -> str:
    found = given or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or ""
    if not found:
        raise FleetError("no region, and one is wanted", where="--region", mend="export AWS_REGION=us-east-1")
    return found


def _client(service: str, region: str) -> Any:
    with aws_errors.told(region):
        return aws.client(service, region)


def _played(playbook: str, variables: dict[str, Any], region: str) -> list[dict[str, Any]]:
    """Results of the playbook's tasks; raises FleetError for the first that failed."""
    results: list[dict[str, Any]] = []
    failed: list[HostResult] = []

    def on_event(event: Event) -> None:
        if isinstance(event, HostResult):
            results.append(event.result)
            if event.outcome is Outcome.FAILED:
                failed.append(event)

    inventory = PROJECT / "inventory" / "controller.yml"
    done = execution.execute(Request(playbook, (inventory,), variables, limit_s=1800), on_event)
    if failed:
        refused = failed[0].result.get("error") or {}
        if refused.get("code"):
            error = {"Code": refused["code"], "Message": refused.get("message", "")}
            raise aws_errors.explained(ClientError({"Error": error}, failed[0].task), where=region)
        raise FleetError(failed[0].message, where=failed[0].task, mend="see the words above", code=ExitCode.HOST_FAILED)
    if done.code is not ExitCode.OK:
        raise FleetError(done.said or "Ansible did not run", where=playbook, mend="see above", code=done.code)
    return results


def _made(result: dict[str, Any]) -> list[Any]:
    """What the module of instances started; where others of the name were there, its `instance_ids` has those too."""
    return result.get("changed_ids") or result.get("instance_ids") or []


def _tell(made: launching.Plan, launched: list[str], *, check: bool, as_json: bool) -> None:
    go_on = shlex.join(
        ["./runner.py", "converge", "-i", "inventory/aws_ec2.yml", "--limit", ",".join([*made.present, *launched])]
    )
    if as_json:
        told = {"changed": bool(made.missing), "check": check, "launched": launched, "go_on": go_on, **asdict(made)}
        print(json.dumps(told))
        return
    if made.image:
        print(f"image: {made.image.id} {made.image.name} ({made.image.way}: {made.image.why})")
        print(f"volume: {made.volume_gib} GiB (image {made.image.gib}, room for build and model {launching.ROOM_GIB})")
    if made.stopped:
        print(f"stopped, and counted: {', '.join(made.stopped)}; aws ec2 start-instances --instance-ids ...")
    if made.other_type:
        print(f"of another type than {made.wanted.instance_type}, and counted: {', '.join(made.other_type)}")
    if not made.missing:
        print(f"unchanged: {', '.join(made.present)}")
    elif check:
        print(f"would launch: {made.missing}")
    else:
        print(f"launched: {', '.join(launched)}")
    if made.present or launched:
        print(f"go on: {go_on}")
