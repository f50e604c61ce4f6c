"""Hashing an object when it is sealed: a crc64 for each piece, block and chunk, SHA-256 for each chunk and the whole.

A piece is 64 KiB, what a glance at a cold file fetches. Blocks and chunks are made of pieces: their checksums are
combined from those, the bytes are looked at once.

Reads the file once, in blocks, with pread: a file that is cut meanwhile is an error, not a SIGBUS.

Owner: pure; blocking, made for a worker thread (both hashes let go of the GIL).
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from aof2 import native
from aof2.engine.local.hot import read_exactly

READ_BYTES: Final = 4 << 20
CRC_LEN: Final = 8
PIECE_BYTES: Final = 64 << 10
PIECES_WORTH_BYTES: Final = 4 * PIECE_BYTES


class ChunkDigest(NamedTuple):
    """`piece_crcs` is empty where a chunk is so short that nobody gains by fetching less than its block."""

    length: int
    sha256: bytes
    crc64: int
    block_crcs: bytes
    piece_crcs: bytes = b""


class ObjectDigest(NamedTuple):
    size: int
    sha256: bytes
    chunks: tuple[ChunkDigest, ...]


class _Sums:
    """The checksums of one chunk, block after block."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._step = min(PIECE_BYTES, block_bytes)
        self._blocks = bytearray()
        self._pieces = bytearray()
        self._length = 0
        self._crc64 = 0

    def add(self, data: memoryview) -> None:
        """Whole blocks, but for the chunk's last."""
        for at in range(0, len(data), self._block_bytes):
            self._add_block(data[at : at + self._block_bytes])

    def _add_block(self, block: memoryview) -> None:
        crc = 0
        for at in range(0, len(block), self._step):
            piece = block[at : at + self._step]
            piece_crc = native.crc64(piece)
            self._pieces += piece_crc.to_bytes(CRC_LEN, "little")
            crc = native.crc64_combine(crc, piece_crc, len(piece)) if at else piece_crc
        self._blocks += crc.to_bytes(CRC_LEN, "little")
        self._crc64 = native.crc64_combine(self._crc64, crc, len(block)) if self._length else crc
        self._length += len(block)

    def digest(self, sha256: bytes) -> ChunkDigest:
        pieces = bytes(self._pieces) if self._step == PIECE_BYTES and self._length > PIECES_WORTH_BYTES else b""
        return ChunkDigest(self._length, sha256, self._crc64, bytes(self._blocks), pieces)


def digest_file(fd: int, size: int, *, chunk_bytes: int, block_bytes: int, path: str = "") -> ObjectDigest:
    whole = hashlib.sha256()
    chunks: list[ChunkDigest] = []
    single = size <= chunk_bytes
    for start in range(0, size, chunk_bytes):
        length = min(chunk_bytes, size - start)
        chunk = digest_range(fd, start, length, block_bytes, None if single else whole, path)
        chunks.append(chunk)
    # A one-chunk object is its chunk: hashing it once is enough.
    sha256 = chunks[0].sha256 if single and chunks else whole.digest()
    return ObjectDigest(size, sha256, tuple(chunks))


def digest_range(
    fd: int, start: int, length: int, block_bytes: int, whole: hashlib._Hash | None, path: str
) -> ChunkDigest:
    """Of a chunk in a file; `whole` goes on with its bytes."""
    sha = hashlib.sha256()
    sums = _Sums(block_bytes)
    step = max(block_bytes, READ_BYTES // block_bytes * block_bytes)
    for at in range(start, start + length, step):
        data = memoryview(read_exactly(fd, at, min(step, start + length - at), path=path))
        sha.update(data)
        if whole is not None:
            whole.update(data)
        sums.add(data)
    return sums.digest(sha.digest())


def digest_chunk(data: memoryview, *, block_bytes: int) -> ChunkDigest:
    """Of a chunk in memory."""
    sums = _Sums(block_bytes)
    sums.add(data)
    return sums.digest(hashlib.sha256(data).digest())


def block_crc(block_crcs: bytes, index: int) -> int:
    return int.from_bytes(block_crcs[index * CRC_LEN : (index + 1) * CRC_LEN], "little")
