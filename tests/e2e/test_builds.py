"""A CUDA build on a host, by the real nvcc: it outlives its controller and its host, and ends when it is cancelled.

One story in order, on one host: each test begins where the one before it ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fleet.paths import PROJECT, state_dir
from sandbox import containers
from sandbox.standins import small_vllm
from tests.machine import bare_sandbox, runner
from tests.unit.small_builds import below

HOST = "vllm-fleet-host1"
BUILDS = "/var/lib/vllm-fleet/builds"
_TORCH = {
    "version.py": "",
    "_C.py": "def _cuda_getArchFlags():\n    return 'sm_75 sm_80'\n",
    "__init__.py": (
        "from types import SimpleNamespace\nfrom torch import _C\n"
        "__version__ = '2.12.0+cu132'\nversion = SimpleNamespace(cuda='13.2')\n"
    ),
}
_COMPILERS = "ps -eo comm= | grep -E '^(nvcc|cicc|ptxas|ninja|cudafe)' || true"


def on_host(script: str) -> str:
    """Runs a shell script on the host."""
    return containers.Podman().shell(HOST, script)


@pytest.fixture(scope="module", autouse=True)
def host_with_the_small_source() -> Iterator[None]:
    """A bare host that finds the small source on its index, and a torch that says CUDA 13.2."""
    with bare_sandbox():
        podman = containers.Podman()
        on_host("python3 -m venv --without-pip /opt/torch-cuda")
        site = on_host("ls -d /opt/torch-cuda/lib/python3*/site-packages")
        for name, text in _TORCH.items():
            podman.put(HOST, f"{site}/torch/{name}", text.encode())
        podman.put(HOST, f"/srv/small/vllm-{small_vllm.VERSION}.tar.gz", sdist())
        on_host("sed -i 's#^find-links =#&\\n    /srv/small#' /etc/pip.conf")
        yield


def sdist() -> bytes:
    """The small source as an index has it."""
    return small_vllm.build_sdist(state_dir()).read_bytes()


def words(**more: Any) -> list[str]:
    """A converge that builds the small source, one unit at a time."""
    release = {
        "name": "small", "method": "source", "distribution": "vllm", "version": small_vllm.VERSION,
        "sha256": hashlib.sha256(sdist()).hexdigest(), "target_device": "cuda", "rust_frontend": False, "serve": True,
        **more,
    }  # fmt: skip
    return [
        "converge", "--json", "--tags", "cuda_toolkit_sbsa,vllm_source_build",
        "-e", f"vllm_source_build_releases={json.dumps([release])}", "-e", "vllm_source_build_jobs=1",
        "-e", "preflight_torch_prefixes=[/opt/torch-cuda]",
    ]  # fmt: skip


def started(*command: str) -> subprocess.Popen[str]:
    """The command, begun."""
    argv = [sys.executable, "-m", "fleet", *command]
    return subprocess.Popen(argv, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(reached: Callable[[], Any], process: subprocess.Popen[str] | None = None, seconds: float = 180) -> Any:
    """What comes of a question as soon as it is true; the command must not have ended before."""
    end = time.monotonic() + seconds
    while not (found := reached()):
        assert process is None or process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < end, on_host(f"tail -n 40 {BUILDS}/*/build.log; cat {BUILDS}/*/status.json")
        time.sleep(0.5)
    return found


def status() -> dict[str, Any]:
    """Status of the build that was begun last; empty where there is none."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(on_host(f"cat $(ls -td {BUILDS}/*/ | head -n 1)status.json 2>/dev/null || true")))
    return {}


def compiled() -> list[str]:
    """CUDA sources that were compiled, once for each time, by the log of all builds."""
    return on_host(f"grep -ho 'CUDA object .*/[a-z_]*[.]cu' {BUILDS}/*/build.log | sed 's#.*/##' || true").split()


def units() -> list[str]:
    """Build units that are at work."""
    return on_host("systemctl list-units --no-legend --plain 'vllm-build-*' | cut -d' ' -f1").split()


def test_a_killed_controller_and_a_reboot_lose_nothing_of_a_build() -> None:
    logs = set((state_dir() / "logs").glob("*-converge.jsonl"))
    process = started(*words())

    def progress() -> list[dict[str, Any]]:
        lines = [line for log in set((state_dir() / "logs").glob("*-converge.jsonl")) - logs
                 for line in log.read_text().splitlines() if '"units"' in line]  # fmt: skip
        return [json.loads(line)["progress"] for line in lines]

    seen = until(progress, process)[-1]
    assert seen["units"]["total"] == small_vllm.STEPS
    assert seen["stage"] == "build_wheel"
    for pid in reversed(below(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    (unit,) = units()
    before = len(compiled())
    until(lambda: len(compiled()) > before)

    assert on_host("systemctl is-enabled vllm-fleet-builds.service") == "enabled"
    subprocess.run([containers.podman_path(), "restart", "--time", "60", HOST], check=True, capture_output=True)
    made = set(compiled())
    assert until(units) == [unit]
    again = until(lambda: compiled()[len(made) :])
    assert set(again) & made == set()
    # It comes to its end with nobody waiting, and leaves nothing to take up at the next boot.
    until(lambda: not units())
    assert on_host("ls /etc/systemd/system/vllm-fleet-builds.service 2>/dev/null || echo gone") == "gone"
    assert status()["state"] == "done"

    done = runner(*words())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    # Every unit once, in two runs: before the boot and after it.
    assert sorted(compiled()) == sorted({*compiled()})
    assert len(compiled()) == small_vllm.CUDA_UNITS
    assert on_host(f"grep -c 'uv build --wheel' {BUILDS}/*/build.log") == "2"
    record = json.loads(on_host("cat /opt/vllm/releases/*/release.json"))
    assert record["architectures"] == {"_C_stable_libtorch.abi3.so": {"7.5": 8}}
    again = runner(*words())
    assert json.loads(again.stdout)["hosts"][HOST]["changed"] == 0


def test_a_cancelled_build_ends_with_all_its_compilers() -> None:
    process = started(*words(environment={"LANG": "C"}))
    until(lambda: "cicc" in on_host(_COMPILERS), process)
    nobody = runner("build", "cancel", "nobody", "--json")
    assert nobody.returncode == 2
    assert "no host has begun a build of nobody" in nobody.stderr
    done = runner("build", "cancel", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (on_host(_COMPILERS), units()) == ("", [])
    told = status()
    assert told["state"] == "cancelled"
    assert told["what"].startswith("the build was cancelled by ")
    said, errors = process.communicate()
    assert process.returncode == 1, errors[-3000:]
    assert "the build was cancelled by" in json.loads(said)["hosts"][HOST]["message"]
    # Whoever waited for it does not start it again, and neither does a boot.
    assert units() == []
    found = json.loads(runner("build", "status", "--json").stdout)["hosts"][HOST]["builds"]
    assert sorted(build["state"] for build in found) == ["cancelled", "done"]
    subprocess.run([containers.podman_path(), "restart", "--time", "60", HOST], check=True, capture_output=True)
    until(lambda: on_host("systemctl is-system-running || true") in ("running", "degraded"))
    assert units() == []
    assert on_host("ls /etc/systemd/system/vllm-fleet-builds.service 2>/dev/null || echo gone") == "gone"
