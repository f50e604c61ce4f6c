"""Whether the bytes on this disk are those that were sealed: block by block, crc64, and SHA-256 where a chunk is whole.

Used by verify and by the background scrub.

Invariants
- One block is in memory at a time. Nothing is written.

Owner: blocking, for a worker thread. A crash leaves nothing.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from aof2 import native
from aof2.engine.blob.reader import BlobReader
from aof2.engine.catalog.rows import ChunkRow
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.local.hot import read_exactly
from aof2.engine.objects import full_mask
from aof2.engine.tiering.hashing import block_crc


class Checked(NamedTuple):
    """`bad` are the blocks that failed. `hash_failed`: every block's crc holds, the chunk's SHA-256 does not."""

    bad: int
    blocks: int
    bytes: int
    hash_failed: bool = False


def check_chunk(fd: int, chunk: ChunkRow, mask: int, *, chunk_bytes: int, block_bytes: int) -> Checked:
    """The resident blocks of one chunk of a backing file."""
    whole = mask == full_mask(chunk.length, block_bytes)
    digest = hashlib.sha256() if whole else None
    bad = blocks = size = 0
    for index in range(-(-chunk.length // block_bytes)):
        if not mask >> index & 1:
            continue
        at = index * block_bytes
        try:
            data = read_exactly(fd, chunk.index * chunk_bytes + at, min(block_bytes, chunk.length - at))
        except (CorruptError, OSError):  # the file is too short, or the disk fails
            data = None
        blocks += 1
        size += len(data or b"")
        if data is None or native.crc64(data) != block_crc(chunk.block_crcs, index):
            bad |= 1 << index
        elif digest is not None:
            digest.update(data)
    hash_failed = digest is not None and not bad and digest.digest() != chunk.sha256
    return Checked(bad, blocks, size, hash_failed)


def check_warm(path: Path, chunk: ChunkRow, stored_bytes: int) -> str:
    """What is wrong with a warm blob; "" when nothing is."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as e:
        return (e.strerror or "unreadable").lower()
    try:
        size = os.fstat(fd).st_size
        if size != stored_bytes:
            return f"{size} bytes, its row says {stored_bytes}"
        reader = BlobReader(lambda at, n: os.pread(fd, n, at), size, chunk_id=chunk.chunk_id, sha256=chunk.sha256)
        for _ in reader.blocks():
            pass
    except (CorruptError, UnsupportedError, OSError) as e:
        return str(e)
    finally:
        os.close(fd)
    return ""


def block_list(mask: int) -> str:
    """`0, 4, 9`, and how many more."""
    numbers = [i for i in range(mask.bit_length()) if mask >> i & 1]
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more
