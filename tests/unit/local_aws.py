"""The local AWS in the test's own process: real HTTP, machines that are folders of this one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import httpx

from sandbox.standins import aws, metadata, moto_mended
from sandbox.standins.agents import Agents, ManagedInstance
from sandbox.standins.local_aws import LocalAws
from sandbox.standins.machines import Folder
from sandbox.standins.registry import Registry

REGION = "us-east-1"
aws.put_at_once()
moto_mended.spot_by_template()


class Local:
    """A running local AWS; `environment` is what finds it."""

    def __init__(self) -> None:
        self.aws = LocalAws()
        self.registry = Registry(self.aws)
        self.cloud = self.aws.cloud
        self.url = self.aws.url
        self.services: list[metadata.Server] = []
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @property
    def agents(self) -> Agents:
        """The machines' agents."""
        return self.registry.agents

    def client(self, service: str, region: str = REGION) -> Any:
        """A client of whoever may do everything."""
        return boto3.Session("testing", "testing", region_name=region).client(service, endpoint_url=self.url)

    def add(self, folder: Path, **more: Any) -> ManagedInstance:
        """An instance whose commands run in the folder, with instance metadata of its own."""
        folder.mkdir(exist_ok=True)
        made = self.registry.add(lambda instance_id: Folder(instance_id, folder), **more)
        service = metadata.serve("127.0.0.1", 0, lambda _: made)
        threading.Thread(target=service.serve_forever, args=[0.05], daemon=True).start()
        self.services.append(service)
        made.variables["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = f"http://127.0.0.1:{service.server_port}"
        made.variables["FLEET_STATE"] = str(folder / "state")
        return made


@contextmanager
def local_aws() -> Iterator[Local]:
    """A local AWS with nothing in it."""
    local = Local()
    local.aws.start()
    httpx.post(f"{local.url}/moto-api/reset", trust_env=False).raise_for_status()
    try:
        yield local
    finally:
        local.registry.run_command.stop()
        local.aws.stop()
        for service in local.services:
            service.shutdown()
            service.server_close()
