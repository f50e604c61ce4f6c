"""BlobWriter: blocks in, in order; frames and a footer out, to any sink.

A block is stored as a zstd frame when that saves at least 1/16 of it, else as it is: less is not worth decompressing
for. Level 0 stores everything raw.

Invariants
- Memory: one block and its frame. Bytes leave in order, once; nothing is written twice.
- Equal chunk, block size, level and zstd library give equal bytes; any two blobs of a chunk decode to the same chunk.
- A block given with a crc64 is checked against it before it is stored: one that has changed since it was hashed is
  CorruptError, and the blob is never finished.

Owner: one thread a writer. A crash leaves an unfinished sink: frames without a footer, which no reader accepts.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from struct import Struct

import zstandard

from aof2.engine.blob.format import (
    BLOCK_BYTES,
    RAW_BYTES_MAX,
    BlobFooter,
    Codec,
    Frame,
    check_block_bytes,
    encode_footer,
    hole_frame,
    make_footer,
)
from aof2.engine.errors import CorruptError, LimitError
from aof2.native import crc64

LEVEL = 3
SAMPLED_FROM_BYTES = 128 << 10
SAMPLE_BYTES = 8 << 10
SAVED_SHIFT = 4
"""A zstd frame must be at least block >> SAVED_SHIFT bytes shorter than its block."""

Buffer = bytes | bytearray | memoryview
Sink = Callable[[Buffer], object]
"""Takes all of the next bytes before it returns: `write` of a buffered file, `bytearray.extend`."""


_PLACE = Struct("=QQ")
_kept = threading.local()


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """This thread's, for one whole frame after the other: to make one takes longer than to compress a small block."""
    kept: dict[int, zstandard.ZstdCompressor] = _kept.__dict__.setdefault("by_level", {})
    if level not in kept:
        kept[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
    return kept[level]


def shrinks(block: Buffer, level: int = LEVEL) -> bool:
    """Whether the block would be stored as a zstd frame."""
    return _is_worth_it(len(_compressor(level).compress(block)), memoryview(block).nbytes)


def _is_worth_it(packed: int, size: int) -> bool:
    return packed <= size - max(1, size >> SAVED_SHIFT)


def compress_all(raw: bytearray, lengths: Sequence[int], *, level: int = LEVEL) -> tuple[bytes, list[int]]:
    """Blocks that lie back to back as a zstd frame each, and the frames' lengths: one call, without the GIL. The length
    is 0 of a longer block that does not look as if it shrank: there is no frame of it."""
    starts = list(accumulate(lengths, initial=0))
    view = memoryview(raw)
    tried = [i for i, length in enumerate(lengths) if _may_shrink(view[starts[i] : starts[i] + length], level)]
    packed = [0] * len(lengths)
    if not tried:
        return b"", packed
    places = b"".join([_PLACE.pack(starts[i], lengths[i]) for i in tried])
    found = _compressor(level).multi_compress_to_buffer(zstandard.BufferWithSegments(raw, places))
    frames = [found[i].tobytes() for i in range(len(found))]
    for i, frame in zip(tried, frames, strict=True):
        packed[i] = len(frame)
    return b"".join(frames), packed


def _may_shrink(block: memoryview, level: int) -> bool:
    """Whether a few pieces of a block do; of a short one that is not asked."""
    if len(block) < SAMPLED_FROM_BYTES:
        return True
    last = len(block) - SAMPLE_BYTES
    return any(shrinks(block[at : at + SAMPLE_BYTES], level) for at in (0, last // 2, last))


class BlobWriter:
    """Writes the blob of one chunk to `sink`. `sha256`, if known, is trusted; else it is computed on the way."""

    def __init__(
        self,
        sink: Sink,
        *,
        chunk_id: int,
        generation: int,
        block_bytes: int = BLOCK_BYTES,
        level: int = LEVEL,
        sha256: bytes | None = None,
    ) -> None:
        if not check_block_bytes(block_bytes):
            raise ValueError(f"block_bytes is a power of two from 4 KiB to 64 MiB, not {block_bytes}")
        if sha256 is not None and len(sha256) != 32:
            raise ValueError(f"a SHA-256 has 32 bytes, not {len(sha256)}")
        self._sink = sink
        self._chunk_id = chunk_id
        self._generation = generation
        self._block_bytes = block_bytes
        self._known_sha256 = sha256
        self._hash = hashlib.sha256()
        self._zstd = _compressor(level) if level else None
        self._frames: list[Frame] = []
        self._raw_len = 0
        self._finished = False

    def add_block(self, block: Buffer, crc: int | None = None) -> Frame:
        """The next block: block_bytes long, or shorter and then the last. `crc`: the crc64 it must have."""
        size = memoryview(block).nbytes
        if self._finished or self._raw_len % self._block_bytes:
            raise ValueError("a block after the last one: only the last may be shorter")
        if not 0 < size <= self._block_bytes:
            raise ValueError(f"a block of {size} bytes, the blob's have {self._block_bytes}")
        if self._raw_len + size > RAW_BYTES_MAX:
            raise LimitError(f"a chunk holds at most {RAW_BYTES_MAX} bytes")
        found = crc64(block)
        if crc is not None and crc != found:
            index = len(self._frames)
            raise CorruptError(
                f"block {index} of chunk {self._chunk_id} has changed: crc64 {found:016x}, not {crc:016x}"
            )
        if self._known_sha256 is None:
            self._hash.update(block)
        stored, codec = self._store(block, size)
        self._sink(stored)
        return self._added(Frame(memoryview(stored).nbytes, codec, found), size)

    def add_hole(self, length: int) -> Frame:
        """The next block, all zeros: nothing of it is stored."""
        if self._finished or self._raw_len % self._block_bytes or not 0 < length <= self._block_bytes:
            raise ValueError(f"a hole of {length} bytes is no block here")
        if self._known_sha256 is None:
            self._hash.update(bytes(length))
        return self._added(hole_frame(length), length)

    def _added(self, frame: Frame, size: int) -> Frame:
        self._frames.append(frame)
        self._raw_len += size
        return frame

    def _store(self, block: Buffer, size: int) -> tuple[Buffer, Codec]:
        if self._zstd is not None:
            packed = self._zstd.compress(block)
            if _is_worth_it(len(packed), size):
                return packed, Codec.ZSTD
        return block, Codec.RAW

    def finish(self) -> BlobFooter:
        """Writes the footer; the blob is complete when the sink has it."""
        if self._finished:
            raise ValueError("the blob is finished")
        self._finished = True
        footer = make_footer(
            tuple(self._frames),
            chunk_id=self._chunk_id,
            generation=self._generation,
            block_bytes=self._block_bytes,
            raw_len=self._raw_len,
            sha256=self._known_sha256 or self._hash.digest(),
        )
        self._sink(encode_footer(footer))
        return footer
