"""What is read of a host and of a model's folder."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
from ansible.module_utils import host_probe

from sandbox.standins import gpu


def test_the_stand_in_wants_to_be_initialized_like_the_real_one(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(gpu.build(tmp_path)["libcuda.so.1"]))
    count = ctypes.c_int()
    assert library.cuDeviceGetCount(ctypes.byref(count)) == 3
    assert library.cuInit(0) == 0
    assert library.cuDeviceGetCount(ctypes.byref(count)) == 0
    assert count.value == 1
    assert library.cuDeviceGet(ctypes.byref(count), 1) == 101


def test_another_card_can_stand_in(tmp_path: Path) -> None:
    card = tmp_path / "l4.json"
    card.write_text(json.dumps({**json.loads(gpu.T4G.read_text()), "name": "NVIDIA L4", "capability": "8.9"}))
    made = gpu.build(tmp_path / "out", card)
    done = subprocess.run(
        [sys.executable, made["nvidia-smi"], "--query-gpu=name,compute_cap", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "NVIDIA L4, 8.9\n"


def test_a_driver_library_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout: float = 0, **__: object) -> None:
        assert timeout
        raise subprocess.TimeoutExpired("python", timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert "did not answer within 60 s" in host_probe._gpus()["error"]


def test_a_folder_of_older_weights_counts_by_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(bytes(300))
    (tmp_path / "other.bin").write_bytes(bytes(200))
    found = host_probe.read_model(str(tmp_path), 10_246_621_918)
    assert (found["largest_bytes"], found["weights_bytes"]) == (300, 500)
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    found = host_probe.read_model(str(tmp_path), 10_246_621_918)
    assert (found["largest_bytes"], found["weights_bytes"]) == (100, 100)


def test_own_swap_is_told_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    swaps = "Filename Type Size Used Priority\n/var/swapfile file 65532 0 -2\n/dev/zram0 partition 1024 0 100\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: swaps if str(path) == "/proc/swaps" else read(path, *a, **k)
    )
    assert host_probe._memory("/var/swapfile")["own_swap_bytes"] == 65532 * 1024
    assert host_probe._memory("/srv/swapfile")["own_swap_bytes"] == 0
