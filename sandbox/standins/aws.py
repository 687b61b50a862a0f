"""The local AWS: moto answers EC2, S3 and Secrets Manager; here is what the sandbox finds in it."""

from __future__ import annotations

import json
import secrets
import threading
from typing import Any

import boto3
from moto.core import DEFAULT_ACCOUNT_ID
from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from moto.ec2.models.amis import Ami
from moto.s3.responses import S3Response
from moto.ssm.models import Parameter, ssm_backends

REGION = "us-east-1"
PROFILE = "vllm-fleet-host"
SECRET_ID = "vllm-fleet/hf-token"  # noqa: S105


def seed(endpoint_url: str) -> None:
    """Puts in a bucket, the hosts' instance profile, and a Hugging Face token that is random and of no use anywhere."""
    publish_images(REGION)
    session = boto3.Session("testing", "testing", region_name=REGION)
    profile_of_hosts(session.client("iam", endpoint_url=endpoint_url))
    session.client("s3", endpoint_url=endpoint_url).create_bucket(Bucket="vllm-fleet")
    session.client("secretsmanager", endpoint_url=endpoint_url).create_secret(
        Name=SECRET_ID, SecretString=json.dumps({"HF_TOKEN": f"hf_{secrets.token_hex(17)}"})
    )


def profile_of_hosts(iam: Any) -> None:
    """The instance profile of the fleet's hosts, with its role: a launch makes neither."""
    trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
    iam.create_role(
        RoleName=PROFILE, AssumeRolePolicyDocument=json.dumps({"Version": "2012-10-17", "Statement": [trust]})
    )
    iam.create_instance_profile(InstanceProfileName=PROFILE)
    iam.add_role_to_instance_profile(InstanceProfileName=PROFILE, RoleName=PROFILE)


def publish_images(region: str) -> None:
    """Puts in Deep Learning AMIs and AWS's public parameters of them: nobody but AWS may put those over the network."""
    images, parameters = ec2_backends[DEFAULT_ACCOUNT_ID][region], ssm_backends[DEFAULT_ACCOUNT_ID][region]
    kinds = {"arm64": "ARM64 AMI OSS Nvidia Driver GPU", "x86_64": "OSS Nvidia Driver AMI GPU"}
    for number, (architecture, kind) in enumerate(kinds.items()):
        for minor in (9, 11):
            image_id = f"ami-{number}{minor:02}00000000000000"
            images.amis[image_id] = Ami(
                images,
                image_id,
                name=f"Deep Learning {kind} PyTorch 2.{minor} (Ubuntu 24.04) 202610{minor:02}",
                owner_id="898082745236",
                owner_alias="amazon",
                public=True,
                architecture=architecture,
                root_device_type="ebs",
                virtualization_type="hvm",
                region_name=f"{region}a",
            )
            name = (
                f"/aws/service/deeplearning/ami/{architecture}"
                f"/oss-nvidia-driver-gpu-pytorch-2.{minor}-ubuntu-24.04/latest/ami-id"
            )
            parameters._parameters[name].append(
                Parameter(
                    account_id=DEFAULT_ACCOUNT_ID,
                    name=name,
                    value=image_id,
                    parameter_type="String",
                    description=None,
                    allowed_pattern=None,
                    keyid=None,
                    last_modified_date=utcnow(),
                    version=1,
                    data_type="text",
                )
            )


def put_at_once() -> None:
    """Makes conditional puts what they are in S3: moto looks at the condition and puts in two steps."""
    put, turn = S3Response.put_object, threading.Lock()

    def put_object(self: S3Response) -> Any:
        with turn:
            return put(self)

    S3Response.put_object = put_object
