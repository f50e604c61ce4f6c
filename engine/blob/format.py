"""The remote and warm artifact of one chunk: its blocks as frames from byte 0, then a footer that proves each of them.

    frames     one a block, back to back: the block itself, or one zstd frame of it
    entries    frame_count × 16 bytes: u32 stored_len · u32 codec (0 raw, 1 zstd, 2 hole) · u64 raw_crc64 of the block
    trailer    104 bytes, the last of the blob:
       0  u64 magic 0x414F4632424C4F42 ("AOF2BLOB" read as a big-endian number; the file shows "BOLB2FOA")
       8  u32 version = 1            12  u32 footer_len (entries + trailer)
      16  u32 frame_count            20  u32 block_bytes
      24  u64 raw_len                32  u64 chunk_id
      40  u64 generation             48  u8[32] sha256 of the raw chunk
      80  u64 raw_crc64 of the chunk 88  u64 flags = 0
      96  u64 footer_crc64 over the entries and the trailer's bytes before it

Little-endian, packed; crc64 is crc64-nvme. Every block is block_bytes long but the last; a chunk of 0 bytes has no
frames. A blob of raw frames starts with exactly the chunk.

Invariants
- decode_footer returns only what adds up: every length bounded by the blob's, the frames end where the footer starts,
  frame_count is what raw_len needs, the chunk's crc64 is the combination of the blocks'.
- No frame is longer than its block, and a raw one is exactly as long. A hole's is empty, and its block all zeros: its
  crc64 is that of so many.
- Nothing is allocated for a length before it is known to be below the size of the blob.

Versions. Blobs are immutable and named by the hash of their content: a newer version is for new uploads only, old blobs
stay readable and are never rewritten. Every version keeps a trailer of 104 bytes with magic, version, footer_len and
footer_crc64 where they are, so an old reader tells a newer blob (UnsupportedError: upgrade) from a damaged one
(CorruptError). Unknown flags and codecs under a valid crc are UnsupportedError too.

Owner: pure functions, any thread. A crash leaves nothing here.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import cache
from itertools import accumulate

import msgspec

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.native import crc64, crc64_combine

MAGIC = 0x414F4632424C4F42
VERSION = 1
ENTRY = struct.Struct("<IIQ")
TRAILER = struct.Struct("<QIIIIQQQ32sQQQ")
FOOTER_CRC = struct.Struct("<Q")
BLOCK_BYTES = 1 << 20
BLOCK_BYTES_MIN = 4 << 10
BLOCK_BYTES_MAX = 64 << 20
RAW_BYTES_MAX = 64 << 30
FOOTER_GUESS = 4096
"""A tail this long holds the footer of up to 249 frames: one read for a 64 MiB chunk of 1 MiB blocks."""

_TRAILER_HEAD = struct.Struct("<QII")
_ZEROS = bytes(1 << 20)


class Codec(IntEnum):
    """Written to disk. Never renumber."""

    RAW = 0
    ZSTD = 1
    HOLE = 2


class Frame(msgspec.Struct, frozen=True):
    """One block as stored."""

    stored_len: int
    codec: Codec
    raw_crc64: int


@cache
def zeros_crc64(length: int) -> int:
    """Of so many zeros. There are few such numbers: of pieces, of blocks, of last ones."""
    crc = 0
    for at in range(0, length, len(_ZEROS)):
        crc = crc64(memoryview(_ZEROS)[: min(len(_ZEROS), length - at)], crc)
    return crc


def hole_frame(block_len: int) -> Frame:
    return Frame(0, Codec.HOLE, zeros_crc64(block_len))


class BlobFooter(msgspec.Struct, frozen=True):
    """What a blob says of itself, checked. Frame i fills the blob's bytes starts[i] to starts[i + 1]."""

    chunk_id: int
    generation: int
    block_bytes: int
    raw_len: int
    sha256: bytes
    raw_crc64: int
    frames: tuple[Frame, ...]
    starts: tuple[int, ...]

    @property
    def frame_count(self) -> int:
        return len(self.frames)

    @property
    def blob_len(self) -> int:
        return self.starts[-1] + footer_len(len(self.frames))

    def frame_range(self, index: int) -> tuple[int, int]:
        """(offset, length) in the blob of one block's frame: what one range GET fetches."""
        return self.frames_range(index, index)

    def frames_range(self, first: int, last: int) -> tuple[int, int]:
        """(offset, length) of the frames first to last, both included."""
        self._check_index(first)
        self._check_index(last)
        return self.starts[first], self.starts[last + 1] - self.starts[first]

    def raw_range(self, index: int) -> tuple[int, int]:
        """(offset, length) in the chunk of one block."""
        self._check_index(index)
        return index * self.block_bytes, min(self.block_bytes, self.raw_len - index * self.block_bytes)

    def _check_index(self, index: int) -> None:
        if not 0 <= index < len(self.frames):
            raise IndexError(f"block {index} of a chunk of {len(self.frames)}")


def footer_len(frame_count: int) -> int:
    return frame_count * ENTRY.size + TRAILER.size


def check_block_bytes(block_bytes: int) -> bool:
    return BLOCK_BYTES_MIN <= block_bytes <= BLOCK_BYTES_MAX and block_bytes & (block_bytes - 1) == 0


