"""What unit tests share: records of their own, and real device code that nvcc made, for which no GPU is needed."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.paths import cache_dir
from sandbox.standins import nvidia_repository


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A state directory for each test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture(scope="session")
def cuda_home() -> Iterator[Path]:
    """The toolkit, unpacked from its wheels, and gone afterwards: it takes 300 MB."""
    with tempfile.TemporaryDirectory() as folder:
        yield nvidia_repository.unpacked(Path(folder), cache_dir() / "cuda-wheels")


@pytest.fixture(scope="session")
def libraries(cuda_home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shared libraries with device code for 7.5, 8.0, both (with PTX), compressed, of two units, and with none."""
    folder = tmp_path_factory.mktemp("libraries")
    source = folder / "k.cu"
    source.write_text(
        "__global__ void k(float *x) { x[threadIdx.x] *= 2.f; }\nvoid run(float *x) { k<<<1, 1>>>(x); }\n"
    )
    other = folder / "other.cu"
    other.write_text("__global__ void l(int *x) { x[0] = 1; }\nvoid run_l(int *x) { l<<<1, 1>>>(x); }\n")
    sm75, sm80 = "arch=compute_75,code=sm_75", "arch=compute_80,code=sm_80"
    made = {
        "t75": ([sm75], [source], []),
        "t80": ([sm80], [source], []),
        "both": ([sm75, "arch=compute_80,code=[sm_80,compute_80]"], [source], []),
        "squeezed": ([sm75], [source], ["-Xfatbin", "-compress-all"]),
        "two": ([sm75], [source, other], []),
        "separate": ([sm75], [source, other], ["-rdc=true"]),
    }
    found = {}
    for name, (codes, files, more) in made.items():
        found[name] = folder / f"{name}.so"
        argv = [str(cuda_home / "bin" / "nvcc"), *[word for code in codes for word in ("-gencode", code)], *more]
        argv += ["-Xcompiler", "-fPIC", "--cudart", "none", "-shared", f"-L{cuda_home}/lib", "-o", str(found[name])]
        subprocess.run([*argv, *map(str, files)], check=True, capture_output=True)
    # Two fat binaries that their alignment keeps apart, as another linker may lay them.
    fatbin, assembly = folder / "k.fatbin", folder / "padded.s"
    subprocess.run(
        [str(cuda_home / "bin" / "nvcc"), "-arch=sm_75", "-fatbin", "-o", str(fatbin), str(source)], check=True
    )
    assembly.write_text('.section .nv_fatbin,"a"\n' + f'.balign 256\n.incbin "{fatbin}"\n' * 2)
    assert fatbin.stat().st_size % 256
    found["padded"] = folder / "padded.so"
    subprocess.run(["g++", "-shared", "-o", str(found["padded"]), str(assembly)], check=True)
    found["host"] = folder / "host.so"
    plain = folder / "plain.cpp"
    plain.write_text("int run() { return 1; }\n")
    subprocess.run(["g++", "-shared", "-fPIC", "-o", str(found["host"]), str(plain)], check=True)
    return found
