"""A search on the host's own GPU: what is asked, kept and refused; the search is scripted, files are real."""

from __future__ import annotations

import ast
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils import service_state
from ansible.module_utils.launch_shapes import REPORTED, origin, shapes_for
from ansible.module_utils.patch_registry import ATTENTION
from rich.console import Console

from fleet import benchmark_cli
from fleet.paths import PROJECT
from plugins.modules import kernel_benchmark
from tests.unit.doubles import Module, Systemd, ends

FILES = PROJECT / "roles/triton_patch/files"
UNIT = "vllm.service"
# FACTS: the two decode shapes of head 512 in float16, with what they ask for; the third, wider, does not fit.
REPORT = {
    "vllm": "0.33.0",
    "lowered_for": "7.5",
    "triton": "3.8.0",
    "torch": "2.14.0",
    "gpu": "NVIDIA T4G",
    "stages_matter": False,
    "shapes": [
        {"block_m": 16, "shared_bytes": 65536, "us": {"decode at 16,000": 1000.0}, "stock": True},
        {"block_m": 8, "shared_bytes": 49152, "us": {"decode at 16,000": 600.0}, "stock": False},
        {"block_m": 32, "shared_bytes": 98304, "us": {}, "stock": False},
    ],
}
for _row in REPORT["shapes"]:  # type: ignore[attr-defined]
    _row.update(head_size=512, dtype="float16", phase="decode", tile=16, warps=4, registers=255, stack_bytes=8)
SHAPE = {
    "dtype": "float16",
    "block_size": 16,
    "layers": [
        {"head_size": 512, "heads": 8, "kv_heads": 1, "sliding_window": 0},
        {"head_size": 256, "heads": 8, "kv_heads": 1, "sliding_window": 512},
    ],
}
SEARCH = """
import json, pathlib, subprocess, sys, time
import compile_check  # lies beside it
here = pathlib.Path({log!r})
request = json.loads(pathlib.Path(sys.argv[1]).read_text())
state = pathlib.Path({state!r})
unfinished = state / "service.unfinished.json"
note = json.loads(unfinished.read_text()) if unfinished.exists() else {{}}
units = pathlib.Path({systemd!r}, "units.json")
told = json.loads(units.read_text()).get("vllm.service", {{}}).get("ActiveState") if units.exists() else None
source = pathlib.Path(request["source"]).read_text()
with here.open("a") as log:
    log.write(json.dumps({{"request": request, "unfinished": note, "unit": told, "source": source}}) + "\\n")
{act}
print(json.dumps({report!r}))
"""
TORCH = """
class cuda:
    is_available = staticmethod(lambda: {capability!r} is not None)
    get_device_capability = staticmethod(lambda: {capability!r})
"""


class Host:
    """A host with one release whose Python has a torch that says which GPU is here."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.systemd = Systemd(folder / "systemd", monkeypatch)
        self.root, self.state, self.log = folder / "opt", folder / "state", folder / "asked"
        self.release = self.root / "releases" / "one"
        self.site = self.release / "site"
        (self.site / ATTENTION).parent.mkdir(parents=True)
        (self.site / ATTENTION).write_text("_FLEET_SHAPES = {}\n")
        (self.site / "vllm-0.33.0.dist-info").mkdir()
        (self.site / "vllm-0.33.0.dist-info" / "METADATA").write_text("Version: 0.33.0\n")
        self.state.mkdir()
        self.kept = self.state / "launch_shapes.json"
        self.python = folder / "python"
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH={folder}/lib exec {sys.executable} "$@"\n')
        self.python.chmod(0o755)
        (folder / "lib").mkdir()
        self.has_gpu((7, 5))
        self.service = service_state.Service(self.root, self.state)
        monkeypatch.setenv("VLLM_FLEET_RUN", "run1")

    def has_gpu(self, capability: tuple[int, int] | None) -> None:
        """What torch says of the device."""
        (self.folder / "lib" / "torch.py").write_text(TORCH.format(capability=capability))

    def on_gpu(self, *rows: str) -> None:
        """What nvidia-smi says of processes on the GPU."""
        program = self.systemd.home / "bin" / "nvidia-smi"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
        program.chmod(0o755)

    def serve(self) -> None:
        """The release serves, as its gate left it."""
        text = f"[Service]\nExecStartPre=-python3 prestart.py {UNIT} k1\nExecStart={self.python}\n"
        self.service.begin("one", text)
        self.service.start()
        record = {"build_id": "one", "path": str(self.release), "key": "k1", "unit_text": text}
        self.service.finish({**record, "patch": self.service.patch(self.release)})
        assert self.service.drift(self.service.record()) == []

    def run(self, *, act: str = "", report: Any = REPORT, **more: Any) -> dict[str, Any]:
        search = SEARCH.format(
            log=str(self.log), state=str(self.state), systemd=str(self.systemd.home), act=act, report=report
        ).replace("print(json.dumps(", "print('a word before')\nprint(json.dumps(")
        params = {
            "release": {"python": str(self.python), "site_packages": str(self.site)}, "capability": "7.5",
            "limit_bytes": 65536, "shape": SHAPE, "search": search, "checker": "", "stop": False, "timeout_s": 60,
            "root": str(self.root), "state": str(self.state), **more,
        }  # fmt: skip
        module = Module(params, tmpdir=str(self.folder))
        return ends(lambda: kernel_benchmark.benchmark(module))

    @property
    def asked(self) -> list[dict[str, Any]]:
        """What each search saw."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(tmp_path, monkeypatch)


