"""Which capabilities libraries hold code for, read from what the real nvcc 13.2 made, against what was asked for."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path

import architectures
import pytest
from ansible.module_utils.cubin import capabilities_in, capability_of, ptx_in, runs_on
from architectures import Held
from job import JobError

from fleet.paths import cache_dir
from sandbox.standins import nvidia_repository

WHERE = Path("/r/dist/vllm.whl")


def test_device_code_is_read_from_libraries(libraries: dict[str, Path]) -> None:
    found = {name: capabilities_in(path.read_bytes()) for name, path in libraries.items()}
    assert found["t75"] == {"7.5": 1}
    assert found["t80"] == {"8.0": 1}
    assert found["both"] == {"7.5": 1, "8.0": 1}
    assert found["squeezed"] == {"7.5": 1}
    assert found["two"] == {"7.5": 2}
    assert found["padded"]["7.5"] == 2
    assert set(found["separate"]) == {"7.5"}
    assert found["host"] == {}


def test_a_cubin_says_its_capability(cuda_home: Path, tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text("__global__ void k(float *x) { x[0] = 1; }\n")
    for capability in ("7.5", "8.0", "12.0"):
        out = tmp_path / "k.cubin"
        code = capability.replace(".", "")
        subprocess.run(
            [str(cuda_home / "bin/nvcc"), f"-arch=sm_{code}", "-cubin", "-o", str(out), str(source)], check=True
        )
        assert capability_of(out.read_bytes()) == capability
    with pytest.raises(ValueError, match="not a cubin"):
        capability_of(Path("/bin/sh").read_bytes())


@pytest.mark.parametrize(
    ("code", "capability", "runs"),
    [("7.5", "7.5", True), ("8.0", "8.9", True), ("8.9", "8.6", False), ("8.0", "7.5", False), ("8.0", "9.0", False)],
)
def test_a_cubin_runs_on_its_own_major_upwards(code: str, capability: str, runs: bool) -> None:
    assert runs_on(code, capability) is runs


def test_ptx_is_read_from_libraries(libraries: dict[str, Path]) -> None:
    found = {name: ptx_in(path.read_bytes()) for name, path in libraries.items()}
    # -arch=sm_75 alone, as in `padded`, brings PTX too.
    assert {name: ptx for name, ptx in found.items() if ptx} == {"both": {"8.0"}, "padded": {"7.5"}}


def problems(found: dict[str, Held], arch_list: str) -> str:
    try:
        architectures.judge(found, arch_list, WHERE)
    except JobError as error:
        assert error.where == str(WHERE)
        assert error.what.endswith(f", and {arch_list} is wanted")
        return error.what.removesuffix(f", and {arch_list} is wanted")
    return ""


@pytest.mark.parametrize(
    ("names", "arch_list", "words"),
    [
        (("t75", "separate", "squeezed", "two", "padded", "host"), "7.5", ""),
        # Both directions: more than was asked for, and less.
        (("t75", "both"), "7.5", "both.so holds code for 8.0"),
        (("t75", "t80"), "7.5", "t80.so holds code for 8.0; t80.so holds no code for 7.5"),
        (("t75", "both"), "7.5 8.0", "t75.so holds no code for 8.0"),
        (("both",), "7.5;8.0+PTX", ""),
        (("host",), "7.5", "no library holds device code"),
        # vLLM compiles its 8.0 kernels once for 8.6 and 8.9.
        (("t80",), "8.9", ""),
    ],
)
def test_a_wheels_code_equals_what_was_asked_for(
    libraries: dict[str, Path], tmp_path: Path, names: tuple[str, ...], arch_list: str, words: str
) -> None:
    wheel = tmp_path / "vllm-0.33.0-cp38-abi3-linux_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in names:
            archive.write(libraries[name], f"vllm/{name}.so")
    found = architectures.of_wheel(wheel, tmp_path)
    assert "host.so" not in found
    assert problems(found, arch_list) == words
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]


@pytest.mark.parametrize(
    ("held", "arch_list", "words"),
    [
        # As vLLM's CMake lists compile them: "8.0+PTX" for 9.0, 9.0a, "12.0f" for 12.1.
        ({"_C_stable_libtorch.abi3.so": Held({"8.0": 2, "9.0": 5}, frozenset({"8.0"}))}, "9.0a", ""),
        ({"_C_stable_libtorch.abi3.so": Held({"12.0": 5})}, "12.1", ""),
        ({"_C_stable_libtorch.abi3.so": Held({"8.0": 2, "9.0": 5})}, "9.0", "holds code for 8.0"),
        ({"_C_stable_libtorch.abi3.so": Held({"7.5": 1, "9.0": 5}, frozenset({"7.5"}))}, "9.0", "holds code for 7.5"),
        # PTX that the card could compile is no code for it below 8.0: vLLM asks for none there.
        ({"_C_stable_libtorch.abi3.so": Held({}, frozenset({"7.0"}))}, "7.5", "holds no code for 7.5"),
        # FlashAttention 3 is for 9.0 alone, whatever else is asked for, but not for nothing that was.
        ({"_vllm_fa3_C.abi3.so": Held({"9.0": 9})}, "8.0;9.0a", ""),
        ({"_vllm_fa3_C.abi3.so": Held({"9.0": 9})}, "8.0", "holds code for 9.0"),
        ({"_moe_C_stable_libtorch.abi3.so": Held({"9.0": 9})}, "8.0;9.0a", "holds no code for 8.0"),
    ],
)
def test_what_equal_means_from_8_0_on(held: dict[str, Held], arch_list: str, words: str) -> None:
    told = problems(held, arch_list)
    assert told.partition(".abi3.so ")[2].partition(";")[0] == words


@pytest.fixture(scope="module")
def cuobjdump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toolkit's folder with the real cuobjdump in it."""
    folder = tmp_path_factory.mktemp("toolkit")
    [wheel] = nvidia_repository.toolkit_wheels(cache_dir() / "cuda-wheels", names=["nvidia-cuda-cuobjdump"])
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/bin/cuobjdump")]
        (folder / "bin").mkdir()
        (folder / "bin" / "cuobjdump").write_bytes(archive.read(name))
    (folder / "bin" / "cuobjdump").chmod(0o755)
    return folder


def test_cuobjdump_and_our_reader_agree(libraries: dict[str, Path], cuobjdump: Path, tmp_path: Path) -> None:
    told = architectures.of_files(libraries.values(), cuobjdump)
    read = architectures.of_files(libraries.values(), tmp_path)
    assert told == read
    assert set(told) == {"t75.so", "t80.so", "both.so", "squeezed.so", "two.so", "separate.so", "padded.so"}


def test_what_cuobjdump_cannot_read_is_told(cuobjdump: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    with pytest.raises(JobError, match="cuobjdump ended with"):
        architectures.of_files([broken], cuobjdump)
