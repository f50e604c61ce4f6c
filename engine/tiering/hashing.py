"""Hashing an object when it is sealed: a crc64 for each piece, block and chunk, SHA-256 for each chunk and the whole.

A piece is 64 KiB, what a glance at a cold file fetches. Blocks and chunks are made of pieces: their checksums are
combined from those, the bytes are looked at once.

Chunks of a large file are hashed side by side where the CPU gains by that (`native/sha256.c`); the hash of all of its
bytes, which nothing can take part in, comes behind them.

Reads the file in blocks, with pread: a file that is cut meanwhile is an error, not a SIGBUS. Holes are not read:
their checksums are those of zeros, which are known. A hole as long as a chunk costs nothing but its share of the
object's hash, and beyond HOLES_HASHED_MAX not even that (`HashKind`).

Owner: pure; blocking, made for a worker thread (both hashes let go of the GIL).
"""

from __future__ import annotations

import errno
import hashlib
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Final, NamedTuple

from aof2 import native
from aof2.engine.blob.format import zeros_crc64
from aof2.engine.catalog.rows import HashKind
from aof2.engine.errors import Aof2Error, CorruptError
from aof2.engine.local.hot import read_exactly, read_into
from aof2.engine.local.sparse import DataMap, map_data
from aof2.engine.runs import runs_of

READ_BYTES: Final = 4 << 20
STREAM_BYTES: Final = 1 << 20
SIDE_BY_SIDE_MIN: Final = 5  # chunks; fewer are hashed as soon one after the other
CRC_LEN: Final = 8
PIECE_BYTES: Final = 64 << 10
PIECES_WORTH_BYTES: Final = 4 * PIECE_BYTES
# Zeros of whole chunks that are hashed for the object's sake; beyond, its hash is made of its chunks' hashes.
HOLES_HASHED_MAX: Final = 1 << 30
_ZEROS: Final = bytes(READ_BYTES)


class HashingCancelledError(Aof2Error):
    """The file was removed, or opened to be written to: its hash is of no use any more."""


class ChunkDigest(NamedTuple):
    """`piece_crcs` is empty where a chunk is so short that no reader gains by fetching less than its block. `holes`:
    the blocks in which there never was a byte; they are zeros."""

    length: int
    sha256: bytes
    crc64: int
    block_crcs: bytes
    piece_crcs: bytes = b""
    holes: int = 0
    is_hole: bool = False  # all of it


OnChunk = Callable[[int, ChunkDigest], object]


class ObjectDigest(NamedTuple):
    size: int
    sha256: bytes
    chunks: tuple[ChunkDigest, ...]
    hole_bytes: int = 0  # of `size`: what is not on the disk, by pages of the disk
    hashed: HashKind = HashKind.BYTES

    @property
    def data_bytes(self) -> int:
        return self.size - self.hole_bytes


@cache
def hole_digest(length: int) -> ChunkDigest:
    """A chunk that is a hole from end to end. It has no row, so nothing but its hash is of use."""
    sha = hashlib.sha256()
    for at in range(0, length, READ_BYTES):
        sha.update(memoryview(_ZEROS)[: min(READ_BYTES, length - at)])
    return ChunkDigest(length, sha.digest(), 0, b"", is_hole=True)


