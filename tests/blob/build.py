"""Blobs by hand, with struct, hashlib and zstandard only, and a crc64-nvme of ten lines."""

from __future__ import annotations

import hashlib
import random
import struct

import zstandard

from aof2.engine.blob.format import BLOCK_BYTES
from aof2.engine.blob.reader import BlobReader
from aof2.engine.blob.writer import LEVEL, BlobWriter

_POLY = 0x9A6C9329AC4BC9B5  # 0xAD93D23594C93659 reflected
_TABLE = []
for _n in range(256):
    for _ in range(8):
        _n = _n >> 1 ^ (_POLY if _n & 1 else 0)
    _TABLE.append(_n)


def slow_crc64(data: bytes) -> int:
    crc = 2**64 - 1
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ (2**64 - 1)


def trailer(
    entries: bytes,
    raw: bytes,
    *,
    magic: int = 0x414F4632424C4F42,
    version: int = 1,
    footer_len: int | None = None,
    frame_count: int | None = None,
    block_bytes: int = 4096,
    raw_len: int | None = None,
    chunk_id: int = 7,
    generation: int = 3,
    sha256: bytes | None = None,
    raw_crc64: int | None = None,
    flags: int = 0,
    footer_crc64: int | None = None,
) -> bytes:
    """Any trailer, lying where told to; its crc64 is right unless given."""
    head = struct.pack(
        "<QIIIIQQQ32sQQ",
        magic,
        version,
        len(entries) + 104 if footer_len is None else footer_len,
        len(entries) // 16 if frame_count is None else frame_count,
        block_bytes,
        len(raw) if raw_len is None else raw_len,
        chunk_id,
        generation,
        hashlib.sha256(raw).digest() if sha256 is None else sha256,
        slow_crc64(raw) if raw_crc64 is None else raw_crc64,
        flags,
    )
    return head + struct.pack("<Q", slow_crc64(entries + head) if footer_crc64 is None else footer_crc64)


def entry(block: bytes, stored: bytes, codec: int) -> bytes:
    return struct.pack("<IIQ", len(stored), codec, slow_crc64(block))


def mixed(size: int, seed: int = 1, run: int = 4096) -> bytes:
    """Runs of `run` bytes, compressible and not in turn."""
    rng = random.Random(seed)
    out = bytearray()
    while len(out) < size:
        out += ((b"row %d," % rng.randrange(9)) * run)[:run] + rng.randbytes(run)
    return bytes(out[:size])


def zstd(data: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def encode_blob(
    raw: bytes | bytearray, *, chunk_id: int, generation: int, block_bytes: int = BLOCK_BYTES, level: int = LEVEL
) -> bytes:
    """The whole blob of `raw` in memory."""
    out = bytearray()
    writer = BlobWriter(out.extend, chunk_id=chunk_id, generation=generation, block_bytes=block_bytes, level=level)
    view = memoryview(raw)
    for start in range(0, len(view), block_bytes):
        writer.add_block(view[start : start + block_bytes])
    writer.finish()
    return bytes(out)


def read_all(reader: BlobReader) -> bytes:
    return b"".join(reader.blocks())
