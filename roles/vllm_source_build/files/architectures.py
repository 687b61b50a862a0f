"""Which GPU capabilities the libraries of a wheel hold code for, held to those that were asked for."""

from __future__ import annotations

import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cubin import capabilities_in, ptx_in, runs_on
from job import JobError
from kernel_choices import capabilities

# What vLLM compiles for some capabilities alone, whatever else is asked for; every other library serves them all.
_FOR_SOME = (
    "_deep_gemm_C", "_deepselect_C", "_flashkda_C", "_flashmla_C", "_flashmla_extension_C", "_qutlass_C",
    "_vllm_fa2_C", "_vllm_fa3_C",
)  # fmt: skip
# From here on vLLM compiles kernels for an earlier capability too that serves the later ones (its lists: "8.0+PTX").
_SHARED_FROM = "8.0"


@dataclass(frozen=True, slots=True)
class Held:
    """What one library holds: capability to the number of its cubins, and the capabilities that it has PTX of."""

    cubins: dict[str, int]
    ptx: frozenset[str] = frozenset()


def of_wheel(wheel: Path, cuda_home: Path) -> dict[str, Held]:
    """File name to what it holds, for the wheel's shared libraries that hold device code."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=wheel.parent) as folder:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        return of_files([Path(archive.extract(name, folder)) for name in names], cuda_home)


def of_files(files: Iterable[Path], cuda_home: Path) -> dict[str, Held]:
    """File name to what it holds, told by the toolkit's cuobjdump, or read here where it has none."""
    program = cuda_home / "bin" / "cuobjdump"
    found = {file.name: _told(program, file) if program.is_file() else _read(file) for file in files}
    return {name: held for name, held in found.items() if held.cubins or held.ptx}


def judge(found: Mapping[str, Held], arch_list: str, where: Path) -> None:
    """Fails where a library lacks code for a capability that was asked for, or holds code for another one.

    Below 8.0 equal means just that: a library for `7.5` holds code for 7.5 and nothing else. From 8.0 on vLLM itself
    compiles some kernels for an earlier capability that serves the one asked for (a lower minor of its major, or with
    PTX): that is taken for it, as long as it is no earlier than 8.0. Of several capabilities each library must serve
    all, but for those that vLLM makes for some alone (FlashAttention and its like), which must serve one. The letter
    of `9.0a` is no part of a capability.

    Args:
        found: file name to what it holds.
        arch_list: as in TORCH_CUDA_ARCH_LIST, such as `7.5` or `8.0;9.0a+PTX`.
        where: the wheel, for the message.
    """
    asked = capabilities(arch_list)
    problems = [] if found else ["no library holds device code"]
    for name, held in sorted(found.items()):
        other = [code for code in sorted(held.cubins) if not _asked_for(code, held, asked)]
        lacking = [capability for capability in asked if not _serves(held, capability)]
        if name.partition(".")[0] in _FOR_SOME and len(lacking) < len(asked):
            lacking = []
        if other:
            problems.append(f"{name} holds code for {' '.join(other)}")
        if lacking:
            problems.append(f"{name} holds no code for {' '.join(lacking)}")
    if problems:
        raise JobError(
            f"{'; '.join(problems)}, and {arch_list} is wanted",
            str(where),
            "set vllm_source_build_arch_list to what the GPU has, then converge again",
        )


def _asked_for(code: str, held: Held, asked: list[str]) -> bool:
    if code in asked:
        return True
    shared = _numbers(code) >= _numbers(_SHARED_FROM)
    later = any(_numbers(code) < _numbers(capability) for capability in asked)
    return shared and (any(runs_on(code, capability) for capability in asked) or (code in held.ptx and later))


def _serves(held: Held, capability: str) -> bool:
    if _numbers(capability) < _numbers(_SHARED_FROM):
        return capability in held.cubins
    return any(runs_on(code, capability) for code in held.cubins) or any(
        _numbers(code) <= _numbers(capability) for code in held.ptx
    )


def _read(file: Path) -> Held:
    library = file.read_bytes()
    return Held(capabilities_in(library), frozenset(ptx_in(library)))


def _told(program: Path, file: Path) -> Held:
    """In the words of `cuobjdump --list-elf --list-ptx`: a line a file, named like `x.1.sm_75.cubin`."""
    argv = [str(program), "--list-elf", "--list-ptx", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode and "does not contain device code" not in done.stdout + done.stderr:
        raise JobError(
            f"cuobjdump ended with {done.returncode}: {done.stderr.strip()[-200:]}", str(file), " ".join(argv)
        )
    named = re.findall(r"\.sm_(\d+)(\d)[a-z]?\.(cubin|ptx)$", done.stdout, re.M)
    cubins = [f"{major}.{minor}" for major, minor, kind in named if kind == "cubin"]
    ptx = frozenset(f"{major}.{minor}" for major, minor, kind in named if kind == "ptx")
    return Held({code: cubins.count(code) for code in sorted(set(cubins))}, ptx)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, capability.split(".")))
