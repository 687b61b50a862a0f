#!/usr/bin/env python3
"""Ansible inventory beside aws_ec2.yml for the local AWS: what its instances need that no instance of EC2's does."""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sandbox import host_variables


def main() -> int:
    """Prints the inventory as JSON: the sandbox's variables for the instances that are its hosts."""
    world = host_variables.recorded()
    hosts = {
        found["instance_id"]: {
            "sandbox_address": found["address"],
            "vllm_fleet_endpoint_url": world["aws_url"],
            # The containers share one kernel, and so its swap: each has a file of its own name there.
            "swapfile_path": f"/srv/swap/{found['name']}",
        }
        for found in _instances(world["aws_url"])
    }
    sandbox = {
        "hosts": list(hosts),
        "vars": {
            **host_variables.variables(world),
        },
    }
    json.dump({"_meta": {"hostvars": hosts}, "sandbox": sandbox}, sys.stdout, indent=1)
    return 0


def _instances(aws_url: str) -> list[dict[str, Any]]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{aws_url}/stand-in/machines", timeout=10) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())
    return found


if __name__ == "__main__":
    raise SystemExit(main())
