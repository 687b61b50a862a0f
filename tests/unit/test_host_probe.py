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


def test_own_swap_is_told_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    swaps = "Filename Type Size Used Priority\n/var/swapfile file 65532 0 -2\n/dev/zram0 partition 1024 0 100\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: swaps if str(path) == "/proc/swaps" else read(path, *a, **k)
    )
    assert host_probe._memory("/var/swapfile")["own_swap_bytes"] == 65532 * 1024
    assert host_probe._memory("/srv/swapfile")["own_swap_bytes"] == 0


def test_the_image_is_read_from_cloud_init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "instance-data.json"
    monkeypatch.setattr(host_probe, "_INSTANCE_DATA", data)
    assert host_probe._ami() == ""
    data.write_text(json.dumps({"ds": {"meta_data": {"ami-id": "ami-0123"}}, "v1": {"cloud_name": "aws"}}))
    assert host_probe._ami() == "ami-0123"
    data.write_text(json.dumps({"ds": "no dictionary"}))
    assert host_probe._ami() == ""


def test_paths_on_one_file_system_share_its_identity(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    one, other = host_probe._filesystem(str(tmp_path / "a" / "not" / "there")), host_probe._filesystem(str(tmp_path))
    assert one["id"] == other["id"] != host_probe._filesystem("/proc")["id"]
    assert one["total_inodes"] >= one["free_inodes"] > 0
