"""Getting blocks of a chunk out of its remote blob, verified. Blocking; made for worker threads.

A block is checked twice over: against the blob's footer and against the crc64 recorded when the object was sealed, so a
blob that belongs to another chunk, or to another volume, is never served.

Owner: stateless but for a bounded cache of footers, which any thread may use.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from aof2 import native
from aof2.engine.blob.format import BlobFooter, Codec, footer_len
from aof2.engine.blob.reader import check_identity, decode_frame, read_footer
from aof2.engine.catalog.rows import BlobRow, ChunkRow
from aof2.engine.env import Files
from aof2.engine.errors import CorruptError, LandingError
from aof2.engine.locks import thread_lock
from aof2.engine.remote.location import LocatedBlob, Location
from aof2.engine.remote.source import FileTarget
from aof2.engine.remote.store import RemoteStore
from aof2.engine.tiering.hashing import PIECE_BYTES, block_crc
from aof2.engine.tiering.windows import HELD_BYTES, Came, Windows

FOOTERS_MAX: Final = 1024


class Place(NamedTuple):
    """Where blocks go."""

    files: Files
    fd: int
    offset: int


def is_plain(chunk: ChunkRow, blob: BlobRow) -> bool:
    """Whether the blob is as long as the chunk and a footer: nothing in it is compressed, so a block is where it is in
    the chunk, and the seal's checksums say whether it is right."""
    blocks = len(chunk.block_crcs) // 8
    return bool(blocks) and blob.stored_bytes == chunk.length + footer_len(blocks) and blob.raw_bytes == chunk.length


