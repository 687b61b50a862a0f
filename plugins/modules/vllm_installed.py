#!/usr/bin/python
"""Ansible module: the releases that are on this host, as their own records tell; changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.records import read_json
from ansible.module_utils.refusals import Refusal, house_form
from ansible.module_utils.service_state import Service

DOCUMENTATION = r"""
module: vllm_installed
short_description: List the releases that are on a host
description:
  - Sets the fact vllm_releases to what is there, whatever the inventory wants; the release that last passed its gate is
    marked C(serve). Fails with nothing changed where no release is there.
options:
  root: {type: path, default: /opt/vllm, description: Folder of the releases and of the current link.}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- vllm_installed: {}
"""
RETURN = "releases: {type: list, returned: success, description: 'The releases, as in the fact vllm_releases.'}"
_KEYS = ("name", "build_id", "python", "site_packages", "version", "distribution")


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/opt/vllm"},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
        supports_check_mode=True,
    )
    root, state = Path(module.params["root"]), Path(module.params["state"])
    serving = Service(root, state).record().get("path")
    releases = [
        {**{key: record[key] for key in _KEYS}, "path": str(path.parent), "serve": str(path.parent) == serving}
        for path in sorted((root / "releases").glob("*/release.json"))
        if (record := read_json(path)).keys() >= set(_KEYS)
    ]
    if not releases:
        what = "no release of vLLM is on this host, and one is wanted"
        nothing = Refusal(what, f"{root}/releases", "./runner.py converge")
        module.fail_json(msg=house_form([nothing], os.uname().nodename, "vllm_installed"), changed=False, refused=True)
    module.exit_json(changed=False, releases=releases, ansible_facts={"vllm_releases": releases})


if __name__ == "__main__":
    main()
