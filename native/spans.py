"""Stretches of a file hashed side by side (`sha256.c`): a crc64 of each of their pieces, and their SHA-256.

Owner: any thread; a `Spans` is its caller's alone. A file that is cut meanwhile is OSError ENODATA.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

from aof2.native._native import ffi, lib

SPANS_MAX: Final = 16
_STATE_WORDS: Final = 8
_HASH_LEN: Final = 32
_unset: Final = ffi.new_allocator(should_clear_after_alloc=False)


def sha256_lanes() -> int:
    """How many messages are hashed in the time of one; 1 where the CPU gains nothing by that."""
    return int(lib.aof2_sha256_lanes())


def sha256_many(messages: Sequence[bytes], *, lanes: int = 0) -> list[bytes]:
    """The hash of each. `lanes`: 1 is one after the other, for tests; 0 what is best here."""
    lengths = [len(message) for message in messages]
    starts = array("Q", [0])
    for length in lengths:
        starts.append(starts[-1] + length)
    out = bytearray(_HASH_LEN * len(messages))
    with (
        ffi.from_buffer("uint64_t[]", starts) as offset,
        ffi.from_buffer("uint64_t[]", array("Q", lengths)) as length,
        ffi.from_buffer("uint8_t[]", out) as hashes,
    ):
        lib.aof2_sha256_many_by(lanes or sha256_lanes(), len(messages), b"".join(messages), offset, length, hashes)
    return _cut(out)


class SpanDigest(NamedTuple):
    """Of one stretch: its hash, and the crc64 of each piece, 8 bytes each, little-endian."""

    sha256: bytes
    piece_crcs: bytes


class Spans:
    """Stretches of one length, at most SPANS_MAX of them, that begin at `offsets`; `go_on` until all of it is done."""

    def __init__(
        self, fd: int, offsets: Sequence[int], length: int, *, piece_bytes: int, step_bytes: int, lanes: int = 0
    ) -> None:
        if not 0 < len(offsets) <= SPANS_MAX or length % step_bytes or step_bytes % piece_bytes:
            raise ValueError(f"{len(offsets)} stretches of {length} bytes cannot be hashed by {step_bytes}")
        self.left = length
        self._fd = fd
        self._offsets = list(offsets)
        self._length = length
        self._piece_bytes = piece_bytes
        self._step_bytes = step_bytes
        self._lanes = lanes or sha256_lanes()
        self._scratch_len = piece_bytes * len(offsets)
        self._scratch = _unset("uint8_t[]", self._scratch_len)
        self._state = ffi.new("uint32_t[]", _STATE_WORDS * len(offsets))
        self._crcs = [bytearray() for _ in offsets]
        lib.aof2_sha256_begin(len(offsets), self._state)

    def go_on(self) -> None:
        """The next `step_bytes` of each stretch."""
        count, per = len(self._offsets), self._step_bytes // self._piece_bytes
        crcs = array("Q", bytes(8 * count * per))
        done = self._length - self.left
        with (
            ffi.from_buffer("uint64_t[]", array("Q", [offset + done for offset in self._offsets])) as offset,
            ffi.from_buffer("uint64_t[]", crcs) as found,
        ):
            error = lib.aof2_spans_hash(
                self._lanes, self._fd, count, offset, self._step_bytes, self._piece_bytes, self._scratch,
                self._scratch_len, self._state, found,
            )  # fmt: skip
        if error:
            raise OSError(error, os.strerror(error))
        packed = crcs.tobytes()
        for i, kept in enumerate(self._crcs):
            kept += packed[8 * per * i : 8 * per * (i + 1)]
        self.left -= self._step_bytes

    def digests(self) -> list[SpanDigest]:
        """When nothing is left."""
        if self.left:
            raise ValueError(f"{self.left} bytes of each stretch are not hashed yet")
        out = bytearray(_HASH_LEN * len(self._offsets))
        with ffi.from_buffer("uint8_t[]", out) as hashes:
            lib.aof2_sha256_end(len(self._offsets), self._state, self._length, hashes)
        return [SpanDigest(sha256, bytes(crcs)) for sha256, crcs in zip(_cut(out), self._crcs, strict=True)]


def _cut(hashes: bytearray) -> list[bytes]:
    return [bytes(hashes[at : at + _HASH_LEN]) for at in range(0, len(hashes), _HASH_LEN)]