def make_footer(
    frames: tuple[Frame, ...], *, chunk_id: int, generation: int, block_bytes: int, raw_len: int, sha256: bytes
) -> BlobFooter:
    """With the chunk's crc64 and the starts of its frames, which follow from them."""
    crc = 0
    for i, frame in enumerate(frames):
        crc = crc64_combine(crc, frame.raw_crc64, min(block_bytes, raw_len - i * block_bytes))
    return BlobFooter(
        chunk_id=chunk_id,
        generation=generation,
        block_bytes=block_bytes,
        raw_len=raw_len,
        sha256=sha256,
        raw_crc64=crc,
        frames=frames,
        starts=tuple(accumulate((f.stored_len for f in frames), initial=0)),
    )


def encode_footer(footer: BlobFooter) -> bytes:
    out = bytearray()
    for frame in footer.frames:
        out += ENTRY.pack(frame.stored_len, frame.codec, frame.raw_crc64)
    out += TRAILER.pack(
        MAGIC,
        VERSION,
        footer_len(footer.frame_count),
        footer.frame_count,
        footer.block_bytes,
        footer.raw_len,
        footer.chunk_id,
        footer.generation,
        footer.sha256,
        footer.raw_crc64,
        0,
        0,
    )
    FOOTER_CRC.pack_into(out, len(out) - FOOTER_CRC.size, crc64(memoryview(out)[: -FOOTER_CRC.size]))
    return bytes(out)


def needed_tail(tail: bytes, blob_len: int, *, path: str = "") -> int:
    """How many bytes of the blob's end decode_footer needs, told by its last 104. CorruptError when that cannot be."""
    if blob_len < TRAILER.size or len(tail) < TRAILER.size:
        raise CorruptError(f"a blob of {blob_len} bytes has no whole footer", path=path)
    at = blob_len - TRAILER.size
    magic, version, length = _TRAILER_HEAD.unpack_from(tail, len(tail) - TRAILER.size)
    if magic != MAGIC:
        raise CorruptError(f"not a blob: trailer magic {magic:#018x}", path=path, offset=at)
    if version == 0:
        raise CorruptError("blob version 0", path=path, offset=at + 8)
    if not TRAILER.size <= length <= blob_len:
        raise CorruptError(f"blob footer of {length} bytes in {blob_len}", path=path, offset=at + 12)
    return int(length)


def decode_footer(tail: bytes, blob_len: int, *, path: str = "") -> BlobFooter:
    """The footer at the end of `tail`, which is the end of a blob of `blob_len` bytes. Give at least `needed_tail`."""
    length = needed_tail(tail, blob_len, path=path)
    if len(tail) < length:
        raise ValueError(f"the footer is {length} bytes long, the tail given {len(tail)}")
    start = blob_len - length
    view = memoryview(tail)[len(tail) - length :]
    (_, version, _, frame_count, block_bytes, raw_len, chunk_id, generation, sha256, raw_crc64, flags, footer_crc64) = (
        TRAILER.unpack_from(view, length - TRAILER.size)
    )

    def corrupt(what: str) -> CorruptError:
        return CorruptError(f"blob footer: {what}", path=path, offset=start)

    if crc64(view[: -FOOTER_CRC.size]) != footer_crc64:
        raise corrupt("crc64 mismatch")
    if version != VERSION:
        raise UnsupportedError(f"blob version {version}", path=path)
    if flags:
        raise UnsupportedError(f"blob flags {flags:#x}", path=path)
    if not check_block_bytes(block_bytes):
        raise corrupt(f"block_bytes {block_bytes}")
    if raw_len > RAW_BYTES_MAX or frame_count != -(-raw_len // block_bytes):
        raise corrupt(f"{frame_count} frames for {raw_len} bytes in blocks of {block_bytes}")
    if length != footer_len(frame_count):
        raise corrupt(f"footer_len {length} with {frame_count} frames")
    frames = []
    for i, (stored_len, codec, crc) in enumerate(ENTRY.iter_unpack(view[: -TRAILER.size])):
        if codec not in (Codec.RAW, Codec.ZSTD, Codec.HOLE):
            raise UnsupportedError(f"blob codec {codec} in frame {i}", path=path)
        block = min(block_bytes, raw_len - i * block_bytes)
        if codec == Codec.HOLE and (stored_len or crc != zeros_crc64(block)):
            raise corrupt(f"frame {i} is a hole of {stored_len} bytes, or not one of zeros")
        if codec != Codec.HOLE and (not 0 < stored_len <= block or (codec == Codec.RAW and stored_len != block)):
            raise corrupt(f"frame {i} stores {block} bytes as {stored_len}, codec {codec}")
        frames.append(Frame(stored_len, Codec(codec), crc))
    footer = make_footer(
        tuple(frames),
        chunk_id=chunk_id,
        generation=generation,
        block_bytes=block_bytes,
        raw_len=raw_len,
        sha256=sha256,
    )
    if footer.starts[-1] != start:
        raise corrupt(f"frames of {footer.starts[-1]} bytes before a footer at {start}")
    if footer.raw_crc64 != raw_crc64:
        raise corrupt("the chunk's crc64 is not that of its blocks")
    return footer
