"""An instance as EC2, IAM and Systems Manager know it: who reaches it, with what, and what it may do."""

from __future__ import annotations

import base64
import gzip
import json
import shlex
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from fleet import aws
from fleet.audits import Check, roles
from fleet.aws_errors import code_of, told
from fleet.launching import PROFILE
from fleet.redaction import redacted
from fleet.run_command.agents import information

_ANEW = "./runner.py launch another, and terminate this one"


def checked(region: str, ids: Sequence[str]) -> list[Check]:
    """All checks of the region's instances; raises FleetError for what AWS refuses to tell."""
    with told(region, who="audit"):
        ec2, iam = aws.client("ec2", region), aws.client("iam", region)
        pages = ec2.get_paginator("describe_instances").paginate(InstanceIds=list(ids))
        found = [one for page in pages for group in page["Reservations"] for one in group["Instances"]]
        groups = _groups(ec2, found)
        encrypted = _volumes(ec2, found)
        agents = information(region, ids)
        role_checks: dict[str, tuple[str, str]] = {}
        checks = []
        for one in sorted(found, key=lambda one: str(one["InstanceId"])):
            instance = str(one["InstanceId"])
            profile = str(one.get("IamInstanceProfile", {}).get("Arn", "")).rpartition("/")[2]
            # One role is looked at once.
            if (held := profile or instance) not in role_checks:
                role_checks[held] = _role(iam, profile, region, instance)
            checks += [
                _inbound(one, groups, region),
                _key_pair(one),
                _metadata(one, region),
                _user_data(ec2, instance),
                _volume(one, encrypted),
                Check(instance, "role", *role_checks[held]),
                _agent(instance, agents.get(instance), region),
            ]
        return checks


def _groups(ec2: Any, found: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Inbound rules by security group."""
    ids = sorted({group["GroupId"] for one in found for group in _groups_of(one)})
    if not ids:
        return {}
    pages = ec2.get_paginator("describe_security_groups").paginate(GroupIds=ids)
    return {group["GroupId"]: group["IpPermissions"] for page in pages for group in page["SecurityGroups"]}


def _groups_of(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Those of every interface: another one may have others."""
    more = [group for interface in one.get("NetworkInterfaces", []) for group in interface.get("Groups", [])]
    return [*one.get("SecurityGroups", []), *more]


def _volumes(ec2: Any, found: Sequence[Mapping[str, Any]]) -> dict[str, bool]:
    ids = [volume for one in found for volume in _volumes_of(one)]
    if not ids:
        return {}
    pages = ec2.get_paginator("describe_volumes").paginate(VolumeIds=ids)
    return {volume["VolumeId"]: bool(volume["Encrypted"]) for page in pages for volume in page["Volumes"]}


def _volumes_of(one: Mapping[str, Any]) -> list[str]:
    return [str(device["Ebs"]["VolumeId"]) for device in one.get("BlockDeviceMappings", []) if "Ebs" in device]


def _inbound(one: Mapping[str, Any], groups: Mapping[str, list[dict[str, Any]]], region: str) -> Check:
    open_groups = {group["GroupId"]: rules for group in _groups_of(one) if (rules := groups.get(group["GroupId"]))}
    instance = str(one["InstanceId"])
    if not open_groups:
        return Check(instance, "inbound", "no rule lets anybody in")
    told_rules = "; ".join(f"{group}: {', '.join(map(_rule, rules))}" for group, rules in sorted(open_groups.items()))
    mends = [
        f"aws ec2 revoke-security-group-ingress --region {region} --group-id {group} "
        f"--ip-permissions {shlex.quote(json.dumps(rules))}"
        for group, rules in sorted(open_groups.items())
    ]
    return Check(instance, "inbound", told_rules, "; ".join(mends))


def _rule(rule: Mapping[str, Any]) -> str:
    """A rule in words: protocol, ports and who."""
    protocol = "anything" if rule["IpProtocol"] == "-1" else str(rule["IpProtocol"])
    ports = [str(port) for port in dict.fromkeys([rule.get("FromPort"), rule.get("ToPort")]) if port is not None]
    whom = [each["CidrIp"] for each in rule.get("IpRanges", [])]
    whom += [each["CidrIpv6"] for each in rule.get("Ipv6Ranges", [])]
    whom += [each["PrefixListId"] for each in rule.get("PrefixListIds", [])]
    whom += [each["GroupId"] for each in rule.get("UserIdGroupPairs", []) if "GroupId" in each]
    return " ".join(filter(None, [protocol, "-".join(ports), "from", ", ".join(whom)]))


def _key_pair(one: Mapping[str, Any]) -> Check:
    key = one.get("KeyName")
    return Check(str(one["InstanceId"]), "key pair", str(key or "none"), _ANEW if key else "")


def _metadata(one: Mapping[str, Any], region: str) -> Check:
    """Version 2 alone, and no further than the host itself: a container's request is one hop more."""
    options = one.get("MetadataOptions", {})
    tokens, hops = options.get("HttpTokens", "optional"), int(options.get("HttpPutResponseHopLimit", 0))
    instance = str(one["InstanceId"])
    right = tokens == "required" and hops == 1
    mend = (
        f"aws ec2 modify-instance-metadata-options --region {region} --instance-id {instance} "
        "--http-tokens required --http-put-response-hop-limit 1"
    )
    return Check(instance, "metadata", f"tokens {tokens}, hop limit {hops}", "" if right else mend)


def _user_data(ec2: Any, instance: str) -> Check:
    """Whoever may describe the instance reads it, and so does every process there."""
    told_data = ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData").get("UserData", {})
    raw = base64.b64decode(told_data.get("Value", "") or "")
    if raw[:2] == b"\x1f\x8b":
        # cloud-init takes it packed too.
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error):
            return Check(instance, "user data", f"{len(raw):,} bytes that do not unpack", _ANEW)
    text = raw.decode(errors="replace")
    if redacted(text) != text:
        return Check(instance, "user data", "holds what looks like a secret", f"rotate that secret; then {_ANEW}")
    return Check(instance, "user data", f"{len(raw):,} bytes, nothing that looks like a secret" if raw else "none")


