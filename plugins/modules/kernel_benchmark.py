#!/usr/bin/python
"""Ansible module: the attention kernels' launch shapes, searched and timed on this host's own GPU, and kept."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.patch_files import vllm_version, write_whole
from ansible.module_utils.patch_registry import ATTENTION
from ansible.module_utils.records import read_json
from ansible.module_utils.refusals import Refusal, house_form
from ansible.module_utils.service_checks import is_in_unit
from ansible.module_utils.service_state import UNIT, Service

DOCUMENTATION = r"""
module: kernel_benchmark
short_description: Search the launch shapes of the attention kernels on the host's own GPU
description:
  - Runs the search with the release's own Python on its patched attention file, and keeps the report in
    C(launch_shapes.json) of the state folder, from which the next patch run takes its shapes.
  - The GPU is wanted alone. While the service runs it is refused, unless it may be stopped; then what served before is
    started again, however the search ends.
options:
  release: {type: dict, required: true, description: "The release: python, site_packages; empty for none."}
  capability: {type: str, required: true, description: Capability of the GPU.}
  limit_bytes: {type: int, required: true, description: "Opt-in shared memory per block, bytes."}
  shape: {type: dict, required: true, description: "dtype, block_size and layers of the model."}
  search: {type: str, required: true, description: Text of the search program.}
  checker: {type: str, required: true, description: Text of the compile check, which the search imports.}
  stop: {type: bool, default: false, description: The service may be stopped meanwhile.}
  timeout_s: {type: int, default: 3600, description: "Longest time of the search, seconds."}
  root: {type: path, default: /opt/vllm, description: Folder of the releases and of the current link.}
  state: {type: path, default: /var/lib/vllm-fleet, description: Folder of the records.}
author: [vllm-fleet]
"""
EXAMPLES = """
---
- kernel_benchmark: {release: {}, capability: '7.5', limit_bytes: 65536, shape: {}, search: '', checker: ''}
"""
RETURN = """
launch_shapes: {type: dict, returned: success, description: The report of the search, as it is kept.}
restarted: {type: bool, returned: success, description: Whether the service was stopped and started again.}
"""
_DEVICE = """
import json, torch
found = torch.cuda.is_available() and "%d.%d" % torch.cuda.get_device_capability()
print(json.dumps({"capability": found or ""}))
"""
_ON_GPU = ["nvidia-smi", "--query-compute-apps=pid,name", "--format=csv,noheader"]
_FROM_8 = 8
# A narrower head's launch takes as long as a launch takes, so its times are noise, and upstream's own shapes fit.
_LEAST_WIDTH = 256


class Refused(Exception):
    """There is no benchmark to be had here; `early` where nothing was done yet."""

    def __init__(self, what: str, where: str, mend: str, *, early: bool = True) -> None:
        super().__init__(what)
        self.refusal, self.early = Refusal(what, where, mend), early


def requests(shape: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What of a search's request the model decides, one for each number of heads; none where all heads are narrow.

    Widths are rounded up to powers of 2, as the kernels do. One that occurs with several numbers of heads is searched
    with the most query heads to a KV head: what holds their rows holds the others'.
    """
    heads: dict[int, tuple[int, int]] = {}
    for layer in shape["layers"]:
        width, found = 1 << (layer["head_size"] - 1).bit_length(), (layer["heads"], layer["kv_heads"])
        if width < _LEAST_WIDTH:
            continue
        heads[width] = max(heads.get(width, found), found, key=lambda pair: pair[0] / pair[1])
    return [
        {
            "head_sizes": sorted((width for width, found in heads.items() if found == pair), reverse=True),
            "heads": pair[0],
            "kv_heads": pair[1],
            "dtype": shape["dtype"],
            "block_size": shape["block_size"],
        }
        for pair in sorted(set(heads.values()))
    ]


