"""Records that come by the inbox: segments whose payloads stay where they were put, with an index that is made here.

    numbers given out → each segment read and checked, its index made → indexes put → the stream at rest
    → names, objects, position, the job's row: one commit, synced

A record's checksum covers its offset and time, which depend on what is before it in the stream: so the payload blob can
stay, the index (36 bytes a record) cannot. Reading a payload proves each of its records as well. That is done before
the stream is held, for the position that it has then; only where records came meanwhile it is done again, with the
stream's writers waiting, as they wait for a delivery from this machine (`delivery.py`).

Invariants
- All records of a job are in the stream, or none; with `overwrite`, what was there went in the same commit.
- Offsets have no gap, times do not go back.
- An index is in the remote, whole, before the commit that names it; its upload is announced before.

Owner: the trio thread; segments are made on worker threads, one at a time: a payload and an index are in memory. A
crash leaves uploads that were begun, which the prune clears away.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from aof2 import native
from aof2.engine import delivered, namespace, objects
from aof2.engine.aio import result_of
from aof2.engine.append import names, rows
from aof2.engine.append.framing import HEADER, OVERHEAD
from aof2.engine.append.rows import Position
from aof2.engine.blob.reader import BlobReader
from aof2.engine.blob.writer import BlobWriter
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, DeliveryRow, InodeRow
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.inbox.check import CheckedBlob, CheckedJob, CheckedSegment
from aof2.engine.inbox.format import RefusedError, split_path
from aof2.engine.kinds.kernel import Framing
from aof2.engine.kinds.kind import Caller
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import chunk_blob_key
from aof2.engine.remote.location import LocatedBlob, Location
from aof2.engine.segment import format as fmt
from aof2.engine.segment.index import SegmentIndex
from aof2.engine.tiering.hashing import digest_chunk
from aof2.native import crc64, frame_lines
from aof2.native.segment_index import index_rebase

if TYPE_CHECKING:
    from aof2.engine.append.kind import AppendKind
    from aof2.engine.append.stream import Stream

CRASH_POINTS: Final = ("inbox.stream.numbered", "inbox.stream.put", "inbox.stream.published")


class Numbers(NamedTuple):
    """What a segment's two files will be called."""

    ids: rows.Ids
    index_chunk_id: int


class Given(NamedTuple):
    numbers: list[Numbers]
    checkpoint_id: int
    watermark: int


class Made(NamedTuple):
    """A segment whose two blobs are in the remote; no row speaks of it."""

    numbers: Numbers
    header: fmt.SegmentHeader
    footer: fmt.SegmentFooter
    payload: CheckedBlob
    index_file: CheckedBlob
    position: Position


async def take_in(kind: AppendKind, tenant_id: int, job: CheckedJob) -> DeliveryRow:
    """See `Kind.take_in`."""
    await kind.fold()
    before = kind.volume.catalog.get(tenant_id, t.DELIVERIES, job.job_id)
    if before is not None:
        return before
    ino = await _stream_of(kind, namespace.root_ino(tenant_id), job)
    with kind.streams.using(ino) as stream:
        row, gone = await Arrival(kind, stream, tenant_id, job).run()
        kind.went(gone)
    return row


async def _stream_of(kind: AppendKind, at: int, job: CheckedJob) -> int:
    """The directory; what of it is not there is made."""
    for name in split_path(job.to):
        try:
            row = kind.find(at, name)
            if row is None:
                above = kind.row(at)
                row = await kind.mkdir(at, name, stat.S_IMODE(above.mode), Caller(above.uid, above.gid))
        except OSError as e:
            raise RefusedError(f"{job.to}: {(e.strerror or '').lower()}") from None
        if not stat.S_ISDIR(row.mode) or not kind.is_stream(row.ino):
            raise RefusedError(f"{job.to}: not a stream")
        at = row.ino
    return at


