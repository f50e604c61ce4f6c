"""Delivery: records that were staged beside the stream come into it, all of them by one commit.

    staged: payloads and an index, as a sealed segment has them, with offsets from 0 on; several a job
      ──► the stream at rest ──► segments made of them: offsets, times, checksums anew
      ──► names, objects, position, job: one commit, synced

The one that staged asks for it by the job's number, and asks again where it got no answer: a job that was delivered is
answered from its row, and changes nothing. Records of a job are in the order of its files.

Invariants
- All records of a job are in the stream, or none; with `overwrite`, what was there went in the same commit.
- Records are checked where they are staged: one that is damaged refuses the job.
- Offsets have no gap, times do not go back: a record that was staged earlier than the last one was appended has that
  one's time.

Owner: the trio thread, with the stream's lock held: its writers wait. Files are made on worker threads. A crash leaves
segments that were opened and have no file in the stream's folder, perhaps backing files: `recover.py` removes both.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from aof2.engine import namespace, objects
from aof2.engine.aio import result_of
from aof2.engine.append import names, rows
from aof2.engine.append.framing import HEADER, OVERHEAD
from aof2.engine.append.rows import Ids, Position
from aof2.engine.append.staged import Piece, index_bytes, payload_bytes, plan, steps
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import InodeRow, ObjectRow, stream_of
from aof2.engine.errors import CorruptError, os_error
from aof2.engine.files.seek import Writing
from aof2.engine.jobs.checkpoint import Begun
from aof2.engine.kinds.kernel import Framing
from aof2.engine.kinds.kind import Delivered, StagedJob
from aof2.engine.local.sparse import on_disk
from aof2.engine.segment import format as fmt
from aof2.engine.segment.index import INDEX_FIXED_BYTES, RecordRange
from aof2.engine.tiering.hashing import digest_file
from aof2.engine.tiering.recent import units_of
from aof2.native import crc64, frame_lines
from aof2.native.segment_index import index_rebase

if TYPE_CHECKING:
    from aof2.engine.append.stream import Stream
    from aof2.engine.append.streams import Streams

JOB_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
CRASH_POINTS: Final = ("append.deliver.opened", "append.deliver.made", "append.deliver.recorded")


class _Made(NamedTuple):
    """A segment of the job: its files are there, its rows are not."""

    ids: Ids
    header: fmt.SegmentHeader
    footer: fmt.SegmentFooter
    payload_file: rows.SealedFile
    index_file: rows.SealedFile
    position: Position


class Delivery:
    """One job, for one stream."""

    def __init__(self, streams: Streams, stream: Stream, job: StagedJob) -> None:
        self._streams = streams
        self._volume = streams.volume
        self._stream = stream
        self._job = job

    async def run(self, is_open: namespace.IsOpen) -> tuple[Delivered, list[InodeRow]]:
        """What the job brought, now or before; files that lost their names to it."""
        if JOB_ID.fullmatch(self._job.job_id) is None:
            raise os_error(errno.EINVAL, self._job.job_id)
        done = self._before()
        if done is not None:
            return done, []
        planned = await trio.to_thread.run_sync(plan, self._job.files, self._stream.settings, self._stream.record_max)
        async with self._stream.at_rest():
            done = self._before()
            if done is not None:
                return done, []
            return await self._deliver(planned, is_open)

    def _before(self) -> Delivered | None:
        with self._volume.catalog.view() as view:
            return rows.delivered(view, stream_of(self._stream.ino), self._stream.ino, self._job.job_id)

    # -- delivering --------------------------------------------------------------------------------------------

    async def _deliver(self, planned: list[list[Piece]], is_open: namespace.IsOpen) -> tuple[Delivered, list[InodeRow]]:
        stream, volume, stream_id = self._stream, self._volume, stream_of(self._stream.ino)
        size = sum(on_disk(payload_bytes(some)) + on_disk(index_bytes(some)) for some in planned)
        async with self._room(size) as took:
            ids, watermark = await result_of(volume.writer.submit(stream_id, partial(self._open, planned)))
            try:
                volume.env.failpoint("append.deliver.opened")
                made = await trio.to_thread.run_sync(self._make, planned, ids, watermark)
                volume.env.failpoint("append.deliver.made")
                async with stream.naming:
                    with trio.CancelScope(shield=True):
                        done, gone = await self._record(made, is_open)
            except BaseException:
                with trio.CancelScope(shield=True):
                    await self._give_up(ids)
                raise
            took(made)
        volume.env.failpoint("append.deliver.recorded")
        return done, gone

    @contextlib.asynccontextmanager
    async def _room(self, size: int) -> AsyncIterator[Callable[[Sequence[_Made]], None]]:
        """Reserved of quota and disk; what was used of it is told."""
        stream = self._stream
        seeker = self._streams.files.room.seeker
        reservation = await seeker.take(Writing(stream.tenant, stream.ino, 0), size, size) if size else None

        def took(made: Sequence[_Made]) -> None:
            used = sum(self._disk_bytes(file) for one in made for file in (one.payload_file, one.index_file))
            if reservation is not None:
                reservation.commit(min(used, reservation.remaining_bytes))

        try:
            yield took
        finally:
            if reservation is not None:
                reservation.release()

    def _disk_bytes(self, file: rows.SealedFile) -> int:
        return objects.digest_disk_bytes(file.digest, self._volume.settings.engine.block_bytes)

    def _open(self, planned: list[list[Piece]], b: Batch) -> tuple[list[Ids], int]:
        base, found, watermark = self._stream.position.next_logical, [], b.ordinal
        for some in planned:
            found.append(rows.open_segment(b, self._stream.ino, base))
            base += payload_bytes(some)
        return found, watermark

    async def _give_up(self, ids: Sequence[Ids]) -> None:
        def drop(b: Batch) -> None:
            for one in ids:
                rows.drop_segment(b, one)

        await result_of(self._volume.writer.submit(stream_of(self._stream.ino), drop))
        await trio.to_thread.run_sync(self._remove_files, ids)

    def _remove_files(self, ids: Sequence[Ids]) -> None:
        for one in ids:
            for ino in (one.payload_ino, one.index_ino):
                self._volume.hot.unlink(self._backing(ino))

    # -- making files: on a worker thread ----------------------------------------------------------------------

    def _make(self, planned: list[list[Piece]], ids: Sequence[Ids], watermark: int) -> list[_Made]:
        position: Position = self._stream.position
        made: list[_Made] = []
        for some, one in zip(planned, ids, strict=True):
            made.append(self._make_one(some, one, position, watermark))
            position = made[-1].position
        return made

    def _make_one(self, pieces: Sequence[Piece], ids: Ids, position: Position, watermark: int) -> _Made:
        stream, files, hot = self._stream, self._volume.env.files, self._volume.hot
        first_ms = max(pieces[0].first_ms, position.last_ts_ms)
        header = fmt.SegmentHeader(
            *(int(fmt.Version.V3), stream.ino, ids.segment_id, first_ms, position.next_logical),
            *(position.record_count, stream.settings.segment_bytes, 0),
        )
        paths = [self._backing(ino) for ino in (ids.payload_ino, ids.index_ino)]
        with (
            files.closing(hot.create(paths[0])) as payload_fd,
            files.closing(hot.create(paths[1])) as index_fd,
        ):
            written = self._write(pieces, header, position.last_ts_ms, payload_fd, index_fd)
            footer = replace(written, coordinator_watermark=watermark)
            files.pwrite(index_fd, fmt.encode_header(header) + fmt.encode_footer(footer), 0)
            payload = self._sealed_file(ids.payload_ino, payload_fd, payload_bytes(pieces), paths[0])
            index = self._sealed_file(ids.index_ino, index_fd, index_bytes(pieces), paths[1])
            files.fsync_all([payload_fd, index_fd])
            files.fsync_dir(paths[0].parent)
        end = Position(
            position.next_logical + payload_bytes(pieces),
            position.record_count + footer.record_count,
            footer.last_record_ts_ms,
            ids.segment_id,
        )
        return _Made(ids, header, footer, payload, index, end)

    def _write(
        self, pieces: Sequence[Piece], header: fmt.SegmentHeader, last_ms: int, payload_fd: int, index_fd: int
    ) -> fmt.SegmentFooter:
        """Payload file and record headers, as the raw segment would have them; the footer that belongs to it."""
        files, crc, payload_at, count = self._volume.env.files, crc64(fmt.encode_header(header)), 0, 0
        for piece in pieces:
            for part, data in steps(piece):
                self._check_lines(part, data, piece)
                headers = bytearray(part.headers)
                start = int(part.starts[0])
                done = index_rebase(
                    *(headers, part.starts, data, start),
                    logical_first=header.base_offset + payload_at,
                    last_ts_ms=last_ms,
                    crc64=crc,
                )
                if done.good < part.count:
                    raise CorruptError("a staged record is damaged", path=str(piece.file.payload_path), offset=start)
                files.pwrite(payload_fd, data, payload_at)
                files.pwrite(index_fd, headers, INDEX_FIXED_BYTES + count * OVERHEAD)
                crc, last_ms = done.crc64, done.last_ts_ms
                payload_at, count = payload_at + len(data), count + part.count
        durable = HEADER + count * OVERHEAD + payload_at
        return fmt.SegmentFooter(
            *(int(fmt.Version.V3), count, durable, crc),
            segment_id=header.segment_id,
            last_record_ts_ms=last_ms,
        )

    def _check_lines(self, part: RecordRange, data: bytes, piece: Piece) -> None:
        """A record of a stream of lines is a line: readers of the payload file cut it there."""
        if self._stream.framing is not Framing.LINE:
            return
        lengths, _ = frame_lines(data, self._stream.record_max)
        if lengths.tobytes() != bytes(part.columns().length):
            raise os_error(errno.EINVAL, str(piece.file.payload_path))

    def _backing(self, ino: int) -> Path:
        return self._volume.hot.path(self._stream.tenant, ino, rows.GENERATION)

    def _sealed_file(self, ino: int, fd: int, size: int, path: Path) -> rows.SealedFile:
        engine = self._volume.settings.engine
        digest = digest_file(fd, size, chunk_bytes=engine.chunk_bytes, block_bytes=engine.block_bytes, path=str(path))
        identity = self._volume.hot.identity(fd)
        return rows.SealedFile(ino, digest, identity, identity.mtime_ns)

    # -- recording ---------------------------------------------------------------------------------------------

    async def _record(self, made: Sequence[_Made], is_open: namespace.IsOpen) -> tuple[Delivered, list[InodeRow]]:
        volume, stream, stream_id = self._volume, self._stream, stream_of(self._stream.ino)
        engine, before = volume.settings.engine, stream.position
        end = made[-1].position if made else before
        with volume.jobs.beginning(stream_id, wanted=True) as begin_job:

            def work(b: Batch) -> tuple[Delivered, list[InodeRow], Begun | None]:
                gone: list[InodeRow] = []
                if self._job.overwrite:
                    gone = rows.unlink_segments(b, stream.ino, stream.settings.ext, is_open)
                sealed: list[ObjectRow] = []
                for one in made:
                    about = self._sealed(one)
                    sealed += rows.seal(b, about, chunk_bytes=engine.chunk_bytes, block_bytes=engine.block_bytes)
                records = end.record_count - before.record_count
                done = Delivered(before.next_logical, end.next_logical, records, b.now_ms)
                rows.put_job(b, stream.ino, self._job.job_id, done)
                return done, gone, begin_job(b, sealed) if sealed else None

            done, gone, job = await result_of(volume.writer.submit(stream_id, work, sync=True))
        stream.position = end
        for one in made:
            self._appeared(one)
        if made:
            volume.jobs.begun(stream_id, end.next_logical - before.next_logical, job)
        return done, gone

    def _sealed(self, one: _Made) -> rows.Sealed:
        return rows.Sealed(
            *(self._stream.ino, one.ids, one.header.base_offset, self._stream.settings.ext),
            *(one.payload_file, one.index_file, rows.seal_record(one.footer), one.position),
        )

    def _appeared(self, one: _Made) -> None:
        for file in (one.payload_file, one.index_file):
            self._volume.recent.hot.touched(file.ino)
            self._volume.recent.hot.sized(file.ino, units_of(self._disk_bytes(file)))
        name = names.payload_name(one.header.base_offset, self._stream.settings.ext)
        self._streams.appeared(self._stream, name, one.ids.segment_id)