def keys_read(path: Path, *names: str) -> set[str]:
    """Constant keys by which a program reads variables of these names."""
    return {
        str(node.slice.value)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id in names
        and isinstance(node.slice, ast.Constant)
    }


def test_the_request_is_what_the_search_reads(host: Host) -> None:
    host.run()
    [asked] = host.asked
    request = asked["request"]
    # The search hands its request to the compile check as the model's shape, whose layers it makes itself.
    shape_keys = keys_read(FILES / "compile_check.py", "shape") - {"layers"}
    assert set(request) == keys_read(FILES / "shape_search.py", "request") | shape_keys | {"vllm"}
    assert request.pop("source").startswith(str(host.folder))
    assert request == {
        "capability": "7.5", "limit_bytes": 65536, "site_packages": str(host.site), "vllm": "0.33.0", "time": True,
        "lowered": False, "head_sizes": [512, 256], "heads": 8, "kv_heads": 1, "dtype": "float16", "block_size": 16,
    }  # fmt: skip
    assert asked["source"] == (host.site / ATTENTION).read_text()


def test_the_report_is_kept_as_the_patch_takes_it_before_all_others(host: Host) -> None:
    first = host.run()
    assert (first["failed"], first["changed"], first["restarted"]) == (False, True, False)
    kept = json.loads(host.kept.read_text())
    assert kept == first["launch_shapes"] == {**REPORT, "limit_bytes": 65536}
    figures = json.loads((FILES / "launch_shapes.json").read_text())
    [best, reported] = [shape for shape in shapes_for(figures, kept) if shape.capability == (7, 5)]
    assert (best.phase, best.head_size, best.rows, best.shared) == ("decode", 512, 8, 49152)
    assert (reported.rows, reported.tile, reported.warps) == REPORTED
    assert origin(figures, "7.5", kept) == "launch shapes timed on this host's NVIDIA T4G"
    assert not host.run()["changed"]
    assert list(host.folder.glob("vllm-benchmark-*")) == []


def test_a_report_in_which_nothing_is_better_is_kept_too(host: Host) -> None:
    rows = [{**row, "us": {"decode at 16,000": 950.0 if row["us"] else 1.0}} for row in REPORT["shapes"]]  # type: ignore[attr-defined]
    host.run(report={**REPORT, "shapes": rows[:2]})
    assert shapes_for({}, json.loads(host.kept.read_text())) == []
    [row] = benchmark_cli.compared(json.loads(host.kept.read_text()))
    assert (row["known"], row["best"], row["best_us"]) == (REPORTED, None, {})


def refused(host: Host, **more: Any) -> str:
    """The message of a refused run, which changes nothing and stops nothing."""
    seen = {path: path.read_bytes() for path in host.folder.rglob("*") if path.is_file() and path.name != "calls"}
    result = host.run(**more)
    assert (result["failed"], result["refused"], result["changed"]) == (True, True, False)
    found = {path: path.read_bytes() for path in host.folder.rglob("*") if path.is_file() and path.name != "calls"}
    new = {path.name for path in found.keys() - seen.keys()}
    assert new <= {"lock", "units.json"}, new  # the lock, and what the double of systemctl writes
    assert all(found[path] == content for path, content in seen.items())
    assert host.asked == []
    message = str(result["msg"])
    assert message.startswith("triton_patch: ")
    assert [line.split(":")[0] for line in message.splitlines()[1:]] == ["  where", "  mend"]
    return message


def test_a_host_without_a_device_is_refused(host: Host) -> None:
    host.has_gpu(None)
    assert "torch has no CUDA device, and one of capability 7.5 is wanted" in refused(host)


def test_a_gpu_that_is_not_the_planned_one_is_refused(host: Host) -> None:
    host.has_gpu((9, 0))
    assert "torch has a GPU of capability 9.0, and one of capability 7.5 is wanted" in refused(host)
    assert "capability 8.6 is 8.0 or above" in refused(host, capability="8.6")


