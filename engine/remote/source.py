"""What a put reads from, and the file that a range lands in. A source can be read again from the start, for retries.

Owner: the thread that transfers; sources keep no state between passes. A crash leaves nothing.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from aof2.engine.env import Files
from aof2.engine.errors import CorruptError, LandingError
from aof2.native import crc64 as crc64_of_bytes

Buffer = bytes | bytearray | memoryview


class FileSource(NamedTuple):
    """Bytes of a file from `offset` on."""

    path: Path
    offset: int = 0


class ChunksSource(NamedTuple):
    """Bytes that are made on the way: `chunks()` starts them anew and gives the same ones each time."""

    chunks: Callable[[], Iterable[Buffer]]


Source = bytes | bytearray | memoryview | mmap.mmap | FileSource | ChunksSource


class FileTarget(NamedTuple):
    """A place in a file for a range, which comes in pieces of `piece_bytes`, the last perhaps shorter.

    `landed(piece, crc64s)` is called in their order, for one or several, when they are there; what it raises ends the
    transfer. A piece is written before `landed` can tell whether it is right: until then it is not to be read.
    """

    files: Files
    fd: int
    offset: int
    piece_bytes: int
    landed: Callable[[int, Sequence[int]], None]

    def put(self, piece: int, data: Buffer) -> None:
        """LandingError when the file does not take it."""
        try:
            self.files.pwrite(self.fd, data, self.at(piece))
        except OSError as e:
            raise LandingError(e) from None
        self.landed(piece, [crc64_of_bytes(data)])

    def put_from(self, piece: int, data: Buffer) -> int:
        """Whole pieces, and a shorter last one; the piece after them."""
        with memoryview(data) as view:
            for start in range(0, len(view), self.piece_bytes):
                with view[start : start + self.piece_bytes] as some:
                    self.put(piece, some)
                piece += 1
        return piece

    def at(self, piece: int) -> int:
        return self.offset + piece * self.piece_bytes


def pieces(source: Source, size: int, piece_bytes: int) -> Iterator[Buffer]:
    """The first `size` bytes in pieces of `piece_bytes`, the last one shorter. CorruptError when there are fewer.

    A piece that is a memoryview is released when the next one is asked for: a mapping can be closed afterwards.
    """
    if isinstance(source, FileSource):
        yield from _file_pieces(source, size, piece_bytes)
    elif isinstance(source, ChunksSource):
        yield from _cut(source.chunks(), size, piece_bytes)
    else:
        with memoryview(source) as whole, whole.cast("B") as view:
            if len(view) < size:
                raise CorruptError(f"the source has {len(view)} bytes, {size} were to be sent")
            for start in range(0, size, piece_bytes):
                with view[start : min(start + piece_bytes, size)] as piece:
                    yield piece


def as_it_comes(source: Source, size: int, piece_bytes: int) -> Iterator[Buffer]:
    """`pieces`, but those of a source that makes them are as long as it makes them: nothing is copied."""
    if not isinstance(source, ChunksSource):
        yield from pieces(source, size, piece_bytes)
        return
    left = size
    for chunk in source.chunks():
        left -= len(chunk)
        if left < 0:
            raise CorruptError(f"the source gives more than the {size} bytes that were to be sent")
        yield chunk
    if left:
        raise CorruptError(f"the source has {size - left} bytes, {size} were to be sent")


def whole(source: Source, size: int) -> bytes | bytearray:
    """All of it in one piece, which is the caller's."""
    out: bytes | bytearray = b""
    for piece in pieces(source, size, max(size, 1)):  # to its end: a source that has more to give is found out
        out = bytes(piece) if isinstance(piece, memoryview) else piece
    return out


def checked_crc64(source: Source, size: int, crc64: int | None, sha256: bytes | None) -> int:
    """The crc64 a put announces: the one given, else that of the source, which then must have `sha256` if given."""
    if crc64 is not None:
        return crc64
    crc, digest = 0, hashlib.sha256()
    for piece in pieces(source, size, 1 << 20):
        crc = crc64_of_bytes(piece, crc)
        if sha256 is not None:
            digest.update(piece)
    if sha256 not in (None, digest.digest()):
        raise CorruptError(f"the source has changed: it hashes to {digest.hexdigest()}, not {(sha256 or b'').hex()}")
    return crc


def _file_pieces(source: FileSource, size: int, piece_bytes: int) -> Iterator[Buffer]:
    with open(source.path, "rb") as f:
        f.seek(source.offset)
        for start in range(0, size, piece_bytes):
            piece = bytearray(min(piece_bytes, size - start))
            got = f.readinto(piece)
            if got < len(piece):
                missing, at = size - start - got, start + got
                raise CorruptError(f"the file ends {missing} bytes early", path=str(source.path), offset=at)
            yield piece


def _cut(chunks: Iterable[Buffer], size: int, piece_bytes: int) -> Iterator[Buffer]:
    left, held = size, bytearray()
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        if len(view) > left:
            raise CorruptError(f"the source gives more than the {size} bytes that were to be sent")
        left -= len(view)
        while view:
            take = min(piece_bytes - len(held), len(view))
            held += view[:take]
            view = view[take:]
            if len(held) == piece_bytes:
                yield held
                held = bytearray()
    if left:
        raise CorruptError(f"the source has {size - left} bytes, {size} were to be sent")
    if held:
        yield held
