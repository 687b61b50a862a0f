#!/usr/bin/python
"""Ansible module: what is open, outdated or loosened on this host, and what mends it; changes nothing."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from ansible.module_utils.audit_host import Check, Said, reboot, sandboxing, updates
from ansible.module_utils.audit_network import network, sockets
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.records import read_json
from ansible.module_utils.service_checks import is_in_unit
from ansible.module_utils.service_state import UNIT
from ansible.module_utils.systemd_unit import Unit

DOCUMENTATION = r"""
module: vllm_audit
short_description: Look at a host's updates, its services' sandboxing and its listening sockets
description:
  - Asks apt (by its simulation, over the lists that are there), systemd-analyze and ss; changes nothing. A finding is a
    check with a mend, a command to be run on the host.
options:
  ec2:
    type: bool
    required: true
    description: Whether the host is an instance on EC2, with Systems Manager as the way in.
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_audit: {ec2: true}
"""
RETURN = "host_checks: {type: list, returned: always, description: 'Of each name, found and mend, empty for none.'}"
_UNITS = (UNIT, "vllm-secrets.service", "vllm-watchdog.service")
_LISTS = Path("/var/lib/apt/lists")
_REBOOT = Path("/run/reboot-required")
# Nothing is written or waited for: no cache of packages, no lock. A package that is held lacks its update, too.
_SIMULATED = (
    "apt-get", "-s", "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=", "--ignore-hold", "dist-upgrade",
)  # fmt: skip
_LISTED = ("ss", "-H", "-l", "-t", "-u", "-n", "-p")


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "ec2": {"type": "bool", "required": True},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
        supports_check_mode=True,
    )
    releases = {path.name: path.read_text(errors="replace") for path in _LISTS.glob("*Release")}
    checks = updates(releases, said(*_SIMULATED), time.time())
    checks.append(reboot(_asking()))
    checks += [_sandboxing(name) for name in _UNITS if Unit(name).path.is_file()]
    url = str(read_json(Path(module.params["state"]) / "service.json").get("url", ""))
    listed = said(*_LISTED)
    pids = {pid for one in sockets(listed.out) for pid in one.pids if is_in_unit(pid, UNIT)}
    module.exit_json(changed=False, host_checks=[*checks, *network(listed, url, pids, ec2=module.params["ec2"])])


def said(*argv: str) -> Said:
    """What a program says in no language."""
    try:
        done = subprocess.run(
            argv, env={**os.environ, "LC_ALL": "C"}, capture_output=True, encoding="utf-8", errors="replace",
            check=False,
        )  # fmt: skip
    except OSError as error:
        return Said("", f"{argv[0]}: {error.strerror}")
    if done.returncode:
        return Said(done.stdout, " ".join(done.stderr.split()[-40:]) or f"{argv[0]} ended with {done.returncode}")
    return Said(done.stdout)


def _asking() -> str | None:
    """The packages that ask for a reboot."""
    if not _REBOOT.exists():
        return None
    packages = _REBOOT.with_suffix(".pkgs")
    return packages.read_text() if packages.exists() else ""


def _sandboxing(unit: str) -> Check:
    argv = ("systemd-analyze", "security", "--no-pager")
    return sandboxing(unit, said(*argv, unit), said(*argv, "--json=short", unit))


if __name__ == "__main__":
    main()