class Benchmark:
    """One search on one host."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.p: dict[str, Any] = module.params
        self.service = Service(Path(self.p["root"]), Path(self.p["state"]))
        self.python = str(self.p["release"].get("python"))
        self.site = Path(self.p["release"].get("site_packages", ""))
        self.kept = Path(self.p["state"]) / "launch_shapes.json"
        self.ends = time.monotonic() + self.p["timeout_s"]

    def run(self) -> None:
        """Checks, searches, keeps the report."""
        source = self.source()
        self.check_device()
        with self.gpu_alone() as stopped:
            report = self.search(source)
        changed = read_json(self.kept) != report
        if changed:
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.kept, json.dumps(report).encode())
        self.module.exit_json(changed=changed, launch_shapes=report, restarted=stopped)

    def source(self) -> bytes:
        """The patched attention file of the release."""
        if int(self.p["capability"].split(".")[0]) >= _FROM_8:
            raise Refused(
                f"capability {self.p['capability']} is {_FROM_8}.0 or above, where upstream's launch shapes stay",
                "triton_patch_capability",
                "leave this host out with --limit",
            )
        if not self.p["release"]:
            raise Refused(
                "no release serves here, and one is wanted", f"{self.p['root']}/releases", "./runner.py converge"
            )
        if not requests(self.p["shape"]):
            raise Refused(
                f"the model's heads are narrower than {_LEAST_WIDTH}, where upstream's launch shapes stay",
                "triton_patch_shape",
                "leave this host out with --limit",
            )
        path = self.site / ATTENTION
        content = path.read_bytes() if path.is_file() else b""
        if b"_FLEET_SHAPES" not in content:
            raise Refused(
                "the kernel patch is not in, and its launch shapes are what is searched",
                str(path),
                "./runner.py repatch",
            )
        return content

    def check_device(self) -> None:
        """The release's torch sees the GPU that was planned for."""
        done = self.told([self.python, "-B", "-c", _DEVICE], self.module.tmpdir)
        lines = done.stdout.strip().splitlines()
        found = json.loads(lines[-1])["capability"] if done.returncode == 0 and lines else None
        if found is None:
            raise Refused(
                f"torch does not start: {_last(done.stderr)}", self.python, f"{self.python} -c 'import torch'"
            )
        if found != self.p["capability"]:
            here = f"a GPU of capability {found}" if found else "no CUDA device"
            raise Refused(
                f"torch has {here}, and one of capability {self.p['capability']} is wanted",
                self.python,
                "run it on a host with that card: --limit HOST",
            )

    @contextlib.contextmanager
    def gpu_alone(self) -> Iterator[bool]:
        """Nothing else computes on the GPU meanwhile; yields whether the service was stopped for it."""
        active = self.service.unit.show("ActiveState").get("ActiveState", "") not in ("inactive", "failed", "")
        if active and not self.p["stop"]:
            raise Refused(
                "the server runs, and a benchmark wants the GPU alone",
                UNIT,
                "./runner.py benchmark kernels --stop (stops it, and starts it again afterwards)",
            )
        others = self.others_on_gpu()
        if others:
            raise Refused(f"{'; '.join(others)} on the GPU, and a benchmark wants it alone", "nvidia-smi", "end them")
        try:
            with self.service.held(wait_seconds=10):
                if not active:
                    yield False
                    return
                record = self.service.last_good()
                if record is None or self.service.drift(record):
                    raise Refused(
                        "the server is not the one that passed its gate, so it is not stopped",
                        UNIT,
                        "./runner.py converge",
                    )
                try:
                    # As a switch to the same: whoever finds the run cut off starts what served before.
                    self.service.begin(record["build_id"], record["unit_text"])
                    yield True
                finally:
                    self.service.undo()
        except TimeoutError as error:
            raise Refused("another run is switching the server", UNIT, "wait for that run to end") from error

    def others_on_gpu(self) -> list[str]:
        """`PID, NAME` of each process on the GPU that is not the service's."""
        try:
            told = subprocess.run(_ON_GPU, capture_output=True, text=True, check=False, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return []
        rows = re.findall(r"^((\d+), .*)$", told.stdout, re.M) if told.returncode == 0 else []
        return [row for row, pid in rows if not is_in_unit(int(pid), UNIT)]

    def search(self, source: bytes) -> dict[str, Any]:
        """The report of `shape_search.py`, with the limit that was searched for."""
        report: dict[str, Any] = {"shapes": []}
        with tempfile.TemporaryDirectory(prefix="vllm-benchmark-", dir=self.module.tmpdir) as name:
            folder = Path(name)
            (folder / "shape_search.py").write_text(self.p["search"])
            (folder / "compile_check.py").write_text(self.p["checker"])
            (folder / "attention.py").write_bytes(source)
            given = {
                "capability": self.p["capability"],
                "limit_bytes": self.p["limit_bytes"],
                "site_packages": str(self.site),
                "source": str(folder / "attention.py"),
                "vllm": vllm_version(self.site),
                "time": True,
                "lowered": False,
            }
            for asked in requests(self.p["shape"]):
                (folder / "request.json").write_text(json.dumps({**given, **asked}))
                found = self.searched(folder)
                report = {**found, "shapes": [*report["shapes"], *found["shapes"]]}
        return {**report, "limit_bytes": self.p["limit_bytes"]}

    def searched(self, folder: Path) -> dict[str, Any]:
        """Runs the search on the request in the folder."""
        argv = [self.python, "-B", str(folder / "shape_search.py"), str(folder / "request.json")]
        done = self.told(argv, str(folder))
        report: dict[str, Any] = {}
        with contextlib.suppress(ValueError, IndexError):
            report = json.loads(done.stdout.splitlines()[-1])
        if done.returncode or not any(row["us"] for row in report.get("shapes", [])):
            raise Refused(
                f"no launch shape could be timed: {_last(done.stderr) or f'exit {done.returncode}, no word'}",
                str(self.site / ATTENTION),
                "look at dmesg and nvidia-smi on the host, then run it again",
                early=False,
            )
        return report

    def told(self, argv: list[str], folder: str) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end; when the time is up, it and all that it has started are ended, and it is told."""
        environment = {"PATH": "/usr/bin:/bin", "HOME": folder, "TRITON_CACHE_DIR": f"{folder}/cache"}
        # By this mark an interrupted run's processes are found and ended.
        environment |= {name: os.environ[name] for name in ("VLLM_FLEET_RUN",) if name in os.environ}
        process = subprocess.Popen(
            argv, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=max(1.0, self.ends - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise Refused(
                f"the search took longer than {self.p['timeout_s']} s, and nothing was kept",
                self.python,
                "set triton_patch_search_timeout_s higher",
                early=False,
            ) from error
        return subprocess.CompletedProcess(argv, process.returncode, out, err)


def _last(text: str) -> str:
    """The last line that says something."""
    return ([line for line in text.strip().splitlines() if line.strip()] or [""])[-1][:300]


def benchmark(module: AnsibleModule) -> None:
    """Runs it, and tells a refusal in the house form."""
    try:
        Benchmark(module).run()
    except Refused as refused:
        module.fail_json(
            msg=house_form([refused.refusal], os.uname().nodename, "triton_patch"), changed=False, refused=refused.early
        )


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(
        argument_spec={
            "release": {"type": "dict", "required": True},
            "capability": {"type": "str", "required": True},
            "limit_bytes": {"type": "int", "required": True},
            "shape": {"type": "dict", "required": True},
            "search": {"type": "str", "required": True},
            "checker": {"type": "str", "required": True},
            "stop": {"type": "bool", "default": False},
            "timeout_s": {"type": "int", "default": 3600},
            "root": {"type": "path", "default": "/opt/vllm"},
            "state": {"type": "path", "default": "/var/lib/vllm-fleet"},
        },
    )
    benchmark(module)


if __name__ == "__main__":
    main()
