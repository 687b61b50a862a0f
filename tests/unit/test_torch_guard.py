"""A build that brings, changes or hides the AMI's torch fails at the step that did it: real uv, pip and wheels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from build_release import Build
from job import JobError
from torch_guard import TorchGuard

from tests.unit.package_indexes import wheel
from tests.unit.test_build_release import Site, run

# A build backend's own doing, before it makes the wheel.
UPGRADE = """
import os, subprocess
if "UPGRADES" in os.environ:
    argv = [os.environ["PIPS_PYTHON"], "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--upgrade"]
    subprocess.run([*argv, "--target", os.environ["UPGRADES"], os.environ["UPGRADE_WITH"]], check=True)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    """A host whose pip knows one folder of wheels and no index."""
    monkeypatch.setattr(Build, "make_tools", lambda _self: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/none/simple")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    (tmp_path / "links").mkdir()
    (tmp_path / "none" / "simple").mkdir(parents=True)
    return Site(tmp_path)


def add(site: Site, name: str, version: str, files: dict[str, str]) -> Path:
    """A wheel of these files in the folder of wheels."""
    path = site.folder / "links" / f"{name}-{version}-py3-none-any.whl"
    path.write_bytes(wheel(name, version, files))
    return path


def failed(build: Build) -> str:
    status, record = run(build)
    assert record == {}
    assert (status["state"], status["refused"]) == ("failed", False)
    return str(status["what"])


def test_a_build_requirement_that_brings_its_own_torch_is_named(site: Site) -> None:
    add(site, "helper", "1.0", {"helper.py": "", "torch/__init__.py": "__version__ = '2.12.0'\n"})
    site.requires = ["helper"]
    build = site.build()
    assert failed(build) == "TORCH_REPLACED: build_requirements: helper 1.0 brings torch/__init__.py"


def test_a_requirement_of_the_release_that_brings_its_own_triton_is_named(site: Site) -> None:
    add(site, "helper", "1.0", {"triton/__init__.py": ""})
    build = site.build(environment={"BUILD_NEEDING": "helper"})
    assert failed(build) == "TORCH_REPLACED: install: helper 1.0 brings triton/__init__.py"


def test_a_requirement_on_another_torch_installs_none(site: Site) -> None:
    # CASES A18: the pins of torch are left out of the resolution.
    add(site, "torch", "2.14.0", {"torch/__init__.py": ""})
    site.requires = ["torch==2.14.0"]
    status, record = run(site.build(environment={"BUILD_NEEDING": "torch==2.14.0"}))
    assert (status["state"], record["torch"], record["cuda"]) == ("done", "2.12.0", "13.2")


def test_a_build_that_upgrades_the_amis_torch_in_place_is_named(site: Site) -> None:
    other = add(site, "torch", "2.14.0", {"torch/__init__.py": "__version__ = '2.14.0'\n", "torch/new.py": ""})
    site.backend = UPGRADE + site.backend
    build = site.build(
        environment={"UPGRADES": str(site.folder / "ami"), "UPGRADE_WITH": str(other), "PIPS_PYTHON": sys.executable}
    )
    what = failed(build)
    assert what.startswith("TORCH_REPLACED: build_wheel: the AMI's torch 2.12.0 was changed in place: ")
    assert "torch-2.14.0.dist-info/METADATA appeared" in what


def test_another_torch_on_the_path_is_named(site: Site) -> None:
    other = site.folder / "other" / "torch"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text((site.folder / "ami/torch/__init__.py").read_text().replace("2.12.0", "2.14.0"))
    add(site, "hides", "1.0", {"hides.pth": f"import sys; sys.path.insert(0, '{other.parent}')\n"})
    what = failed(site.build(environment={"BUILD_NEEDING": "hides"}))
    seen = "torch 2.14.0 is seen and 2.12.0 is wanted; torch comes from"
    assert what == f"TORCH_REPLACED: install: {seen} {other}/__init__.py"


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ("", ""),
        ("version = SimpleNamespace(cuda=None)", "CUDA none is seen and 13.2 is wanted"),
        ("version = SimpleNamespace(cuda='13.0')", "CUDA 13.0 is seen and 13.2 is wanted"),
        (
            "_C = SimpleNamespace(_cuda_getArchFlags=lambda: 'sm_80')",
            "arch list ['sm_80'] is seen and ['sm_75', 'sm_80'] is wanted",
        ),
        ("__version__ = '2.12.0+cpu'", "torch 2.12.0+cpu is seen and 2.12.0 is wanted"),
    ],
)
def test_version_cuda_and_arch_list_are_those_that_preflight_found(tmp_path: Path, says: str, words: str) -> None:
    torch = tmp_path / "ami" / "torch"
    torch.mkdir(parents=True)
    (tmp_path / "own").mkdir()
    torch.joinpath("__init__.py").write_text(
        "from types import SimpleNamespace\n__version__ = '2.12.0'\nversion = SimpleNamespace(cuda='13.2')\n"
        f"_C = SimpleNamespace(_cuda_getArchFlags=lambda: 'sm_75 sm_80')\n{says}\n"
    )
    wanted: dict[str, Any] = {
        "site_packages": str(torch.parent), "version": "2.12.0", "cuda": "13.2", "arch_list": ["sm_75", "sm_80"],
    }  # fmt: skip

    def ask(program: str) -> str:
        argv = [sys.executable, "-c", program]
        return subprocess.run(
            argv, env={"PYTHONPATH": str(torch.parent)}, capture_output=True, text=True, check=True
        ).stdout

    guard = TorchGuard(wanted, ask)
    if not words:
        assert guard.judge("install", tmp_path / "own")["cuda"] == "13.2"
        return
    with pytest.raises(JobError) as caught:
        guard.judge("install", tmp_path / "own")
    assert caught.value.what == f"TORCH_REPLACED: install: {words}"


def test_byte_code_that_an_import_writes_is_no_change(site: Site) -> None:
    build = site.build()
    (site.folder / "ami" / "torch" / "__pycache__").mkdir(exist_ok=True)
    build.make_environment()
    (site.folder / "ami" / "torch" / "__pycache__" / "x.pyc").write_bytes(b"")
    build.torch.judge("install", build.site_packages)
    (site.folder / "ami" / "torch" / "x.py").write_text("")
    with pytest.raises(JobError, match=r"torch/x\.py appeared"):
        build.torch.judge("install", build.site_packages)
    (build.site_packages / "triton").mkdir()
    with pytest.raises(JobError, match="TORCH_REPLACED: install: triton appeared, of no distribution"):
        build.torch.judge("install", build.site_packages)
