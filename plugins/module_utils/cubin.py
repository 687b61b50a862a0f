"""Reads which GPU capabilities compiled code was made for: a cubin, or the cubins inside a shared library."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_MACHINE_CUDA = 190
_FATBIN_MAGIC = 0xBA55ED50
_KIND_PTX, _KIND_CUBIN = 1, 2
# nvcc puts its code into the first; what is meant for the device linker into the second.
_SECTIONS = (b".nv_fatbin", b"__nv_relfatbin")


def capability_of(cubin: bytes) -> str:
    """The capability, such as `7.5`.

    The second byte of the ELF flags where the CUDA ABI is 8 (nvcc 13: 0x6004b04 is 75), the first byte in older ones.
    Raises ValueError for what is no cubin.
    """
    if cubin[:4] != b"\x7fELF" or struct.unpack_from("<H", cubin, 18)[0] != _MACHINE_CUDA:
        raise ValueError("not a cubin")
    flags = struct.unpack_from("<I", cubin, 48)[0]
    return _dotted((flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF)


def capabilities_in(library: bytes) -> dict[str, int]:
    """Capability to the number of its cubins inside an ELF shared library; empty where it holds none.

    Raises ValueError for what is no 64-bit little-endian ELF file.
    """
    found: dict[str, int] = {}
    for kind, name in _entries(library):
        if kind == _KIND_CUBIN:
            found[name] = found.get(name, 0) + 1
    return found


def ptx_in(library: bytes) -> set[str]:
    """The capabilities that the library has PTX of. Raises ValueError as `capabilities_in`."""
    return {name for kind, name in _entries(library) if kind == _KIND_PTX}


def runs_on(code: str, capability: str) -> bool:
    """Whether a cubin made for `code` runs on `capability`: the same major, and no higher minor."""
    have, wanted = (tuple(map(int, text.split("."))) for text in (code, capability))
    return have[0] == wanted[0] and have[1] <= wanted[1]


def _entries(library: bytes) -> Iterator[tuple[int, str]]:
    """Kind and capability of each entry of the library's fat binaries.

    Reads their headers alone (magic 0xba55ed50; per entry kind, header size, payload size, and at byte 28 the
    capability, as nvcc 13.2 writes them), so compressed code counts as well.
    """
    if library[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    for start, end in _code_sections(library):
        at = start
        while at + 16 <= end:
            magic, _, header, size = struct.unpack_from("<IHHQ", library, at)
            if magic != _FATBIN_MAGIC:
                at += 8  # padding between two fat binaries
                continue
            entry, at = at + header, at + header + size
            while entry < at:
                kind, _, header, size = struct.unpack_from("<HHIQ", library, entry)
                yield kind, _dotted(struct.unpack_from("<I", library, entry + 28)[0])
                entry += header + size


def _code_sections(library: bytes) -> list[tuple[int, int]]:
    """Start and end of the sections with device code."""
    table, size, count, names = (*struct.unpack_from("<Q", library, 40), *struct.unpack_from("<HHH", library, 58))
    headers = [struct.unpack_from("<IIQQQQ", library, table + number * size) for number in range(count)]
    found = []
    for name, _, _, _, offset, length in headers:
        text = headers[names][4] + name
        if library[text : library.index(b"\0", text)] in _SECTIONS:
            found.append((offset, offset + length))
    return found


def _dotted(number: int) -> str:
    return f"{number // 10}.{number % 10}"
