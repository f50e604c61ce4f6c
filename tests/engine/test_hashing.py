"""What a seal says of a large file: the same, whether its chunks are hashed side by side or one after the other."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aof2 import native
from aof2.engine.errors import CorruptError
from aof2.engine.tiering import hashing
from aof2.engine.tiering.hashing import ChunkDigest, Hasher, HashingCancelledError, ObjectDigest

BLOCK = 64 << 10
CHUNK = 8 * BLOCK


@pytest.fixture(autouse=True, params=["one by one", "side by side"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = 1 if request.param == "one by one" else native.SPANS_MAX
    monkeypatch.setattr(native, "sha256_lanes", lambda: lanes)
    if lanes == 1:
        monkeypatch.setattr(hashing, "SIDE_BY_SIDE_MIN", 1 << 30)


@contextmanager
def file_of(path: Path, data: bytes, holes: tuple[tuple[int, int], ...] = ()) -> Iterator[int]:
    """A file of these bytes; `holes` are (offset, length) of zeros that are not written."""
    with path.open("wb") as f:
        f.truncate(len(data))
        at = 0
        for offset, length in (*holes, (len(data), 0)):
            os.pwrite(f.fileno(), data[at:offset], at)
            at = offset + length
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


def hasher(fd: int, size: int, **more: object) -> Hasher:
    return Hasher(fd, size, chunk_bytes=CHUNK, block_bytes=BLOCK, path="f", **more)  # type: ignore[arg-type]


def check(digest: ObjectDigest, data: bytes) -> None:
    assert (digest.size, digest.sha256) == (len(data), hashlib.sha256(data).digest())
    assert len(digest.chunks) == -(-len(data) // CHUNK)
    for index, one in enumerate(digest.chunks):
        piece = data[index * CHUNK : (index + 1) * CHUNK]
        assert (one.length, one.sha256) == (len(piece), hashlib.sha256(piece).digest())
        if one.is_hole:
            continue
        assert one.crc64 == native.crc64(piece)
        crcs = [native.crc64(piece[at : at + BLOCK]).to_bytes(8, "little") for at in range(0, len(piece), BLOCK)]
        assert one.block_crcs == b"".join(crcs)
        assert one.piece_crcs in (one.block_crcs, b"")  # a piece is a block here
        assert bool(one.piece_crcs) is (len(piece) > hashing.PIECES_WORTH_BYTES)


@pytest.mark.parametrize("size", [0, 1, CHUNK, 2 * CHUNK, 6 * CHUNK, 7 * CHUNK + 5, 19 * CHUNK + BLOCK + 1])
def test_files_of_many_chunks(tmp_path: Path, size: int) -> None:
    data = random.Random(size).randbytes(size)
    told: list[tuple[int, ChunkDigest]] = []
    with file_of(tmp_path / "f", data) as fd:
        digest = hasher(fd, size, on_chunk=lambda *one: told.append(one)).digest()
    check(digest, data)
    assert sorted(told) == list(enumerate(digest.chunks))


def test_holes_among_them(tmp_path: Path) -> None:
    """A block of one chunk, a chunk, and the first one."""
    data = bytearray(random.Random(5).randbytes(16 * CHUNK + 100))
    for first in (False, True):
        holes = ((0, CHUNK),) * first + ((7 * CHUNK + BLOCK, BLOCK), (9 * CHUNK, CHUNK))
        for offset, length in holes:
            data[offset : offset + length] = bytes(length)
        with file_of(tmp_path / "f", bytes(data), holes) as fd:
            digest = hasher(fd, len(data)).digest()
        check(digest, bytes(data))
        assert [index for index, one in enumerate(digest.chunks) if one.is_hole] == [0] * first + [9]
        assert digest.chunks[7].holes == 2


def test_one_that_is_not_wanted_any_more(tmp_path: Path) -> None:
    data = random.Random(6).randbytes(8 * CHUNK)
    with file_of(tmp_path / "f", data) as fd:
        for looks in (0, 1, 5):
            left = iter(range(looks))
            with pytest.raises(HashingCancelledError):
                hasher(fd, len(data), go_on=lambda left=left: next(left, None) is not None).digest()


def test_one_that_is_cut_meanwhile(tmp_path: Path) -> None:
    data = random.Random(7).randbytes(8 * CHUNK)
    with file_of(tmp_path / "f", data) as fd:
        started = hasher(fd, len(data))
        os.truncate(tmp_path / "f", 6 * CHUNK + 1)
        with pytest.raises(CorruptError, match="ends"):
            started.digest()
