"""Records what a host says of a converge with nothing to do: `python -m bench.record_stream`.

ansible-runner's own worker, as the job on a host runs it, on this machine: 31 tasks in the roles of playbooks/site.yml.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tempfile
from pathlib import Path

from fleet.paths import PROJECT
from fleet.requests import ROLES

RECORDING = PROJECT / "bench" / "recordings" / "noop_converge.json.gz"
# Stands for the host in the recording; each simulated host puts its own id in its place.
INSTANCE = "i-0aaaaaaaaaaaaaaaa"
_TASKS = 31
_MODULES = (
    {"ansible.builtin.stat": {"path": "/etc/os-release"}},
    {"ansible.builtin.command": {"argv": ["true"]}, "changed_when": False},
    {"ansible.builtin.slurp": {"src": "/etc/os-release"}},
    {"ansible.builtin.file": {"path": "/etc", "state": "directory"}},
)


def record() -> bytes:
    """The stream's lines, with nothing of this machine in them but what the modules say of /etc."""
    sys.path.insert(0, str(PROJECT / "fleet" / "run_command" / "on_host"))
    from host_job import Quiet

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        project, private = folder / "project", folder / "private"
        private.mkdir()
        for number, role in enumerate(ROLES):
            tasks = project / "roles" / role / "tasks" / "main.yml"
            tasks.parent.mkdir(parents=True)
            own = [
                {"name": f"Look at {turn + 1}", **_MODULES[turn % len(_MODULES)]}
                for turn in range(_TASKS)
                if turn % len(ROLES) == number
            ]
            tasks.write_text(json.dumps(own))
        play = [{"name": "Server", "hosts": "all", "gather_facts": False, "roles": list(ROLES)}]
        (project / "site.yml").write_text(json.dumps(play))
        inventory = private / "inventory.json"
        own_variables = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
        inventory.write_text(json.dumps({"all": {"hosts": {INSTANCE: own_variables}}}))
        kwargs = {
            "playbook": "site.yml", "inventory": str(inventory), "project_dir": str(project),
            "envvars": {"ANSIBLE_NOCOLOR": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        }  # fmt: skip
        asked = b"".join(json.dumps(part).encode() + b"\n" for part in ({"kwargs": kwargs}, {"eof": True}))
        said = io.BytesIO()
        Quiet(io.BytesIO(asked), said, 60, private_data_dir=str(private)).run()
        text = said.getvalue()
    machine = os.uname().nodename
    for own_text, neutral in ((name, "/run"), (sys.prefix, "/environment"), (machine, "host")):
        text = text.replace(own_text.encode(), neutral.encode())
    return text


def main() -> None:
    """Writes the recording."""
    text = record()
    RECORDING.parent.mkdir(exist_ok=True)
    RECORDING.write_bytes(gzip.compress(text, 9, mtime=0))
    print(f"{len(text.splitlines())} lines, {len(text)} bytes in {RECORDING}")


if __name__ == "__main__":
    main()
