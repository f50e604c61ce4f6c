"""A file that is only partly here, put together: its bytes as a reader sees them, and what a seal says of them.

Invariant: a chunk stays the part it was uploaded as only while each of its blocks that is here still has that part's
checksum.

Owner: worker threads; it keeps nothing, writes nothing, and holds a few MiB at a time beside what it returns.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from aof2 import native
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import HashKind
from aof2.engine.errors import CorruptError
from aof2.engine.files.state import OpenFile
from aof2.engine.local.hot import read_exactly
from aof2.engine.objects import full_mask, mask_bytes
from aof2.engine.runs import runs_of
from aof2.engine.tiering.flights import NotAvailableError
from aof2.engine.tiering.hashing import ChunkDigest, Hasher, ObjectDigest, OnChunk, block_crc

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

FETCH_BYTES: Final = 8 << 20


class Assembler:
    """Reads and hashes files that are partly here."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._block_bytes = volume.settings.engine.block_bytes
        self._chunk_bytes = volume.settings.engine.chunk_bytes
        self._per_chunk = self._chunk_bytes // self._block_bytes

    def read_range(self, file: OpenFile, offset: int, length: int, fd: int = -1) -> memoryview:
        """Bytes as a reader sees them, at most a chunk: from the backing file, and from where absent blocks are."""
        out = memoryview(bytearray(length))
        own = fd < 0
        fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC) if own else fd
        try:
            for first, count, absent in self._runs(file, offset, length):
                low = max(offset, first * self._block_bytes)
                high = min(offset + length, (first + count) * self._block_bytes)
                if absent:
                    self._fetch(file, fd, first, count, out, offset)
                else:
                    out[low - offset : high - offset] = read_exactly(fd, low, high - low, path=str(file.path))
        finally:
            if own:
                os.close(fd)
        return out

    def _runs(self, file: OpenFile, offset: int, length: int) -> list[tuple[int, int, bool]]:
        """(first block, how many, absent): neighbours of one kind and one chunk, a few MiB at most."""
        most = max(1, FETCH_BYTES // self._block_bytes)
        blocks = range(offset // self._block_bytes, (offset + length - 1) // self._block_bytes + 1)

        def kind(block: int) -> tuple[bool, int]:
            return file.is_absent(block, self._block_bytes), block // self._per_chunk

        return [(first, count, kind(first)[0]) for first, count in runs_of(blocks, kind, most)]

    def _fetch(self, file: OpenFile, fd: int, first: int, count: int, out: memoryview, offset: int) -> None:
        """Blocks of a part, as far as the part goes: what is behind its end in its last block is the file's own."""
        chunk = file.source.chunks[first // self._per_chunk]
        blob = self._volume.catalog.get(file.key[0], t.BLOBS, chunk.sha256)
        if blob is None:
            raise NotAvailableError(f"chunk {chunk.chunk_id} has no copy anywhere", path=str(file.path))
        pages = self._volume.hydrator.fetcher.blocks(chunk, blob, first % self._per_chunk, count)
        for block, page in enumerate(pages, first):
            start, end = block * self._block_bytes, offset + len(out)
            low, high = max(start, offset), min(start + len(page), file.base_len, end)
            if low < high:
                out[low - offset : high - offset] = page[low - start : high - start]
            low, high = max(low, high), min(start + self._block_bytes, end)
            if low < high:
                out[low - offset : high - offset] = read_exactly(fd, low, high - low, path=str(file.path))

    # -- for a seal -------------------------------------------------------------------------------------------

    def is_part(self, file: OpenFile, index: int) -> bool:
        """Whether the chunk was uploaded while the file was being written."""
        base = file.base
        if base is None or index >= len(base.chunks):
            return False
        chunk = base.chunks[index]
        return bool(chunk.chunk_id and chunk.key) and chunk.generation == file.key[2]

    def _here(self, file: OpenFile, index: int, size: int) -> int | None:
        """The blocks of a chunk of a file of this size that are here; None: all."""
        whole = full_mask(min(self._chunk_bytes, size - index * self._chunk_bytes), self._block_bytes)
        mask = whole & ~file.absent_mask(index, self._per_chunk, self._block_bytes)
        return None if mask == whole else mask

    def is_complete(self, file: OpenFile, index: int, size: int, fd: int = -1) -> bool:
        """Whether it is here whole, or a part whose blocks that are here are still the part's. On a worker thread."""
        start = index * self._chunk_bytes
        length = min(self._chunk_bytes, size - start)
        here = self._here(file, index, size)
        if here is None:
            return True
        if not self.is_part(file, index):
            return False
        chunk = file.source.chunks[index]
        if chunk.length != length or start + length > file.base_len:
            return False
        for i in range(-(-length // self._block_bytes)):
            at = i * self._block_bytes
            if here >> i & 1:
                data = self.read_range(file, start + at, min(self._block_bytes, length - at), fd)
                if native.crc64(data) != block_crc(chunk.block_crcs, i):
                    return False
        return True

    def hasher(
        self, file: OpenFile, fd: int, size: int, go_on: Callable[[], bool], on_chunk: OnChunk | None = None
    ) -> Hasher:
        make = partial(Hasher, chunk_bytes=self._chunk_bytes, block_bytes=self._block_bytes)
        return make(fd, size, path=file.path_text, go_on=go_on, on_chunk=on_chunk)

    def digest(
        self, file: OpenFile, fd: int, size: int, go_on: Callable[[], bool]
    ) -> tuple[ObjectDigest, dict[int, int]]:
        """What a seal says, and which chunks stay the parts they are, with their blocks that are here; CorruptError
        where one is neither whole nor complete. On a worker thread."""
        hasher = self.hasher(file, fd, size, go_on)
        count = -(-size // self._chunk_bytes)
        holes = [i for i in range(count) if i not in hasher.data.masks and self._here(file, i, size) is None]
        kind = hasher.kind_of(len(holes))
        parts: dict[int, int] = {}
        known = min(len(file.running.chunks), count)
        chunks = [self._digest_at(file, fd, index, size, parts, None, hasher) for index in range(known)]
        whole = self._running(file, fd, size, chunks) if kind is HashKind.BYTES and count > 1 else None
        for index in range(known, count):
            chunks.append(self._digest_at(file, fd, index, size, parts, whole, hasher))
        digest = hasher.object_digest(tuple(chunks), whole, kind)
        hole_bytes = sum(c.length if c.is_hole else mask_bytes(c.holes, c.length, self._block_bytes) for c in chunks)
        return digest._replace(hole_bytes=hole_bytes), parts

    def _running(self, file: OpenFile, fd: int, size: int, chunks: list[ChunkDigest]) -> hashlib._Hash:
        """The hash of the first chunks, which were hashed when they were taken out, if they are still the same."""
        if [chunk.sha256 for chunk in chunks] == file.running.chunks:
            return file.running.sha256.copy()
        whole = hashlib.sha256()  # something was written over: all of it is read again
        for index in range(len(chunks)):
            self._stream(file, fd, index, size, whole)
        return whole

    def _digest_at(
        self,
        file: OpenFile,
        fd: int,
        index: int,
        size: int,
        parts: dict[int, int],
        whole: hashlib._Hash | None,
        hasher: Hasher,
    ) -> ChunkDigest:
        here = self._here(file, index, size)
        if here is None:
            return hasher.chunk(index, whole)
        if not self.is_complete(file, index, size, fd):
            raise CorruptError(f"chunk {index} is not complete", path=str(file.path))
        parts[index] = here
        if whole is not None:
            self._stream(file, fd, index, size, whole)
        chunk = file.source.chunks[index]
        return ChunkDigest(chunk.length, chunk.sha256, chunk.crc64, chunk.block_crcs, holes=chunk.holes)

    def _stream(self, file: OpenFile, fd: int, index: int, size: int, whole: hashlib._Hash) -> None:
        start = index * self._chunk_bytes
        for at in range(start, min(start + self._chunk_bytes, size), FETCH_BYTES):
            whole.update(self.read_range(file, at, min(FETCH_BYTES, start + self._chunk_bytes - at, size - at), fd))
