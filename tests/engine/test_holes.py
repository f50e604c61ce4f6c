"""What is known of a file's holes, and its hashes without reading them, against reading every byte."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2 import native
from aof2.engine.catalog.rows import HashKind
from aof2.engine.files.extents import whole_blocks
from aof2.engine.local.sparse import counted_bytes, map_data
from aof2.engine.objects import digest_disk_bytes
from aof2.engine.tiering import hashing
from aof2.engine.tiering.hashing import Hasher, HashingCancelledError, block_crc, digest_chunk
from tests.engine.helpers import KIB

BLOCK = 16 * KIB
CHUNK = 4 * BLOCK


def sparse_file(path: Path, size: int, writes: list[tuple[int, int]]) -> bytes:
    """Some bytes here and there; what a reader sees."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        os.ftruncate(fd, size)
        for offset, length in writes:
            if offset < size:
                os.pwrite(fd, b"x" * min(length, size - offset), offset)
        os.fsync(fd)
    finally:
        os.close(fd)
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 6 * CHUNK + 100),
    st.lists(st.tuples(st.integers(0, 6 * CHUNK), st.integers(1, 3 * BLOCK)), max_size=5),
)
def test_as_if_every_byte_had_been_read(
    tmp_path_factory: pytest.TempPathFactory, size: int, writes: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "sparse"
    seen = memoryview(sparse_file(path, size, writes))
    fd = os.open(path, os.O_RDONLY)
    try:
        found = map_data(fd, size, chunk_bytes=CHUNK, block_bytes=BLOCK)
        digest = Hasher(fd, size, chunk_bytes=CHUNK, block_bytes=BLOCK).digest()
    finally:
        os.close(fd)
    assert digest.sha256 == hashlib.sha256(seen).digest()
    assert digest_disk_bytes(digest, BLOCK) == found.disk_bytes == counted_bytes(path, BLOCK)
    holes = list(found.hole_ranges())
    assert all(not any(seen[at : at + length]) for at, length in holes)
    data_blocks = {b for o, n in writes if o < size for b in range(o // BLOCK, (min(o + n, size) - 1) // BLOCK + 1)}
    hole_blocks = {b for at, n in holes for b in range(at // BLOCK, -(-(at + n) // BLOCK))}
    assert not data_blocks & hole_blocks
    assert len(data_blocks) + len(hole_blocks) == -(-size // BLOCK)
    for index, chunk in enumerate(digest.chunks):
        data = seen[index * CHUNK : (index + 1) * CHUNK]
        assert chunk.sha256 == hashlib.sha256(data).digest()
        if not chunk.is_hole:
            read = digest_chunk(data, block_bytes=BLOCK)
            assert chunk._replace(holes=0) == read
            for block in range(-(-len(data) // BLOCK)):
                piece = data[block * BLOCK : (block + 1) * BLOCK]
                assert block_crc(chunk.block_crcs, block) == native.crc64(piece)


def test_mostly_holes_are_hashed_by_their_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "HOLES_HASHED_MAX", 4 * CHUNK)
    path = tmp_path / "f"
    for size, kind in ((5 * CHUNK, HashKind.BYTES), (6 * CHUNK, HashKind.CHUNKS)):
        seen = sparse_file(path, size, [(0, 5)])
        fd = os.open(path, os.O_RDONLY)
        try:
            digest = Hasher(fd, size, chunk_bytes=CHUNK, block_bytes=BLOCK).digest()
        finally:
            os.close(fd)
        assert digest.hashed is kind
        chunks = [hashlib.sha256(seen[at : at + CHUNK]).digest() for at in range(0, size, CHUNK)]
        assert digest.sha256 == hashlib.sha256(seen if kind is HashKind.BYTES else b"".join(chunks)).digest()


def test_hashing_ends_when_it_is_told_to(tmp_path: Path) -> None:
    path = tmp_path / "f"
    sparse_file(path, 3 * CHUNK, [(0, 3 * CHUNK)])
    asked = iter([True, False])
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(HashingCancelledError):
            Hasher(fd, 3 * CHUNK, chunk_bytes=CHUNK, block_bytes=BLOCK, go_on=lambda: next(asked)).digest()
        assert next(asked, None) is None
    finally:
        os.close(fd)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 6 * CHUNK + 100),
    st.lists(st.tuples(st.integers(0, 6 * CHUNK), st.integers(1, 3 * BLOCK)), max_size=5),
)
def test_a_block_is_whole_when_all_of_it_is_there(
    tmp_path_factory: pytest.TempPathFactory, size: int, writes: list[tuple[int, int]]
) -> None:
    """As the disk gives room by pages of 4 KiB."""
    path = tmp_path_factory.getbasetemp() / "whole"
    pages = set()
    for offset, length in writes:
        if offset < size:
            pages |= set(range(offset // 4096, (min(offset + length, size) - 1) // 4096 + 1))
    sparse_file(path, size, writes)
    found = whole_blocks(path, CHUNK // BLOCK, BLOCK)
    for block in range(-(-size // BLOCK)):
        stop = min((block + 1) * BLOCK, size)
        whole = all(page in pages for page in range(block * BLOCK // 4096, -(-stop // 4096)))
        chunk, bit = divmod(block, CHUNK // BLOCK)
        assert bool(found.get(chunk, 0) >> bit & 1) is whole
