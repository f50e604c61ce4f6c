"""Many small files in one call of the C core (`bulk.c`): hashed where they lie, read and compared, written as blobs,
made of what came.

Every call releases the GIL for all of its files together, and has let go of each buffer when it returns.

Owner: any thread. No file is changed here; a crash leaves those that `land_small` made.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Final, NamedTuple

from aof2.native import Buffer
from aof2.native._native import ffi, lib

_SMALL: Final = Struct("=QQQQQQii32s")
_PACK_ENTRY_LEN: Final = 88
_BLOB_FOOTER_LEN: Final = 120
_I32: Final = Struct("=i")
_unset: Final = ffi.new_allocator(should_clear_after_alloc=False)
SIDE_BY_SIDE_BYTES: Final = 8 << 20


class SmallStatus(IntEnum):
    """What came of a small file. A negative number beside these is an errno."""

    READ = 0
    BUSY = 1
    """A descriptor or a mapping can write to it."""
    CHANGED = 2
    """While it was read, or since its hash was taken."""
    OTHER = 3
    """Larger than was allowed, or not all of it data: it is looked at by itself."""


class SmallFile(NamedTuple):
    """A file as `hash_small` found it; `atime_ns`, as it was before. `fd` is the caller's to close; -1: none."""

    size: int
    inode: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int
    crc64: int
    fd: int
    status: int
    sha256: bytes
    piece_crcs: bytes = b""


def _names(paths: Sequence[str]) -> bytes:
    joined = "\0".join((*paths, ""))
    if joined.count("\0") != len(paths):
        raise ValueError("a path holds a zero byte")
    return os.fsencode(joined)


