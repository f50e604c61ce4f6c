"""open_stream: append, read and tail a stream without a mount, for programs that open the volume themselves.

    async with open_stream(settings, "events/clicks") as stream:
        offset = await stream.append([b"one\\n", b"two\\n"], ext_id=7)
        await stream.commit()
        async for record in stream.read(offset):
            …

One process has a volume open at a time, so this is for programs beside which nothing is mounted. A stream that is not
there is made. Records are what was appended, whatever the tenant's framing is: at most 16 MiB each, and less where a
segment is smaller.

Owner: the task that entered `open_stream`. A crash leaves what one of the daemon does: what was committed is there.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import AsyncIterator, Sequence
from typing import Final, NamedTuple

import trio

from aof2.engine import namespace
from aof2.engine.append import names, rows
from aof2.engine.append.kind import AppendKind
from aof2.engine.append.segment import Segment
from aof2.engine.append.stream import Stream
from aof2.engine.append.unmounted import no_kernel
from aof2.engine.append.views import opened_raw
from aof2.engine.catalog.rows import InodeRow, stream_of
from aof2.engine.env import Env
from aof2.engine.errors import os_error
from aof2.engine.files.kind import FilesKind
from aof2.engine.files.table import Files
from aof2.engine.kinds.kind import Caller
from aof2.engine.kinds.opens import Opens
from aof2.engine.kinds.registry import MountWish, Surroundings
from aof2.engine.segment.reader import SegmentReader
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume, open_volume

APPEND_NUMBER: Final = 1
RECORDS_AT_ONCE: Final = 4096


class StreamRecord(NamedTuple):
    """One record. `offset` is its place in the stream's payload."""

    offset: int
    timestamp_ms: int
    ext_id: int
    flags: int
    payload: bytes


class OpenStream:
    """A stream of an open volume. Made by `open_stream`."""

    def __init__(self, volume: Volume, kind: AppendKind, stream: Stream) -> None:
        self._volume = volume
        self._kind = kind
        self._stream = stream

    async def append(self, records: Sequence[bytes], *, ext_id: int = 0) -> int:
        """Adds records, all or none; the offset of the first. They survive a crash of this program when it returns, and
        a power cut after `commit`, or a commit_period later."""
        return await self._stream.append(records, ext_id)

    async def commit(self) -> None:
        """What was appended before is on the disk when this returns."""
        await self._stream.commit()

    async def seal(self) -> int:
        """Every record is in a sealed segment when this returns; how many segments that took."""
        return await self._stream.seal(begins=True)

    @property
    def end_offset(self) -> int:
        """Where the next record goes."""
        return self._stream.end_position.next_logical

    async def read(self, from_offset: int = 0) -> AsyncIterator[StreamRecord]:
        """Committed records from the first that ends behind `from_offset` on, to the last there is now. Where the
        beginning was truncated: from the first that is left."""
        for row in self._kind.payloads(self._stream.ino):
            if names.base_offset_of(row.last_name) + row.size > from_offset:
                async for record in self._of_sealed(row, from_offset):
                    yield record
                    from_offset = record.offset + len(record.payload)
        for segment in self._stream.unsealed():
            for record in await trio.to_thread.run_sync(self._of_unsealed, segment, from_offset):
                yield record

    async def tail(self, from_offset: int | None = None) -> AsyncIterator[StreamRecord]:
        """The same, on and on: as records are committed. None: from the end there is now."""
        at = self._stream.committed_logical if from_offset is None else from_offset
        while True:
            moved = self._stream.moved
            async for record in self.read(at):
                yield record
                at = record.offset + len(record.payload)
            if self._stream.committed_logical <= at:
                await moved.wait()

    async def _of_sealed(self, payload: InodeRow, from_offset: int) -> AsyncIterator[StreamRecord]:
        inos = (payload.ino, names.index_ino(payload.ino))
        keys = [(stream_of(ino), ino, rows.GENERATION) for ino in inos]
        async with opened_raw(self._volume, *keys) as raw:
            index = raw.index
            first = index.find(from_offset)
            if first and (first == index.record_count or index.columns(first, 1).logical_offset[0] > from_offset):
                first -= 1  # the one that holds it
            for at in range(first, index.record_count, RECORDS_AT_ONCE):
                count = min(RECORDS_AT_ONCE, index.record_count - at)
                c = index.columns(at, count)
                start, length = c.start[0], c.start[count - 1] + c.length[count - 1] - c.start[0]
                data = await raw.payloads(start, length)
                if (good := index.check(data, start, at, count)) < count:
                    raise raw.damaged(at + good)
                for i in range(count):
                    piece = data[c.start[i] - start : c.start[i] - start + c.length[i]]
                    yield StreamRecord(c.logical_offset[i], c.timestamp_ms[i], c.ext_id[i], c.flags[i], piece)

    def _of_unsealed(self, segment: Segment, from_offset: int) -> list[StreamRecord]:
        if segment.committed_logical <= max(from_offset, segment.base_offset):
            return []
        with SegmentReader(self._volume.env, segment.path, end=segment.committed_end) as reader:
            return [
                StreamRecord(r.logical_offset, r.timestamp_ms, r.ext_id, r.flags, bytes(r.payload))
                for r in reader.records_from(from_offset)
            ]


@contextlib.asynccontextmanager
async def open_stream(settings: Settings, path: str, *, env: Env | None = None) -> AsyncIterator[OpenStream]:
    """The stream at `tenant/directory/…` of a volume that is not mounted; what is not there of its path is made."""
    async with open_volume(settings, env=env) as volume, stream_of_volume(volume, path) as stream:
        yield stream


@contextlib.asynccontextmanager
async def stream_of_volume(volume: Volume, path: str) -> AsyncIterator[OpenStream]:
    """The same, of a volume that the program has open."""
    opens, kernel = Opens(), no_kernel()
    files = Files(volume, kernel, opens)
    at = Surroundings(volume, kernel, opens, MountWish(passthrough=False), {})
    tenants = volume.tenants.by_kind().get(APPEND_NUMBER, {})
    kind = AppendKind(at._replace(tenants=tenants, made={0: FilesKind(at, files)}))
    kind.streams.native = False
    async with trio.open_nursery() as nursery:
        await nursery.start(files.run)
        await nursery.start(kind.run)
        ino = await _make(kind, volume, path)
        with kind.streams.using(ino) as stream:
            yield OpenStream(volume, kind, stream)
            await stream.commit()
        nursery.cancel_scope.cancel()


async def _make(kind: AppendKind, volume: Volume, path: str) -> int:
    tenant, *parts = [part for part in path.split("/") if part]
    by_name = {name: stream_id for stream_id, name in kind.tenants.items()}
    if tenant not in by_name or not parts:
        raise os_error(errno.ENOENT, path)
    ino = namespace.root_ino(by_name[tenant])
    caller = Caller(os.getuid(), os.getgid())
    for part in map(os.fsencode, parts):
        row = kind.find(ino, part)
        ino = (row if row is not None else await kind.mkdir(ino, part, 0o755, caller)).ino
    if not kind.is_stream(ino):
        raise os_error(errno.ENOTDIR, path)
    return ino
