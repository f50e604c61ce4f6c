"""crc64-nvme and CRC-32 (`crc.c`, `crc_x86.c`).

Owner: any thread; no state.
"""

from __future__ import annotations

from typing import Final

from aof2.native._native import ffi, lib
from aof2.native.columns import Buffer

_IMPLEMENTATIONS: Final = ("portable", "pclmul", "vpclmul")


def crc64(data: Buffer, crc: int = 0) -> int:
    """crc64-nvme of `data`, going on from `crc`."""
    result: int
    if type(data) is bytes:  # cffi passes these straight on: half the cost of a short call
        result = lib.aof2_crc64(crc, data, len(data))
        return result
    with ffi.from_buffer(data) as view:
        result = lib.aof2_crc64(crc, view, len(view))
    return result


def crc32(data: Buffer, crc: int = 0) -> int:
    """CRC-32 (IEEE, zlib's) of `data`, going on from `crc`."""
    result: int
    if type(data) is bytes:  # cffi passes these straight on: half the cost of a short call
        result = lib.aof2_crc32(crc, data, len(data))
        return result
    with ffi.from_buffer(data) as view:
        result = lib.aof2_crc32(crc, view, len(view))
    return result


def crc64_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """crc64 of A followed by B, from those of A and B and B's length."""
    return int(lib.aof2_crc64_combine(crc_a, crc_b, len_b))


def crc32_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """crc32 of A followed by B, from those of A and B and B's length."""
    return int(lib.aof2_crc32_combine(crc_a, crc_b, len_b))


def crc_implementations() -> tuple[str, ...]:
    """The checksum kernels this CPU can run, best last."""
    return _IMPLEMENTATIONS[: lib.aof2_crc_impl_best() + 1]


def crc64_with(name: str, data: Buffer, crc: int = 0) -> int:
    """crc64 by one named kernel, for tests and benchmarks."""
    with ffi.from_buffer(data) as view:
        return int(lib.aof2_crc64_with(_implementation(name), crc, view, len(view)))


def crc32_with(name: str, data: Buffer, crc: int = 0) -> int:
    """crc32 by one named kernel, for tests and benchmarks."""
    with ffi.from_buffer(data) as view:
        return int(lib.aof2_crc32_with(_implementation(name), crc, view, len(view)))


def _implementation(name: str) -> int:
    available = crc_implementations()
    if name not in available:
        raise ValueError(f"no checksum kernel {name!r} on this CPU; it has {', '.join(available)}")
    return available.index(name)
