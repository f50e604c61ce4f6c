"""Sealing: a segment that is full becomes a payload file and its index, which appear in one commit.

    footer, synced ──► two backing files, split, hashed, synced ──► names, objects, position: one commit, synced
                                                                ──► the segment's own file goes

One segment of a stream is sealed at a time, in order; those of several streams beside each other.

Invariants
- The segment's file goes after the commit is durable: at each moment its records are in one place or in both.
- What was given up meanwhile gets no names (`Stream.naming`).
- A segment that turns out to be damaged is left as it is, and its stream takes no records: they would leave a gap.

Owner: the trio thread; files are made on worker threads. A crash leaves a segment's file, perhaps with a footer,
perhaps backing files without rows, perhaps a file that the catalog has already: `recover.py` tells them apart.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from aof2.engine import objects
from aof2.engine.aio import result_of
from aof2.engine.append import names, rows
from aof2.engine.append.segment import Segment
from aof2.engine.append.stream import SealedPart, Stream
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ObjectRow, stream_of
from aof2.engine.errors import Aof2Error, CorruptError, FatalIOError, ReadOnlyError
from aof2.engine.jobs.checkpoint import Begun
from aof2.engine.segment import pointer
from aof2.engine.segment.index import split
from aof2.engine.tiering.hashing import digest_file
from aof2.engine.tiering.recent import units_of

if TYPE_CHECKING:
    from aof2.engine.append.streams import Streams

log = logging.getLogger(__name__)

RETRY_S: Final = 2.0
PARALLEL: Final = 2
QUIET_S: Final = 0.25
LET_PASS_S: Final = 2.0
FULL_MAX: Final = 8  # segments of a stream that wait to be sealed
CRASH_POINTS: Final = (
    "append.opened",
    "append.seal.footer",
    "append.seal.split",
    "append.seal.synced",
    "append.seal.recorded",
    "append.seal.removed",
)


class _Made(NamedTuple):
    payload_file: rows.SealedFile
    index_file: rows.SealedFile


class Sealing:
    """What becomes of segments that are full."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._volume = streams.volume
        self._limiter = trio.CapacityLimiter(PARALLEL)
        self.sealed_segments = 0

    def soon(self, stream: Stream) -> None:
        if not stream.sealing and stream.full:
            stream.sealing = self._streams.tasks.begin(self._run, stream)

    async def _run(self, stream: Stream) -> None:
        try:
            while stream.full:
                segment = stream.full[0]
                await self._let_pass(stream)
                try:
                    await self._one(stream, segment)
                except (ReadOnlyError, FatalIOError, CorruptError) as e:
                    self._failed(stream, segment, e)
                    log.critical("a segment stays unsealed", extra={"path": str(segment.path), "error": str(e)})
                    if isinstance(e, CorruptError):
                        stream.refusal = str(e)
                    return
                except (Aof2Error, OSError) as e:
                    log.warning("a segment is sealed later", extra={"path": str(segment.path), "error": str(e)})
                    self._failed(stream, segment, e)
                    await trio.sleep(RETRY_S)
        finally:
            stream.sealing = False
            self._streams.let_go(stream)

    async def _let_pass(self, stream: Stream) -> None:
        """Splitting and hashing take the processor from those who append: they go first, for a while, unless a caller
        waits for the seal or there is much to be sealed."""
        until_s = trio.current_time() + LET_PASS_S
        while not stream.is_hurried and len(stream.full) < FULL_MAX:
            quiet_s = min(stream.appended_s + QUIET_S, until_s) - trio.current_time()
            if quiet_s <= 0:
                return
            with trio.move_on_after(quiet_s):
                await stream.hurried.wait()

    def _failed(self, stream: Stream, segment: Segment, e: Exception) -> None:
        segment.error = e
        self._turn(stream)

    def _turn(self, stream: Stream) -> None:
        turned, stream.turned = stream.turned, trio.Event()
        turned.set()

    async def _one(self, stream: Stream, segment: Segment) -> None:
        segment.error = None
        if not segment.dropped:
            await self._seal(stream, segment)
        if segment.dropped:
            await self._drop(stream, segment)
        await trio.to_thread.run_sync(self._remove, segment)
        segment.room.freed()
        if stream.full and stream.full[0] is segment:
            stream.full.popleft()
        segment.over.set()
        self._turn(stream)

    async def _drop(self, stream: Stream, segment: Segment) -> None:
        work = partial(rows.drop_segment, ids=segment.ids)
        await result_of(self._volume.writer.submit(stream_of(stream.ino), work, sync=True))

    # -- sealing -----------------------------------------------------------------------------------------------

    async def _seal(self, stream: Stream, segment: Segment) -> None:
        env, stream_id = self._volume.env, stream_of(stream.ino)
        watermark = await result_of(self._volume.writer.submit(stream_id, lambda b: b.ordinal))
        await stream.write_footer(segment, watermark)
        env.failpoint("append.seal.footer")
        made = await trio.to_thread.run_sync(self._make_files, stream, segment, limiter=self._limiter)
        env.failpoint("append.seal.synced")
        async with stream.naming:
            if segment.dropped:
                return
            with trio.CancelScope(shield=True):  # the job is claimed, and started with it
                await self._record(stream, segment, made)
        env.failpoint("append.seal.recorded")

    def _make_files(self, stream: Stream, segment: Segment) -> _Made:
        """Payload file and index of a segment with a footer, synced. Blocks."""
        volume, raw = self._volume, segment.raw
        files, hot = volume.env.files, volume.hot
        if raw is None:
            raise ValueError(f"segment {segment.segment_id} has no footer")
        pointer.publish(volume.env, stream.folder, raw)
        paths = [self._backing(stream, ino) for ino in (segment.ids.payload_ino, segment.ids.index_ino)]
        with (
            files.closing(files.open_ro(raw.path)) as raw_fd,
            files.closing(hot.create(paths[0])) as payload_fd,
            files.closing(hot.create(paths[1])) as index_fd,
        ):
            sizes = split(raw_fd, payload_fd, index_fd, path=str(raw.path))
            volume.env.failpoint("append.seal.split")
            payload = self._file(segment.ids.payload_ino, payload_fd, sizes.payload_bytes, paths[0])
            index = self._file(segment.ids.index_ino, index_fd, sizes.index_bytes, paths[1])
            files.fsync_all([payload_fd, index_fd])
            files.fsync_dir(paths[0].parent)
        return _Made(payload, index)

    def _backing(self, stream: Stream, ino: int) -> Path:
        return self._volume.hot.path(stream.tenant, ino, rows.GENERATION)

    def _file(self, ino: int, fd: int, size: int, path: Path) -> rows.SealedFile:
        engine = self._volume.settings.engine
        digest = digest_file(fd, size, chunk_bytes=engine.chunk_bytes, block_bytes=engine.block_bytes, path=str(path))
        identity = self._volume.hot.identity(fd)
        return rows.SealedFile(ino, digest, identity, identity.mtime_ns)

    async def _record(self, stream: Stream, segment: Segment, made: _Made) -> None:
        volume, stream_id, raw = self._volume, stream_of(stream.ino), segment.raw
        if raw is None:
            raise ValueError(f"segment {segment.segment_id} has no footer")
        footer, engine = raw.footer, volume.settings.engine
        record = rows.seal_record(footer)
        one = rows.Sealed(
            *(stream.ino, segment.ids, segment.base_offset, stream.settings.ext),
            *(made.payload_file, made.index_file, record, segment.position),
        )
        with volume.jobs.beginning(stream_id, wanted=stream.begins) as begin_job:

            def work(b: Batch) -> tuple[list[ObjectRow], Begun | None]:
                sealed = rows.seal(b, one, chunk_bytes=engine.chunk_bytes, block_bytes=engine.block_bytes)
                return sealed, begin_job(b, sealed)

            _, job = await result_of(volume.writer.submit(stream_id, work, sync=True))
        self._sealed(stream, segment, made)
        volume.jobs.begun(stream_id, made.payload_file.digest.data_bytes + made.index_file.digest.data_bytes, job)

    def _sealed(self, stream: Stream, segment: Segment, made: _Made) -> None:
        """The commit is in, durably."""
        self.sealed_segments += 1
        stream.position = segment.position
        stream.full.popleft()
        stream.begins = stream.begins and bool(stream.full)
        stream.sealed_lately.append(SealedPart(segment.base_offset, segment.next_logical, segment.ids.payload_ino))
        files_bytes = 0
        for file in made:
            disk_bytes = objects.digest_disk_bytes(file.digest, self._volume.settings.engine.block_bytes)
            self._volume.recent.hot.touched(file.ino)
            self._volume.recent.hot.sized(file.ino, units_of(disk_bytes))
            files_bytes += disk_bytes
        segment.room.sealed(files_bytes)
        self._streams.appeared(stream, names.payload_name(segment.base_offset, stream.settings.ext), segment.segment_id)

    # -- afterwards --------------------------------------------------------------------------------------------

    def _remove(self, segment: Segment) -> None:
        """The segment's file, and, where it was given up, what was made of it. Blocks."""
        segment.close()
        if segment.dropped:
            for ino in (segment.ids.payload_ino, segment.ids.index_ino):
                self._volume.hot.unlink(self._volume.hot.path(segment.room.tenant, ino, rows.GENERATION))
        with contextlib.suppress(FileNotFoundError):
            self._volume.env.files.unlink(segment.path)
        self._volume.env.failpoint("append.seal.removed")
