"""Where bytes are in the remote: (key, offset, length). Rows keep these; every read of a blob goes through one.

A blob is at a place in an object: at offset 0 of one of its own, or, a member of a pack, at its own offset there.
Readers count from the blob's first byte: here that becomes the object's.

Invariants
- No read leaves the blob: one that would is CorruptError, since the neighbour's bytes belong to another chunk.

Owner: values, shared by all threads. Nothing is kept.
"""

from __future__ import annotations

from typing import NamedTuple

from aof2.engine.errors import CorruptError
from aof2.engine.remote.keys import WholeBlobKey, parse_key
from aof2.engine.remote.source import FileTarget
from aof2.engine.remote.store import RemoteStore


class Location(NamedTuple):
    """`length` bytes from `offset` on of the object under `key`."""

    key: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def fits(self, object_bytes: int) -> bool:
        """Whether an object of that size can hold it: one that is named after a chunk ends with its blob."""
        if isinstance(parse_key(self.key), WholeBlobKey):
            return object_bytes == self.end
        return object_bytes >= self.end

    def within(self, start: int, length: int) -> int:
        """The offset in the object of the blob's bytes [start, start + length)."""
        if start < 0 or length < 0 or start + length > self.length:
            what = f"bytes {start}…{start + length} of a blob of {self.length}"
            raise CorruptError(what, path=self.key, offset=self.offset)
        return self.offset + start


class LocatedBlob:
    """One blob, read by offsets of its own. Blocks, but for `glance`."""

    __slots__ = ("at", "remote")

    def __init__(self, remote: RemoteStore, at: Location) -> None:
        self.remote = remote
        self.at = at

    def read(self, start: int, length: int) -> bytes:
        at = self.at.within(start, length)
        return self.remote.get_range(self.at.key, at, length) if length else b""  # all of it may be holes

    def receive(self, start: int, length: int, target: FileTarget) -> None:
        self.remote.receive_range(self.at.key, self.at.within(start, length), length, target)

    async def glance(self, start: int, length: int) -> bytes | None:
        return await self.remote.glance(self.at.key, self.at.within(start, length), length)
