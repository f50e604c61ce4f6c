"""What is read without being stored so: `_tail` out of segments that are not sealed, a raw segment out of its files.

Invariants
- `_tail` shows records that are committed, and whose checksum holds.
- A raw segment is byte for byte what was sealed; what it is composed of was verified on the way here.

Owner: blocking functions for worker threads; `RawSegment` is the trio thread's. A crash leaves nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from aof2.engine.append.segment import Segment
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.local.handles import Key, ObjectHandle
from aof2.engine.segment.index import SegmentIndex
from aof2.engine.segment.reader import SegmentReader

if TYPE_CHECKING:
    from aof2.engine.volume import Volume


class TailReader:
    """Payloads of segments that are not sealed, by their offset in the stream. What it found of a segment it keeps."""

    def __init__(self, env: Env) -> None:
        self._env = env
        self._reader: SegmentReader | None = None
        self._segment: Segment | None = None
        self._end = 0

    def read(self, segment: Segment, logical: int, size: int) -> bytes:
        """At most so many payload bytes from there on, as far as they are committed. Blocks."""
        stop = min(logical + size, segment.committed_logical)
        reader = self._reader_of(segment)
        parts: list[bytes] = []
        for record in reader.records_from(logical):
            start = max(0, logical - record.logical_offset)
            piece = record.payload[start : start + stop - logical]
            parts.append(bytes(piece))
            logical += len(piece)
            if logical >= stop:
                break
        return b"".join(parts)

    def _reader_of(self, segment: Segment) -> SegmentReader:
        end = segment.committed_end
        if self._reader is not None and self._segment is segment and self._end == end:
            return self._reader
        reader = SegmentReader(self._env, segment.path, end=end, durable=end)
        if self._reader is not None and self._segment is segment:
            reader.go_on_from(self._reader)
        self.close()
        self._reader, self._segment, self._end = reader, segment, end
        return reader

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class RawSegment:
    """A sealed segment as it was written. Made by `opened_raw`."""

    def __init__(self, volume: Volume, index: SegmentIndex, payload: ObjectHandle) -> None:
        self._volume = volume
        self._payload = payload
        self.index = index

    async def payloads(self, start: int, length: int) -> bytes:
        """Of the payload file."""
        return await self._volume.hydrator.read(self._payload, start, length) if length else b""

    def damaged(self, record: int) -> CorruptError:
        where = f"record {record} of segment {self.index.header.segment_id}"
        return CorruptError(f"{where} fails its checksum", path=str(self._payload.path))

    async def read(self, offset: int, size: int) -> bytes:
        start, length = self.index.payload_range(offset, size)
        payload = await self.payloads(start, length)
        return self.index.raw(offset, size, lambda at, count: payload[at - start : at - start + count])


@contextlib.asynccontextmanager
async def opened_raw(volume: Volume, payload: Key, index: Key) -> AsyncIterator[RawSegment]:
    async with volume.opened_object(payload) as payload_handle, volume.opened_object(index) as index_handle:
        data = await volume.hydrator.read(index_handle, 0, index_handle.size)
        name = f"segment of object {index[1]}"
        yield RawSegment(volume, SegmentIndex.decode(data, path=name), payload_handle)