def _volume(one: Mapping[str, Any], encrypted: Mapping[str, bool]) -> Check:
    plain = [volume for volume in _volumes_of(one) if not encrypted.get(volume)]
    instance = str(one["InstanceId"])
    if plain:
        # A volume's encryption cannot be switched on.
        return Check(instance, "volumes", f"not encrypted: {', '.join(plain)}", _ANEW)
    return Check(instance, "volumes", f"{len(_volumes_of(one))} encrypted")


def _role(iam: Any, profile: str, region: str, instance: str) -> tuple[str, str]:
    """What was found of the profile's role, and the mend."""
    if not profile:
        return "no instance profile", (
            f"aws ec2 associate-iam-instance-profile --region {region} --instance-id {instance} "
            f"--iam-instance-profile Name={PROFILE}"
        )
    try:
        held = iam.get_instance_profile(InstanceProfileName=profile)["InstanceProfile"]["Roles"]
    except Exception as error:
        if code_of(error) != "NoSuchEntity":
            raise
        held = []
    if not held:
        return f"the instance profile {profile} has no role", "the commands in docs/launch.md"
    name = str(held[0]["RoleName"])
    if beyond := roles.wider(iam, name):
        mend = f"compare the policies of the role {name} with docs/policies/instance.json"
        return f"{name} may more than documented: {'; '.join(beyond)}", mend
    return f"{name} may no more than documented", ""


def _agent(instance: str, agent: Mapping[str, Any] | None, region: str) -> Check:
    if agent is None:
        return Check(instance, "agent", "Systems Manager does not know it", "aws ssm describe-instance-information")
    found = f"{agent.get('AgentVersion', 'of unknown version')}, {agent.get('PingStatus', '')}"
    if agent.get("PingStatus") != "Online":
        return Check(instance, "agent", found, f"./runner.py reboot --limit {instance}")
    if not agent.get("IsLatestVersion"):
        send = f"aws ssm send-command --region {region} --document-name AWS-UpdateSSMAgent --instance-ids {instance}"
        return Check(instance, "agent", f"{found}, not the latest", send)
    return Check(instance, "agent", f"{found}, the latest")