class Arrival:
    """One job, for one stream."""

    def __init__(self, kind: AppendKind, stream: Stream, tenant_id: int, job: CheckedJob) -> None:
        self._kind = kind
        self._volume = kind.volume
        self._stream = stream
        self._tenant_id = tenant_id
        self._job = job

    async def run(self) -> tuple[DeliveryRow, list[InodeRow]]:
        stream = self._stream
        base = stream.end_position
        given, made = await self._prepare(base)
        async with stream.at_rest():
            if stream.position[:3] != base[:3]:
                given, made = await self._prepare(stream.position)  # records came meanwhile
            async with stream.naming:
                with trio.CancelScope(shield=True):
                    done = await self._record(given, made)
        return done

    async def _prepare(self, base: Position) -> tuple[Given, list[Made]]:
        volume = self._volume
        given: Given = await result_of(volume.writer.submit(self._tenant_id, self._give_numbers))
        volume.env.failpoint("inbox.stream.numbered")
        made: list[Made] = []
        for segment, numbers in zip(self._job.segments, given.numbers, strict=True):
            some, key, blob = await trio.to_thread.run_sync(self._make, segment, numbers, base, given)
            started = partial(objects.upload_started, keys=[(numbers.index_chunk_id, key)])
            await result_of(volume.writer.submit(self._tenant_id, started, sync=True))
            put = partial(volume.remote.put_blob, key, blob, len(blob), crc64=native.crc64(blob))
            etag = await trio.to_thread.run_sync(put)
            made.append(some._replace(index_file=some.index_file._replace(etag=etag)))
            base = some.position
        volume.env.failpoint("inbox.stream.put")
        return given, made

    def _give_numbers(self, b: Batch) -> Given:
        numbers = []
        for _ in self._job.segments:
            segment_id, index_chunk_id = b.next_id("chunk_id"), b.next_id("chunk_id")
            ino = b.stream_id << INO_STREAM_SHIFT | b.next_id("ino", step=2)
            numbers.append(Numbers(rows.Ids(segment_id, ino), index_chunk_id))
        return Given(numbers, b.next_id("checkpoint_id"), b.ordinal)

    # -- making: on a worker thread ----------------------------------------------------------------------------

    def _make(self, segment: CheckedSegment, numbers: Numbers, base: Position, given: Given) -> tuple[Made, str, bytes]:
        """The segment at its place in the stream, its index's key and blob."""
        stream, engine = self._stream, self._volume.settings.engine
        try:
            staged = SegmentIndex.decode(self._read(segment.index_blob), path=segment.index_blob.key)
            payload = self._read(segment.payload)
        except RemoteMissingError as e:
            raise RefusedError(f"missing in the remote: {e}") from None
        except (CorruptError, UnsupportedError) as e:
            raise RefusedError(f"a blob is damaged: {e}") from None
        self._check_records(segment, staged, payload)
        records = staged.records()
        headers = bytearray(records.headers)
        first_ms = max(int(records.part(0, 1).columns().timestamp_ms[0]), base.last_ts_ms)
        raw_bytes = HEADER + records.count * OVERHEAD + len(payload)
        most = max(stream.settings.segment_bytes, raw_bytes + fmt.FOOTER_BYTES[fmt.Version.V3])
        header = fmt.SegmentHeader(
            *(int(fmt.Version.V3), stream.ino, numbers.ids.segment_id, first_ms, base.next_logical),
            *(base.record_count, most, 0),
        )
        done = index_rebase(
            *(headers, records.starts, payload, 0),
            logical_first=base.next_logical,
            last_ts_ms=base.last_ts_ms,
            crc64=crc64(fmt.encode_header(header)),
        )
        if done.good < records.count:
            raise RefusedError(f"{segment.payload.key}: record {done.good} fails its checksum")
        footer = fmt.SegmentFooter(
            *(int(fmt.Version.V3), records.count, raw_bytes, done.crc64),
            segment_id=numbers.ids.segment_id,
            last_record_ts_ms=done.last_ts_ms,
        )
        footer = replace(footer, coordinator_watermark=given.watermark)
        index = fmt.encode_header(header) + fmt.encode_footer(footer) + headers
        if len(index) > engine.chunk_bytes:
            raise RefusedError(f"{segment.index_blob.key}: an index of {len(index)} bytes; deliver shorter segments")
        checked, blob = self._index_blob(index, numbers, given)
        end = Position(
            *(base.next_logical + len(payload), base.record_count + records.count),
            *(done.last_ts_ms, numbers.ids.segment_id),
        )
        return Made(numbers, header, footer, segment.payload, checked, end), checked.key, blob

    def _read(self, blob: CheckedBlob) -> bytes:
        """All of it, each block and the whole proven."""
        located = LocatedBlob(self._volume.remote, Location(blob.key, blob.offset, blob.stored_bytes))
        return b"".join(BlobReader(located.read, blob.stored_bytes, sha256=blob.sha256, path=blob.key).blocks())

    def _check_records(self, segment: CheckedSegment, staged: SegmentIndex, payload: bytes) -> None:
        lengths, key = staged.records().columns().length, segment.index_blob.key
        if staged.record_count != segment.records or staged.payload_bytes != len(payload) or staged.header.base_offset:
            raise RefusedError(f"{key}: it is not the index of {segment.records} records of {segment.payload.key}")
        if not 0 < min(lengths) <= max(lengths) <= self._stream.record_max:
            raise RefusedError(f"{key}: a record of {max(lengths)} bytes; one has 1 to {self._stream.record_max} here")
        if self._stream.framing is Framing.LINE:
            found, _ = frame_lines(payload, self._stream.record_max)
            if found.tobytes() != bytes(lengths):
                raise RefusedError(f"{segment.payload.key}: a record of a stream of lines is one line with its newline")

    def _index_blob(self, index: bytes, numbers: Numbers, given: Given) -> tuple[CheckedBlob, bytes]:
        block_bytes, out = self._volume.settings.engine.block_bytes, bytearray()
        chunk_id, generation = numbers.index_chunk_id, rows.GENERATION
        writer = BlobWriter(out.extend, chunk_id=chunk_id, generation=generation, block_bytes=block_bytes)
        view = memoryview(index)
        for at in range(0, len(view), block_bytes):
            writer.add_block(view[at : at + block_bytes])
        footer, digest = writer.finish(), digest_chunk(view, block_bytes=block_bytes)
        key = chunk_blob_key(self._stream.tenant, given.checkpoint_id, chunk_id, generation, footer.sha256)
        compression = "zstd" if any(frame.codec for frame in footer.frames) else ""
        checked = CheckedBlob(
            footer.sha256, len(index), digest.crc64, digest.block_crcs, key, 0, len(out), "", compression, 0
        )
        return checked, bytes(out)

    # -- recording ---------------------------------------------------------------------------------------------

    async def _record(self, given: Given, made: Sequence[Made]) -> tuple[DeliveryRow, list[InodeRow]]:
        volume, stream = self._volume, self._stream
        before = stream.position
        end = made[-1].position if made else before
        work = partial(self._publish, given=given, made=made, before=before, end=end)
        row, gone, is_new = await result_of(volume.writer.submit(self._tenant_id, work, sync=True))
        volume.env.failpoint("inbox.stream.published")
        if is_new:
            stream.position = end
            for one in made:
                name = names.payload_name(one.header.base_offset, stream.settings.ext)
                self._kind.streams.appeared(stream, name, one.numbers.ids.segment_id)
        return row, gone

    def _publish(
        self, b: Batch, given: Given, made: Sequence[Made], before: Position, end: Position
    ) -> tuple[DeliveryRow, list[InodeRow], bool]:
        done = b.get(t.DELIVERIES, self._job.job_id)
        if done is not None:
            return done, [], False
        gone: list[InodeRow] = []
        if self._job.overwrite:
            ext, is_open = self._stream.settings.ext, self._kind.files.known.must_stay
            gone = rows.unlink_segments(b, self._stream.ino, ext, is_open)
        delivered.begin_job(b)
        for one in made:
            self._publish_one(b, one, given.checkpoint_id)
        if made:
            rows.put_position(b, self._stream.ino, end)
            staged = (blob for one in self._job.segments for blob in (one.payload, one.index_blob))
            delivered.drop_unnamed(b, staged, made[-1].numbers.ids.segment_id)
        size, count = end.next_logical - before.next_logical, end.record_count - before.record_count
        row = DeliveryRow(b.now_ms, len(made), size, count, before.next_logical, end.next_logical)
        b.put(t.DELIVERIES, self._job.job_id, row)
        return row, gone, True

    def _publish_one(self, b: Batch, one: Made, checkpoint_id: int) -> None:
        ids, footer = one.numbers.ids, one.footer
        stream = namespace.get_inode(b, self._stream.ino)
        below = namespace.lookup(b, stream.ino, names.SEGMENTS).ino
        payload_name = names.payload_name(one.header.base_offset, self._stream.settings.ext)
        index_name = names.index_name(ids.segment_id)
        namespace.bring(b, stream.ino, payload_name, like=stream, size=one.payload.length, ino=ids.payload_ino)
        namespace.bring(b, below, index_name, like=stream, size=one.index_file.length, ino=ids.index_ino)
        sealed = rows.seal_record(footer)
        chunk_bytes = self._volume.settings.engine.chunk_bytes
        put = partial(delivered.make_object, b, chunk_bytes=chunk_bytes, checkpoint_id=checkpoint_id)
        put(
            *(ids.payload_ino, one.payload.sha256, [one.payload]),
            chunk_ids=[ids.segment_id],
            base_offset=one.header.base_offset,
            sealed=sealed,
        )
        put(ids.index_ino, one.index_file.sha256, [one.index_file], chunk_ids=[one.numbers.index_chunk_id])