class _Sums:
    """The checksums of one chunk, block after block."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._step = min(PIECE_BYTES, block_bytes)
        self._blocks = bytearray()
        self._pieces = bytearray()
        self._length = 0
        self._crc64 = 0
        self._holes = 0

    def add(self, data: memoryview) -> None:
        """Whole blocks, but for the chunk's last."""
        for at in range(0, len(data), self._block_bytes):
            self._add_block(data[at : at + self._block_bytes])

    def add_pieces(self, crcs: bytes, length: int) -> None:
        """Whole blocks of pieces with these checksums."""
        per_block = self._block_bytes // self._step
        self._pieces += crcs
        values = iter(array("Q", crcs))
        for _ in range(length // self._block_bytes):
            crc = next(values)
            for piece in islice(values, per_block - 1):
                crc = native.crc64_combine(crc, piece, self._step)
            self._take(crc, self._block_bytes)

    def add_hole(self, length: int) -> None:
        """A block of zeros that need not be looked at."""
        self._holes |= 1 << len(self._blocks) // CRC_LEN
        for at in range(0, length, self._step):
            self._pieces += zeros_crc64(min(self._step, length - at)).to_bytes(CRC_LEN, "little")
        self._take(zeros_crc64(length), length)

    def _add_block(self, block: memoryview) -> None:
        crc = 0
        for at in range(0, len(block), self._step):
            piece = block[at : at + self._step]
            piece_crc = native.crc64(piece)
            self._pieces += piece_crc.to_bytes(CRC_LEN, "little")
            crc = native.crc64_combine(crc, piece_crc, len(piece)) if at else piece_crc
        self._take(crc, len(block))

    def _take(self, crc: int, length: int) -> None:
        self._blocks += crc.to_bytes(CRC_LEN, "little")
        self._crc64 = native.crc64_combine(self._crc64, crc, length) if self._length else crc
        self._length += length

    def digest(self, sha256: bytes) -> ChunkDigest:
        pieces = bytes(self._pieces) if self._step == PIECE_BYTES and self._length > PIECES_WORTH_BYTES else b""
        return ChunkDigest(self._length, sha256, self._crc64, bytes(self._blocks), pieces, self._holes)


class Hasher:
    """Hashes one file, chunk by chunk. `go_on` is asked every few MiB; when it says no, HashingCancelledError.
    `on_chunk(index, digest)` is told of each chunk that is no hole as soon as it is hashed."""

    def __init__(
        self,
        fd: int,
        size: int,
        *,
        chunk_bytes: int,
        block_bytes: int,
        path: str = "",
        data: DataMap | None = None,
        go_on: Callable[[], bool] = lambda: True,
        on_chunk: OnChunk | None = None,
    ) -> None:
        self._fd = fd
        self._size = size
        self._chunk_bytes = chunk_bytes
        self._block_bytes = block_bytes
        self._path = path
        self._data = data or map_data(fd, size, chunk_bytes=chunk_bytes, block_bytes=block_bytes)
        self._go_on = go_on
        self._on_chunk = on_chunk

    @property
    def data(self) -> DataMap:
        return self._data

    def digest(self) -> ObjectDigest:
        count = -(-self._size // self._chunk_bytes)
        kind = self.kind_of(count - len(self._data.masks))
        whole: hashlib._Hash | None = None
        chunks: list[ChunkDigest] = []
        if kind is HashKind.BYTES and count > 1:
            first, whole = self._first()
            chunks.append(first)
        for window in self._windows(len(chunks), count):
            if len(window) == 1:
                chunks.append(self.chunk(window[0], whole))
                continue
            chunks += self._side_by_side(window)
            if whole is not None:
                self._stream(window, whole)
        return self.object_digest(tuple(chunks), whole, kind)

    def _first(self) -> tuple[ChunkDigest, hashlib._Hash]:
        """The first chunk, and the hash of all bytes, which begins as its own."""
        whole = hashlib.sha256()
        if not self._data.masks.get(0, 0):
            return self.chunk(0, whole), whole
        return self._with_data(0, whole, None), whole

    def _windows(self, start: int, count: int) -> Iterator[list[int]]:
        """Neighbours that are hashed side by side; others, one by one. Not of any number: what hashes the bytes of all
        of them, behind that, is to find them in memory still."""
        full = (1 << self._chunk_bytes // self._block_bytes) - 1
        width = min(native.sha256_lanes(), native.SPANS_MAX)

        def is_whole(index: int) -> bool:
            return self._data.masks.get(index) == full and (index + 1) * self._chunk_bytes <= self._size

        for first, found in runs_of(range(start, count), is_whole, max(1, width)):
            window = list(range(first, first + found))
            if found >= SIDE_BY_SIDE_MIN and is_whole(first):
                yield window
            else:
                yield from ([index] for index in window)

    def _side_by_side(self, window: list[int]) -> list[ChunkDigest]:
        spans = native.Spans(
            self._fd,
            [index * self._chunk_bytes for index in window],
            self._chunk_bytes,
            piece_bytes=min(PIECE_BYTES, self._block_bytes),
            step_bytes=self._block_bytes,
        )
        while spans.left:
            self._check_wanted()
            try:
                spans.go_on()
            except OSError as e:
                if e.errno == errno.ENODATA:
                    raise CorruptError("backing file ends early", path=self._path) from None
                raise
        chunks = [self._of_span(one) for one in spans.digests()]
        for index, chunk in zip(window, chunks, strict=True):
            if self._on_chunk is not None:
                self._on_chunk(index, chunk)
        return chunks

    def _of_span(self, one: native.SpanDigest) -> ChunkDigest:
        sums = _Sums(self._block_bytes)
        sums.add_pieces(one.piece_crcs, self._chunk_bytes)
        return sums.digest(one.sha256)

    def _stream(self, window: list[int], whole: hashlib._Hash) -> None:
        """`whole` goes on with the bytes of these chunks, once more read."""
        buffer = bytearray(STREAM_BYTES)
        end = (window[-1] + 1) * self._chunk_bytes
        for at in range(window[0] * self._chunk_bytes, end, STREAM_BYTES):
            if not at % READ_BYTES:
                self._check_wanted()
            with memoryview(buffer) as view, view[: min(STREAM_BYTES, end - at)] as part:
                read_into(self._fd, part, at, path=self._path)
                whole.update(part)

    def _check_wanted(self) -> None:
        if not self._go_on():
            raise HashingCancelledError(f"{self._path}: not wanted any more")

    def kind_of(self, hole_chunks: int) -> HashKind:
        return HashKind.CHUNKS if hole_chunks * self._chunk_bytes > HOLES_HASHED_MAX else HashKind.BYTES

    def object_digest(
        self, chunks: tuple[ChunkDigest, ...], whole: hashlib._Hash | None, kind: HashKind
    ) -> ObjectDigest:
        if kind is HashKind.CHUNKS:
            sha256 = hashlib.sha256(b"".join(chunk.sha256 for chunk in chunks)).digest()
        elif len(chunks) == 1:  # a one-chunk object is its chunk: hashing it once is enough
            sha256 = chunks[0].sha256
        else:
            sha256 = (whole or hashlib.sha256()).digest()
        return ObjectDigest(self._size, sha256, chunks, self._size - self._data.data_bytes, kind)

    def chunk(self, index: int, whole: hashlib._Hash | None) -> ChunkDigest:
        """`whole` goes on with its bytes."""
        start = index * self._chunk_bytes
        length = min(self._chunk_bytes, self._size - start)
        mask = self._data.masks.get(index, 0)
        if not mask:
            self._check_wanted()
            if whole is not None:
                add_zeros(whole, length)
            return hole_digest(length)
        return self._with_data(index, hashlib.sha256(), whole)

    def _with_data(self, index: int, sha: hashlib._Hash, whole: hashlib._Hash | None) -> ChunkDigest:
        """`sha` is the chunk's own, `whole` goes on with its bytes."""
        start = index * self._chunk_bytes
        length = min(self._chunk_bytes, self._size - start)
        mask = self._data.masks[index]
        sums = _Sums(self._block_bytes)
        step = max(1, READ_BYTES // self._block_bytes)
        for first, count in runs_of(range(-(-length // self._block_bytes)), lambda block: mask >> block & 1, step):
            is_data = mask >> first & 1
            at, size = first * self._block_bytes, min(count * self._block_bytes, length - first * self._block_bytes)
            self._check_wanted()
            if is_data:
                data = memoryview(read_exactly(self._fd, start + at, size, path=self._path))
                sha.update(data)
                if whole is not None:
                    whole.update(data)
                sums.add(data)
                continue
            add_zeros(sha, size)
            if whole is not None:
                add_zeros(whole, size)
            for block in range(0, size, self._block_bytes):
                sums.add_hole(min(self._block_bytes, size - block))
        digest = sums.digest(sha.digest())
        if self._on_chunk is not None:
            self._on_chunk(index, digest)
        return digest


def add_zeros(sha: hashlib._Hash, length: int) -> None:
    """Goes on with so many zeros."""
    for at in range(0, length, READ_BYTES):
        sha.update(memoryview(_ZEROS)[: min(READ_BYTES, length - at)])


def digest_file(fd: int, size: int, *, chunk_bytes: int, block_bytes: int, path: str = "") -> ObjectDigest:
    return Hasher(fd, size, chunk_bytes=chunk_bytes, block_bytes=block_bytes, path=path).digest()


def small_digest(size: int, sha256: bytes, crc64: int, piece_crcs: bytes = b"") -> ObjectDigest:
    """Of a file without holes that is one block (`native.hash_small`)."""
    if not size:
        return ObjectDigest(0, sha256, ())
    pieces = piece_crcs if size > PIECES_WORTH_BYTES else b""
    return ObjectDigest(size, sha256, (ChunkDigest(size, sha256, crc64, crc64.to_bytes(CRC_LEN, "little"), pieces),))


def digest_chunk(data: memoryview, *, block_bytes: int) -> ChunkDigest:
    """Of a chunk in memory."""
    sums = _Sums(block_bytes)
    sums.add(data)
    return sums.digest(hashlib.sha256(data).digest())


def block_crc(block_crcs: bytes, index: int) -> int:
    return int.from_bytes(block_crcs[index * CRC_LEN : (index + 1) * CRC_LEN], "little")
