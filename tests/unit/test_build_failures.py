"""Failures of a compilation, told apart in the words of those who met them (CASES A36, A40, A41, A43)."""

from __future__ import annotations

import pytest
from build_failures import judge
from build_progress import Units

ENOSPC = "/tmp/tmpxft_0000.cpp4.ii: fatal error: error writing to /tmp/cc.s: No space left on device\n"
REFUSED = 'csrc/a.cu(12): error: identifier "x" is undefined\n'
CLONE = (
    "fatal: unable to access 'https://git.example/cutlass.git/': gnutls_handshake() failed\n"
    "CMake Error at cutlass-populate-gitclone.cmake:50 (message):\n  Failed to clone repository\n"
    "-- Configuring incomplete, errors occurred!\n"
)


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("Killed\nninja: build stopped: subcommand failed.\n", "memory", "out of memory with 8 jobs at once: Killed"),
        ("g++: fatal error: Killed signal terminated program cc1plus\n", "memory", "terminated program cc1plus"),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)\n", "memory", "'cicc' died due to signal 9"),
        ("cc1plus: out of memory allocating 65536 bytes\n", "memory", "out of memory allocating"),
        ("OSError: [Errno 28] No space left on device\n", "disk", "[Errno 28] No space left on device"),
        # The compiler's own words for a full disk are no fault of the source.
        (ENOSPC + REFUSED, "disk", "No space left on device"),
        (CLONE, "network", "gnutls_handshake() failed"),
        (
            "/usr/include/crt/host_config.h:1:2: error: #error -- unsupported GNU version! gcc versions later than 13 "
            "are not supported!\n",
            "compiler",
            "gcc versions later than 13 are not supported",
        ),
        (REFUSED + "csrc/b.cu(1): error: second\n", "compiler", 'refuses csrc/a.cu:12: identifier "x" is undefined'),
        ("csrc/q.cpp:7:10: fatal error: Python.h: No such file or directory\n", "compiler", "csrc/q.cpp:7: Python.h"),
    ],
)
def test_what_stopped_it_is_told(text: str, kind: str, words: str) -> None:
    found = judge(text, oom_kills=0, free_mib=9000, free_inodes=9000, jobs=8, where="/s/tree")
    assert found is not None
    assert found.kind == kind
    assert words in found.what
    assert found.mend


def test_counters_tell_what_no_program_said() -> None:
    text = "ninja: build stopped: subcommand failed.\n"
    killed = judge(text, oom_kills=2, free_mib=9000, free_inodes=9000, jobs=1, where="/s")
    assert killed is not None
    assert killed.what == "out of memory with 1 jobs at once: the kernel killed 2 of its processes"
    # Fewer than one job there are not.
    assert killed.mend.startswith("set swapfile_size_mib higher")
    for room in ({"free_mib": 3, "free_inodes": 9000}, {"free_mib": 9000, "free_inodes": 0}):
        full = judge(text, oom_kills=0, jobs=8, where="/s", **room)
        assert full is not None
        assert (full.kind, "df -h /s" in full.mend) == ("disk", True)


@pytest.mark.parametrize(
    "text",
    [
        "ninja: build stopped: subcommand failed.\n",
        # A network's words without a configuration that failed: something else was tried and given up.
        "fatal: unable to access 'https://git.example/': Could not resolve host\nrunning build_ext\n",
        "warning: error codes are not checked\n",
    ],
)
def test_what_is_none_of_them_is_left_to_the_log(text: str) -> None:
    assert judge(text, oom_kills=0, free_mib=9000, free_inodes=9000, jobs=8, where="/s") is None


def test_units_are_ninja_s_and_not_what_cmake_fetches() -> None:
    units = Units()
    units.read(b"[3/9] Performing download step (git clone) for 'cutlass-populate'\n", 0)
    assert (units.done, units.total, units.left_s(0)) == (0, 0, None)
    units.read(b"[1/60] Building CUDA object a.cu.o\n[2/60] Building CUDA obj", 10)
    assert (units.done, units.total, units.left_s(10)) == (1, 60, None)
    units.read(b"ect b.cu.o\n", 12)
    assert units.done == 2
    units.read(b"ptxas info\n[11/60] Building CXX object c.o\n", 30)
    # Ten units in 20 s, and 49 are left.
    assert (units.done, units.left_s(30)) == (11, 98)
    # A second extension has a count of its own.
    units.read(b"[1/5] Building CUDA object d.cu.o\n", 40)
    assert (units.done, units.total, units.left_s(40)) == (1, 5, None)