class BlobFetcher:
    """Reads blocks of blobs."""

    def __init__(self, remote: RemoteStore, *, block_bytes: int, windows_bytes: int = HELD_BYTES) -> None:
        self.remote = remote
        self._block_bytes = block_bytes
        self._footers: OrderedDict[Location, BlobFooter] = OrderedDict()
        self._lock = thread_lock()
        self.windows = Windows(held_bytes=windows_bytes)

    def blocks(
        self,
        chunk: ChunkRow,
        blob: BlobRow,
        first: int,
        count: int,
        *,
        pack_bytes: int = 0,
        came: Came | None = None,
    ) -> list[bytes | memoryview]:
        """Blocks first … first + count − 1 of the chunk, by one range request; each verified, raw ones not copied.
        `pack_bytes`: of the pack that the blob is in, where its neighbours may be fetched with it; `came` is told."""
        if pack_bytes:
            member = self.windows.read(self.remote, blob.location, pack_bytes, came)
            return self._member_blocks(chunk, blob, first, count, member)
        plain = self._plain_blocks(chunk, blob, first, count)
        if plain is not None:
            return plain
        footer = self._footer(chunk, blob)
        start, length = footer.frames_range(first, first + count - 1)
        stored = memoryview(self._at(blob).read(start, length))
        return self._decoded(footer, chunk, blob, first, count, stored)

    def _member_blocks(
        self, chunk: ChunkRow, blob: BlobRow, first: int, count: int, member: bytes | memoryview
    ) -> list[bytes | memoryview]:
        """The same of a blob that is in memory, whole and not checked."""
        held = memoryview(member)
        footer = read_footer(lambda start, length: bytes(held[start : start + length]), len(held), path=blob.key)
        check_identity(footer, sha256=chunk.sha256, path=blob.key)
        start, length = footer.frames_range(first, first + count - 1)
        return self._decoded(footer, chunk, blob, first, count, held[start : start + length])

    def _decoded(
        self, footer: BlobFooter, chunk: ChunkRow, blob: BlobRow, first: int, count: int, stored: memoryview
    ) -> list[bytes | memoryview]:
        start, _ = footer.frames_range(first, first + count - 1)
        out: list[bytes | memoryview] = []
        for index in range(first, first + count):
            offset, frame_len = footer.frame_range(index)
            frame = footer.frames[index]
            if frame.raw_crc64 != block_crc(chunk.block_crcs, index):
                raise CorruptError(f"block {index} is not what was sealed as chunk {chunk.chunk_id}", path=blob.key)
            piece = stored[offset - start : offset - start + frame_len]
            if frame.codec == Codec.RAW and native.crc64(piece) == frame.raw_crc64:
                out.append(piece)
            else:
                out.append(decode_frame(footer, index, piece, path=blob.key))
        return out

    def receive(
        self, chunk: ChunkRow, blob: BlobRow, first: int, count: int, place: Place, landed: Callable[[int, int], None]
    ) -> int:
        """Blocks of a plain blob straight into a file; how many bytes. `landed(block, count)` for those that are there
        and right. CorruptError at the first that is not: it and some behind it are in the file, and the caller
        clears them away."""
        size = self._block_bytes
        start, end = first * size, min((first + count) * size, chunk.length)

        def check(piece: int, crc64s: Sequence[int]) -> None:
            block = first + piece
            right = [crc64 == block_crc(chunk.block_crcs, block + i) for i, crc64 in enumerate(crc64s)]
            good = right.index(False) if False in right else len(right)
            if good:
                landed(block, good)
            if good < len(right):
                raise CorruptError(f"block {block + good} is not what was sealed", path=blob.key)

        target = FileTarget(place.files, place.fd, place.offset, size, check)
        try:
            self._at(blob).receive(start, end - start, target)
        except LandingError as e:
            raise e.error from None
        return end - start

    def _plain_blocks(self, chunk: ChunkRow, blob: BlobRow, first: int, count: int) -> list[bytes | memoryview] | None:
        """The same from a plain blob, by the seal's checksums alone: one request less; None when it is not right."""
        if not is_plain(chunk, blob):
            return None
        size = self._block_bytes
        start, end = first * size, min((first + count) * size, chunk.length)
        stored = memoryview(self._at(blob).read(start, end - start))
        out: list[bytes | memoryview] = [stored[at : at + size] for at in range(0, end - start, size)]
        good = all(native.crc64(piece) == block_crc(chunk.block_crcs, first + i) for i, piece in enumerate(out))
        return out if good else None

    async def glance_at_once(self, blob: BlobRow, piece_crcs: bytes, offset: int, length: int) -> bytes | None:
        """As `glance`, on the event loop; None also where the remote cannot do that."""
        start, end = _pieces_around(blob, offset, length)
        stored = await self._at(blob).glance(start, end - start)
        return None if stored is None else _checked(stored, start, piece_crcs, offset, length)

    def glance(self, blob: BlobRow, piece_crcs: bytes, offset: int, length: int) -> bytes | None:
        """A few bytes of a plain blob, with the pieces around them that tell whether they are right; None: not."""
        start, end = _pieces_around(blob, offset, length)
        return _checked(self._at(blob).read(start, end - start), start, piece_crcs, offset, length)

    def _at(self, blob: BlobRow) -> LocatedBlob:
        return LocatedBlob(self.remote, blob.location)

    def _footer(self, chunk: ChunkRow, blob: BlobRow) -> BlobFooter:
        with self._lock:
            footer = self._footers.get(blob.location)
        if footer is None:
            footer = read_footer(self._at(blob).read, blob.stored_bytes, path=blob.key)
            # Content may be shared by many chunks: it is the hash that identifies it.
            check_identity(footer, sha256=chunk.sha256, path=blob.key)
            with self._lock:
                self._footers[blob.location] = footer
                while len(self._footers) > FOOTERS_MAX:
                    self._footers.popitem(last=False)
        return footer

    def forget(self, key: str) -> None:
        """The object under this key is gone, or is another one now."""
        self.windows.forget(key)
        with self._lock:
            for at in [at for at in self._footers if at.key == key]:
                del self._footers[at]


def _pieces_around(blob: BlobRow, offset: int, length: int) -> tuple[int, int]:
    last = (offset + length - 1) // PIECE_BYTES
    return offset // PIECE_BYTES * PIECE_BYTES, min((last + 1) * PIECE_BYTES, blob.raw_bytes)


def _checked(stored: bytes, start: int, piece_crcs: bytes, offset: int, length: int) -> bytes | None:
    view = memoryview(stored)
    for at in range(0, len(view), PIECE_BYTES):
        if native.crc64(view[at : at + PIECE_BYTES]) != block_crc(piece_crcs, (start + at) // PIECE_BYTES):
            return None
    return bytes(view[offset - start : offset - start + length])
