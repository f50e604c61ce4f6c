"""BlobReader: any block of a chunk from one read of its blob. Only verified bytes leave this module.

Invariants
- A block is returned only when its length and crc64 are those of the footer, whose own crc64 was checked before. The
  whole chunk is returned only when its SHA-256 is the footer's as well.
- A hostile zstd frame costs no more memory than its block: the content size it claims must be the block's length
  before anything is decompressed, and its window no larger than a block.
- A blob of another chunk or generation than expected is CorruptError, whatever it holds.

Owner: any thread; a reader keeps no state but its footer. `pread` may be called from several threads at once if the
callers do so. A crash leaves nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Final

import zstandard

from aof2.engine.blob.format import (
    FOOTER_GUESS,
    BlobFooter,
    Codec,
    decode_footer,
    needed_tail,
)
from aof2.engine.errors import CorruptError
from aof2.native import crc64

READ_BYTES: Final = 8 << 20
"""Frames that `blocks` asks for at once."""

Buffer = bytes | bytearray | memoryview
Pread = Callable[[int, int], bytes]
"""(offset, length) → exactly those bytes of the blob."""


def decode_frame(footer: BlobFooter, index: int, stored: Buffer, *, path: str = "") -> bytes:
    """The block whose frame is `stored`, or CorruptError. The bytes returned are the block's own."""
    offset, stored_len = footer.frame_range(index)
    _, block_len = footer.raw_range(index)
    frame = footer.frames[index]

    def corrupt(what: str) -> CorruptError:
        return CorruptError(f"block {index} of chunk {footer.chunk_id}: {what}", path=path, offset=offset)

    data = bytes(stored)
    if len(data) != stored_len:
        raise corrupt(f"{len(data)} bytes of a frame of {stored_len}")
    if frame.codec is Codec.HOLE:
        return bytes(block_len)
    if frame.codec is Codec.ZSTD:
        try:
            # zstandard allocates what the frame claims, not max_output_size: ask before decompressing.
            claims = zstandard.get_frame_parameters(data)
            if claims.content_size != block_len or claims.window_size > footer.block_bytes:
                size, window = claims.content_size, claims.window_size
                raise corrupt(f"its zstd frame claims {size} bytes (window {window}), the block has {block_len}")
            unpack = zstandard.ZstdDecompressor(max_window_size=footer.block_bytes)
            data = unpack.decompress(data, max_output_size=block_len, allow_extra_data=False)
        except zstandard.ZstdError as e:
            raise corrupt(f"its zstd frame does not decompress ({e})") from None
    if len(data) != block_len:
        raise corrupt(f"{len(data)} bytes, the block has {block_len}")
    if crc64(data) != frame.raw_crc64:
        raise corrupt("crc64 mismatch")
    return data


def decode_frames(footer: BlobFooter, first: int, count: int, stored: Buffer, *, path: str = "") -> Iterator[bytes]:
    """Blocks first … first + count − 1, whose frames are `stored`."""
    start, _ = footer.frames_range(first, first + count - 1)
    view = memoryview(stored)
    for index in range(first, first + count):
        at, length = footer.frame_range(index)
        yield decode_frame(footer, index, view[at - start : at - start + length], path=path)


def read_footer(pread: Pread, blob_len: int, *, path: str = "") -> BlobFooter:
    """The checked footer: one read, a second only for more frames than FOOTER_GUESS holds."""
    guess = min(FOOTER_GUESS, blob_len)
    tail = _exactly(pread, blob_len - guess, guess, path)
    need = needed_tail(tail, blob_len, path=path)
    if need > guess:
        tail = _exactly(pread, blob_len - need, need, path)
    return decode_footer(tail, blob_len, path=path)


def _exactly(pread: Pread, offset: int, length: int, path: str) -> bytes:
    data = pread(offset, length) if length else b""  # of holes there is nothing to read
    if len(data) != length:
        raise CorruptError(f"blob gave {len(data)} of {length} bytes", path=path, offset=offset)
    return data


class BlobReader:
    """Reads one blob of `blob_len` bytes through `pread`. What is expected of it, if given, is checked at once."""

    def __init__(
        self,
        pread: Pread,
        blob_len: int,
        *,
        chunk_id: int | None = None,
        generation: int | None = None,
        sha256: bytes | None = None,
        path: str = "",
    ) -> None:
        self._pread = pread
        self.path = path
        self.footer = read_footer(pread, blob_len, path=path)
        check_identity(self.footer, chunk_id=chunk_id, generation=generation, sha256=sha256, path=path)

    def read_block(self, index: int) -> bytes:
        offset, length = self.footer.frame_range(index)
        return decode_frame(self.footer, index, _exactly(self._pread, offset, length, self.path), path=self.path)

    def blocks(self) -> Iterator[bytes]:
        """Every block in order, each verified; behind the last one the SHA-256 is, or CorruptError comes then."""
        footer, digest = self.footer, hashlib.sha256()
        step = max(1, READ_BYTES // footer.block_bytes)
        for first in range(0, footer.frame_count, step):
            count = min(step, footer.frame_count - first)
            stored = _exactly(self._pread, *footer.frames_range(first, first + count - 1), self.path)
            for block in decode_frames(footer, first, count, stored, path=self.path):
                digest.update(block)
                yield block
        if digest.digest() != footer.sha256:
            found, said = digest.hexdigest(), footer.sha256.hex()
            raise CorruptError(f"chunk {footer.chunk_id} hashes to {found}, its blob says {said}", path=self.path)


def check_identity(
    footer: BlobFooter,
    *,
    chunk_id: int | None = None,
    generation: int | None = None,
    sha256: bytes | None = None,
    path: str = "",
) -> None:
    """CorruptError, naming both, when the blob is not the one expected."""
    expected = {"chunk": chunk_id, "generation": generation, "sha256": sha256 and sha256.hex()}
    found = {"chunk": footer.chunk_id, "generation": footer.generation, "sha256": footer.sha256.hex()}
    wrong = [name for name, value in expected.items() if value is not None and value != found[name]]
    if wrong:
        is_, want = (" ".join(f"{name} {of[name]}" for name in wrong) for of in (found, expected))
        raise CorruptError(f"another blob: it is {is_}, expected {want}", path=path)
