"""Hashing an object when it is sealed: a crc64 for each block, crc64 and SHA-256 for each chunk, SHA-256 for the whole.

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


class ChunkDigest(NamedTuple):
    length: int
    sha256: bytes
    crc64: int
    block_crcs: bytes


class ObjectDigest(NamedTuple):
    size: int
    sha256: bytes
    chunks: tuple[ChunkDigest, ...]


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
    crc64 = 0
    crcs = bytearray()
    step = max(block_bytes, READ_BYTES // block_bytes * block_bytes)
    for at in range(start, start + length, step):
        data = memoryview(read_exactly(fd, at, min(step, start + length - at), path=path))
        sha.update(data)
        if whole is not None:
            whole.update(data)
        for pos in range(0, len(data), block_bytes):
            block = data[pos : pos + block_bytes]
            crc = native.crc64(block)
            crcs += crc.to_bytes(CRC_LEN, "little")
            crc64 = native.crc64_combine(crc64, crc, len(block)) if at + pos > start else crc
    return ChunkDigest(length, sha.digest(), crc64, bytes(crcs))


def digest_chunk(data: memoryview, *, block_bytes: int) -> ChunkDigest:
    """Of a chunk in memory."""
    crc64 = 0
    crcs = bytearray()
    for at in range(0, len(data), block_bytes):
        block = data[at : at + block_bytes]
        crc = native.crc64(block)
        crcs += crc.to_bytes(CRC_LEN, "little")
        crc64 = native.crc64_combine(crc64, crc, len(block)) if at else crc
    return ChunkDigest(len(data), hashlib.sha256(data).digest(), crc64, bytes(crcs))


def block_crc(block_crcs: bytes, index: int) -> int:
    return int.from_bytes(block_crcs[index * CRC_LEN : (index + 1) * CRC_LEN], "little")