def test_a_torch_that_does_not_start_is_refused(host: Host) -> None:
    (host.folder / "lib" / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    assert "torch does not start: ImportError: libcudart.so.13: no such file" in refused(host)


def test_without_the_patch_or_a_release_there_is_nothing_to_search(host: Host) -> None:
    (host.site / ATTENTION).write_text("TILE = 32\n")
    assert "./runner.py repatch" in refused(host)
    assert "no release serves here" in refused(host, release={})
    narrow = [{"head_size": 128, "heads": 8, "kv_heads": 1, "sliding_window": 0}]
    assert "heads are narrower than 256" in refused(host, shape={**SHAPE, "layers": narrow})


def test_a_gpu_that_somebody_else_uses_is_refused(host: Host) -> None:
    host.on_gpu(f"{os.getpid()}, python3")
    assert f"{os.getpid()}, python3 on the GPU" in refused(host)


def test_a_server_that_runs_is_refused_unless_it_may_be_stopped(host: Host) -> None:
    host.serve()
    calls = host.systemd.calls()
    assert "benchmark kernels --stop" in refused(host)
    assert host.systemd.calls() == calls


def test_a_server_that_may_be_stopped_serves_again_afterwards(host: Host) -> None:
    host.serve()
    calls = len(host.systemd.calls())
    result = host.run(stop=True)
    assert (result["failed"], result["restarted"]) == (False, True)
    [asked] = host.asked
    # Whoever ends the run meanwhile knows by the note that the server has to be started again.
    assert (asked["unit"], asked["unfinished"]) == ("inactive", {"run": "run1", "build_id": "one"})
    verbs = [call.split()[0] for call in host.systemd.calls()[calls:]]
    assert (verbs.count("start"), verbs[-1]) == (1, "start")
    assert host.service.drift(host.service.record()) == []


def test_a_server_that_differs_from_what_was_proven_is_not_stopped(host: Host) -> None:
    host.serve()
    host.systemd.set(UNIT, DropInPaths="/etc/systemd/system/vllm.service.d/override.conf")
    assert "not the one that passed its gate" in refused(host, stop=True)


@pytest.mark.parametrize(
    ("act", "timeout_s", "words"),
    [
        (
            "print('cuda error: 700', file=sys.stderr); sys.exit(1)",
            60,
            "no launch shape could be timed: cuda error: 700",
        ),
        ("sys.exit(0)", 60, "no launch shape could be timed: exit 0, no word"),
        ("subprocess.Popen(['sleep', '97.531']); time.sleep(60)", 2, "the search took longer than 2 s"),
    ],
)
def test_a_search_that_fails_keeps_nothing_and_the_server_serves_again(
    host: Host, act: str, timeout_s: int, words: str
) -> None:
    host.serve()
    result = host.run(act=act, timeout_s=timeout_s, stop=True)
    assert (result["failed"], result["refused"]) == (True, False)
    assert words in result["msg"]
    assert not host.kept.exists()
    assert host.systemd.state(UNIT)["ActiveState"] == "active"
    assert host.service.drift(host.service.record()) == []
    assert b"sleep\x0097.531" not in b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline"))


def test_widths_with_other_heads_are_searched_apart(host: Host) -> None:
    def layer(head: int, heads: int, kv_heads: int) -> dict[str, int]:
        return {"head_size": head, "heads": heads, "kv_heads": kv_heads, "sliding_window": 0}

    # 8 query heads to a KV head at 512; at 256 (and 192, which is as wide) 4 and 2 of them; 128 is not worth it.
    shape = {**SHAPE, "layers": [layer(512, 8, 1), layer(256, 16, 8), layer(192, 16, 4), layer(128, 32, 1)]}
    result = host.run(shape=shape)
    asked = [entry["request"] for entry in host.asked]
    assert [(one["heads"], one["kv_heads"], one["head_sizes"]) for one in asked] == [(8, 1, [512]), (16, 4, [256])]
    assert len(result["launch_shapes"]["shapes"]) == 2 * len(REPORT["shapes"])  # type: ignore[arg-type]


def test_the_table_has_the_best_against_what_stands_without_a_search() -> None:
    report = {**REPORT, "limit_bytes": 65536}
    [row] = benchmark_cli.compared(report)
    assert row == {
        "phase": "decode", "head_size": 512, "known": REPORTED, "known_us": {"decode at 16,000": 1000.0},
        "best": (8, 16, 4), "best_us": {"decode at 16,000": 600.0},
    }  # fmt: skip
    file = io.StringIO()
    benchmark_cli._show(Console(file=file, width=160), "one", report)
    for words in ("one: NVIDIA T4G, vLLM 0.33.0", "16, 16, 4", "8, 16, 4", "1,000", "600", "40%"):
        assert words in file.getvalue()
