"""A release that somebody laid hands on is not taken for whole; what the patch role alters is."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible.module_utils.release_health import damage

TORCH = "/opt/pytorch/lib/python3.11/site-packages"
KERNELS = "vllm/v1/attention/ops/triton_unified_attention.py"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A release's packages, as an installer leaves them."""
    files = {"vllm/__init__.py": "x = 1\n", "vllm/_C.so": "\x7fELF", KERNELS: "TILE = 32\n", "../bin/vllm": "#!\n"}
    rows = ["vllm-1.dist-info/RECORD,,0", "vllm/__pycache__/__init__.pyc,,"]
    for name, text in files.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        rows.append(f"{name},sha256=whatever,{len(text)}")
    listing = tmp_path / "site" / "vllm-1.dist-info" / "RECORD"
    listing.parent.mkdir()
    listing.write_text("\n".join(rows) + "\n")
    (tmp_path / "site" / "ami_torch.pth").write_text(f"{TORCH}\n")
    return tmp_path / "site"


def test_a_release_as_installed_is_whole(site: Path) -> None:
    assert damage(site, TORCH, 1) == ""


def test_a_patched_file_is_the_patch_role_s_to_judge(site: Path) -> None:
    (site / KERNELS).write_text("TILE = 16  # and more\n")
    assert damage(site, TORCH, 1) == ""


def test_a_lost_file_is_named(site: Path) -> None:
    (site / "vllm/_C.so").unlink()
    assert damage(site, TORCH, 1) == "vllm/_C.so is gone"


def test_a_file_outside_the_packages_counts_too(site: Path) -> None:
    (site / "../bin/vllm").unlink()
    assert damage(site, TORCH, 1) == "../bin/vllm is gone"


def test_an_altered_file_is_named_with_both_sizes(site: Path) -> None:
    (site / "vllm/__init__.py").write_text("x = 1000\n")
    assert damage(site, TORCH, 1) == "vllm/__init__.py has 9 bytes, and 6 were installed"


@pytest.mark.parametrize("text", [None, "", "/somewhere/else\n"])
def test_the_way_to_torch_must_be_there(site: Path, text: str | None) -> None:
    (site / "ami_torch.pth").unlink()
    if text is not None:
        (site / "ami_torch.pth").write_text(text)
    assert damage(site, TORCH, 1) == f"ami_torch.pth does not lead to torch in {TORCH}"


def test_an_emptied_release_is_not_whole(site: Path) -> None:
    (site / "vllm-1.dist-info" / "RECORD").unlink()
    assert damage(site, TORCH, 1) == f"no package is in {site}"
