"""Reads what a cubin was compiled for from its ELF header."""

from __future__ import annotations

import struct

_MACHINE_CUDA = 190


def capability_of(cubin: bytes) -> str:
    """The capability, such as `7.5`.

    The second byte of the ELF flags where the CUDA ABI is 8 (nvcc 13: 0x6004b04 is 75), the first byte in older ones.
    Raises ValueError for what is no cubin.
    """
    if cubin[:4] != b"\x7fELF" or struct.unpack_from("<H", cubin, 18)[0] != _MACHINE_CUDA:
        raise ValueError("not a cubin")
    flags = struct.unpack_from("<I", cubin, 48)[0]
    number = (flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF
    return f"{number // 10}.{number % 10}"
