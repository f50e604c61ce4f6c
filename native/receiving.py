"""Bytes from a socket into a file, checksummed on the way (`receive.c`).

Owner: any thread. A crash leaves in the file what had come.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from aof2.native._native import ffi, lib
from aof2.native.checksums import crc64


class Ending(IntEnum):
    """How receiving ended."""

    ALL = 0
    """Everything came and is in the file."""
    ENDED = 1
    """The peer closed."""
    SILENT = 2
    """Nothing came for as long as was allowed."""
    SOCKET = 3
    """The socket failed, by `error`."""
    FILE = 4
    """The file failed, by `error`."""


class Received(NamedTuple):
    """What came of `receive`: the first `done` bytes are in the file, and in the checksums of their pieces."""

    ending: Ending
    done: int
    crc64s: list[int]
    error: int


def receive(
    sock: int,
    file: int,
    offset: int,
    length: int,
    scratch: bytearray,
    *,
    timeout_s: float,
    piece_bytes: int,
    begun: bytes = b"",
) -> Received:
    """Takes `length` bytes off a socket and writes them to a file, each piece checksummed on the way.

    `begun` is what was there before of the first piece.
    """
    if not 0 <= len(begun) < piece_bytes:
        raise ValueError(f"begun: {len(begun)} bytes of a piece of {piece_bytes}")
    crcs = ffi.new("uint64_t[]", max(1, -(-(len(begun) + length) // piece_bytes)))
    crcs[0] = crc64(begun)
    done, error = ffi.new("uint64_t *"), ffi.new("int *")
    with ffi.from_buffer("uint8_t[]", scratch, require_writable=True) as buf:
        if not len(buf):
            raise ValueError("scratch: must have room for a byte")
        timeout_ms = min(max(0, round(timeout_s * 1000)), 2**31 - 1)
        ending = lib.aof2_receive(
            sock, file, offset, length, piece_bytes, len(begun), buf, len(buf), timeout_ms, crcs, done, error
        )
    return Received(Ending(ending), int(done[0]), list(crcs), int(error[0]))