def hash_small(paths: Sequence[str], *, size_max: int, loose_max: int, piece_bytes: int = 0) -> list[SmallFile]:
    """Opens each file, hashes it while nothing can write to it, and begins to write it out.

    A file larger than `size_max`, with a hole, or with more than `loose_max` reserved beside its bytes is OTHER. With
    `piece_bytes`, the crc64 of each piece is told, too, 8 bytes each.
    """
    length = max(1, size_max, min(SIDE_BY_SIDE_BYTES, len(paths) * size_max))
    names, scratch = _names(paths), _unset("uint8_t[]", length)  # of which only what is read into is ever touched
    piece_len = piece_bytes or max(1, size_max)
    per_file = 8 * max(1, -(-size_max // piece_len))
    out, crcs = bytearray(len(paths) * _SMALL.size), bytearray(len(paths) * per_file)
    with ffi.from_buffer("uint8_t[]", out) as rows, ffi.from_buffer("uint8_t[]", crcs) as pieces:
        lib.aof2_small_hash(
            len(paths), names, loose_max, size_max, piece_len, scratch, length, ffi.cast("aof2_small *", rows),
            ffi.cast("uint64_t *", pieces),
        )  # fmt: skip
    make = SmallFile._make
    if not piece_bytes:
        return [make((*row, b"")) for row in _SMALL.iter_unpack(out)]
    return [
        make((*row, bytes(crcs[at : at + 8 * -(-row[0] // piece_bytes)])))
        for row, at in zip(_SMALL.iter_unpack(out), range(0, len(crcs), per_file), strict=True)
    ]


def close_all(fds: Sequence[int]) -> None:
    with ffi.from_buffer("int32_t[]", array("i", fds)) as numbers:
        lib.aof2_small_close(len(fds), numbers)


def disk_bytes(paths: Sequence[str]) -> list[int]:
    """What each file takes on the disk; 0 where there is none."""
    out = array("Q", bytes(8 * len(paths)))
    with ffi.from_buffer("uint64_t[]", out) as sizes:
        lib.aof2_small_disk(len(paths), _names(paths), sizes)
    return out.tolist()


def read_small(
    paths: Sequence[str], lengths: Sequence[int], crc64s: Sequence[int], sha256s: bytes
) -> tuple[bytearray, list[int]]:
    """The first `lengths[i]` bytes of each file, back to back, and a status each: READ, where they have the crc64 and
    the SHA-256 given."""
    names, out, status = _names(paths), bytearray(max(1, sum(lengths))), bytearray(len(paths) * _I32.size)
    if not len(paths) == len(lengths) == len(crc64s) == len(sha256s) // 32:
        raise ValueError(f"{len(paths)} paths need as many lengths, checksums and hashes")
    with (
        ffi.from_buffer("uint64_t[]", array("Q", lengths)) as length,
        ffi.from_buffer("uint64_t[]", array("Q", crc64s)) as crc,
        ffi.from_buffer("uint8_t[]", out) as buf,
        ffi.from_buffer("int32_t[]", status) as states,
    ):
        lib.aof2_small_read(len(paths), names, length, crc, sha256s, buf, len(out), states)
    return out, [number for (number,) in _I32.iter_unpack(status)]


def land_small(
    paths: Sequence[str],
    data: Buffer,
    offsets: Sequence[int],
    lengths: Sequence[int],
    crc64s: Sequence[int],
    sha256s: bytes,
    spares: Sequence[str] = (),
) -> tuple[list[SmallFile], int]:
    """A new file of each stretch of `data` that has the crc64 and the SHA-256 given; what was under its path goes. And
    how many of `spares`, empty files, were taken for that, from the first on.

    CHANGED: it has not, and there is no file; nor is there one where the status is an errno.
    """
    if not len(paths) == len(offsets) == len(lengths) == len(crc64s) == len(sha256s) // 32:
        raise ValueError(f"{len(paths)} paths need as many offsets, lengths, checksums and hashes")
    out = bytearray(len(paths) * _SMALL.size)
    with (
        ffi.from_buffer("uint8_t[]", data) as source,
        ffi.from_buffer("uint64_t[]", array("Q", offsets)) as offset,
        ffi.from_buffer("uint64_t[]", array("Q", lengths)) as length,
        ffi.from_buffer("uint64_t[]", array("Q", crc64s)) as crc,
        ffi.from_buffer("uint8_t[]", out) as rows,
    ):
        taken = lib.aof2_small_land(
            len(paths), _names(paths), source, len(source), offset, length, crc, sha256s, len(spares), _names(spares),
            ffi.cast("aof2_small *", rows),
        )  # fmt: skip
    return [SmallFile(*row) for row in _SMALL.iter_unpack(out)], int(taken)


def encode_pack(
    raw: Buffer,
    lengths: Sequence[int],
    *,
    chunk_ids: Sequence[int],
    generations: Sequence[int],
    crc64s: Sequence[int],
    sha256s: bytes,
    block_bytes: int,
    base: int,
    packed: Buffer = b"",
    packed_lengths: Sequence[int] = (),
    saved_shift: int = 0,
) -> tuple[bytearray, bytearray]:
    """Blobs of one block each, back to back, and their entries in a pack's directory, in which they start at `base`.

    `packed`: the blocks as zstd frames, back to back; one is stored where it saves length >> `saved_shift` bytes.
    """
    count = len(lengths)
    if not count == len(chunk_ids) == len(generations) == len(crc64s) == len(sha256s) // 32:
        raise ValueError(f"{count} blocks need as many of each column")
    if len(packed_lengths) not in (0, count) or sum(packed_lengths) != memoryview(packed).nbytes:
        raise ValueError("the frames are not those of the blocks")
    if sum(lengths) > memoryview(raw).nbytes:
        raise ValueError("the blocks are longer than their bytes")
    out, entries = bytearray(sum(lengths) + count * _BLOB_FOOTER_LEN), bytearray(count * _PACK_ENTRY_LEN)
    with (
        ffi.from_buffer(raw) as raw_view,
        ffi.from_buffer(packed) as packed_view,
        ffi.from_buffer("uint64_t[]", array("Q", lengths)) as length,
        ffi.from_buffer("uint64_t[]", array("Q", packed_lengths or [0] * count)) as packed_length,
        ffi.from_buffer("uint64_t[]", array("Q", chunk_ids)) as ids,
        ffi.from_buffer("uint64_t[]", array("Q", generations)) as generation,
        ffi.from_buffer("uint64_t[]", array("Q", crc64s)) as crc,
        ffi.from_buffer("uint8_t[]", out) as buf,
        ffi.from_buffer("uint8_t[]", entries) as rows,
    ):
        written = lib.aof2_pack_encode(
            count, raw_view, length, packed_view, packed_length, saved_shift, ids, generation, crc, sha256s,
            block_bytes, base, buf, len(out), rows,
        )  # fmt: skip
    if written < 0:
        raise ValueError(f"blocks are 1 to {block_bytes} bytes long")
    del out[written:]
    return out, entries
