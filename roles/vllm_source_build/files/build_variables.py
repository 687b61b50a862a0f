"""Whether each variable that a release sets for its build is read by somebody: without effect it is an error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from job import JobError

# What the tools of a build read themselves, from their manuals: CMake's environment variables, g++ and its linker,
# nvcc, ninja, torch's CMake files.
_TOOLS = {
    "CMAKE_BUILD_PARALLEL_LEVEL", "CMAKE_BUILD_TYPE", "CMAKE_COLOR_DIAGNOSTICS", "CMAKE_EXPORT_COMPILE_COMMANDS",
    "CMAKE_GENERATOR", "CMAKE_INCLUDE_PATH", "CMAKE_INSTALL_MODE", "CMAKE_LIBRARY_PATH", "CMAKE_NO_VERBOSE",
    "CMAKE_PREFIX_PATH", "CMAKE_PROGRAM_PATH", "CMAKE_TLS_VERIFY", "CMAKE_TOOLCHAIN_FILE", "VERBOSE",
    *(f"CMAKE_{language}_{kind}_LAUNCHER" for language in ("C", "CXX", "CUDA") for kind in ("COMPILER", "LINKER")),
    "AR", "AS", "CC", "CFLAGS", "CPATH", "CPLUS_INCLUDE_PATH", "CPPFLAGS", "CXX", "CXXFLAGS", "C_INCLUDE_PATH", "LD",
    "LDFLAGS", "LD_LIBRARY_PATH", "LIBRARY_PATH", "SOURCE_DATE_EPOCH",
    "CUDAARCHS", "CUDACXX", "CUDAFLAGS", "CUDAHOSTCXX", "CUDA_BIN_PATH", "CUDA_CACHE_PATH", "CUDA_HOME", "CUDA_PATH",
    "CUDAToolkit_ROOT", "CUDNN_INCLUDE_PATH", "CUDNN_LIBRARY_PATH", "NVCC_APPEND_FLAGS", "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS", "TORCH_CUDA_ARCH_LIST", "TORCH_INSTALL_PREFIX", "NINJA_STATUS",
    "HOME", "LANG", "PATH", "TMPDIR", "SSL_CERT_DIR", "SSL_CERT_FILE", "RUSTFLAGS",
    "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "all_proxy", "http_proxy", "https_proxy", "no_proxy",
}  # fmt: skip
# Tools with more names than are worth keeping here. AWS_ is what sccache finds its store's region and keys by.
_TOOLS_FAMILIES = (
    "AWS_", "CARGO_", "CCACHE_", "GIT_", "LC_", "OPENSSL_", "PIP_", "PYTHON", "RUSTC_", "RUSTUP_", "SCCACHE_",
    "SETUPTOOLS_", "UV_",
)  # fmt: skip
# Variables of CMake's cache that CMake itself, its packages or the projects that are fetched read.
_CACHE_FAMILIES = (
    "BUILD_", "CMAKE_", "CPACK_", "CTEST_", "CUDA", "CUTLASS_", "Caffe2_", "FETCHCONTENT_", "Python", "TORCH_",
    "Torch_", "USE_",
)  # fmt: skip
# Quoted in Python, as an attribute of vLLM's envs, or as CMake's ENV{NAME}.
_READ = re.compile(r"""ENV\{(\w+)\}|\benvs\.([A-Z]\w+)|["']([A-Za-z_]\w+)["']""")
_DEFINED = re.compile(r"-D([\w-]+)[:=]")


def judge(tree: Path, version: str, environment: Mapping[str, str], where: str, decided: Mapping[str, str]) -> None:
    """Refuses the first variable that has no effect on this source's build.

    Args:
        tree: the source.
        version: its version, for the message.
        environment: what the release sets; definitions inside CMAKE_ARGS are looked at too.
        where: which release, for the message.
        decided: names that something else decides, and what does.

    Raises:
        JobError: refused; it names the nearest name that is read.
    """
    programs = [*tree.glob("*.py"), *tree.glob("tools/*.py")]
    lists = [tree / "CMakeLists.txt", *tree.glob("cmake/**/*.cmake")]
    cmake = "\n".join(_texts(lists))
    read = {name for text in (*_texts(programs), cmake) for found in _READ.findall(text) for name in found if name}
    for name in sorted(environment):
        if name in decided:
            raise _refused(f"{name} is set, and {decided[name]}", where, f"remove {name} from that entry's environment")
        if name in read or name in _TOOLS or name.startswith(_TOOLS_FAMILIES):
            continue
        what = f"{name} is set, and nothing in the build of {version} reads it"
        raise _refused(what + _nearest(name, read | _TOOLS), where, f"remove {name} from that entry's environment")
    words = set(re.findall(r"[\w-]+", cmake))
    for name in _DEFINED.findall(environment.get("CMAKE_ARGS", "")):
        mend = f"remove -D{name} from CMAKE_ARGS in that entry's environment"
        if name in decided:
            raise _refused(f"CMAKE_ARGS defines {name}, and {decided[name]}", where, mend)
        if name not in words and not name.startswith(_CACHE_FAMILIES):
            what = f"CMAKE_ARGS defines {name}, and no CMake file of {version} reads it"
            raise _refused(what + _nearest(name, words), where, mend)


def _texts(files: Iterable[Path]) -> list[str]:
    return [file.read_text(errors="replace") for file in files if file.is_file()]


def _nearest(name: str, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(name, sorted(known), 1, 0.7)
    return f"; the nearest that is read is {found[0]}" if found else ""


def _refused(what: str, where: str, mend: str) -> JobError:
    return JobError(what, where, mend, refused=True)
