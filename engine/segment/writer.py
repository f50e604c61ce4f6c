"""SegmentWriter: appends records to one segment file, makes them durable, seals the file once.

The header goes out with the first record, in the same write: a segment that was created and never appended to is an
empty file, and `creation_ts_ms` and `base_offset` are the first record's.

Invariants
- A record counts only when its write returned. A failed reservation or write leaves the writer as it was.
- `segment_crc64` runs along with the appends; nothing is read back.
- After a failed fsync the writer is read-only for good, and can not be sealed: FatalIOError once, then ReadOnlyError.
- `flush` may run on another thread beside appends: it vouches for what was there when it began.
- Sealing is: records synced, footer written, file cut to its exact size, synced, made read-only. It succeeds once.
  Publishing the pointer is another step (pointer.py), and takes what `seal` returned.
- A stream seals a segment before it flushes records into the next one: recovery counts on it.

Owner: one thread at a time; no locks.

What a crash leaves behind: every record before the last `flush` that returned; after it, any mix of pages of later
records over zeros; perhaps a torn footer. Recovery keeps the whole records up to the first hole.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, LimitError, ReadOnlyError
from aof2.engine.segment import format as fmt
from aof2.engine.segment.file import RESERVE_STEP_BYTES, SegmentFile
from aof2.engine.segment.limits import check_footer_flags, check_header, check_order, check_record, check_u64
from aof2.engine.segment.model import ActiveSegment, Position, SealedSegment, segment_path
from aof2.native import crc64, segment_encode

CRASH_POINTS: Final = (
    "segment.create.created",
    "segment.append.reserved",
    "segment.append.written",
    "segment.flush.before",
    "segment.flush.synced",
    "segment.flush.named",
    "segment.seal.footer_written",
    "segment.seal.cut",
    "segment.seal.synced",
)

CAPACITY_BYTES: Final = 64 << 20


class SegmentWriter:
    """One unsealed segment file. Made by `create` or `reopen`; use as a context manager or `close` it."""

    def __init__(self, env: Env, file: SegmentFile, header: fmt.SegmentHeader) -> None:
        self._env = env
        self._file = file
        self._version = fmt.Version(header.version)
        self.header = header
        self.path = file.path
        self.crc64 = 0  # of [0, end_offset)
        self.record_count = 0
        self.next_logical_offset = header.base_offset
        self.last_record_ts_ms = 0
        self.flushed_offset = 0  # everything before it is durable

    @classmethod
    def create(
        cls,
        env: Env,
        directory: Path,
        *,
        stream_id: int,
        segment_id: int,
        base_offset: int = 0,
        base_record_count: int = 0,
        ext_id: int = 0,
        version: int = fmt.Version.V3,
        capacity: int = CAPACITY_BYTES,
        reserve_step_bytes: int = RESERVE_STEP_BYTES,
        path: Path | None = None,
    ) -> SegmentWriter:
        """A new, empty `<segment_id>.seg` in `directory` (or another `path`, for a file that is renamed later).

        `capacity` becomes the header's max_size: what the sealed file may take, header and footer included.
        """
        number = int(fmt.known_version(version))
        header = fmt.SegmentHeader(number, stream_id, segment_id, 0, base_offset, base_record_count, capacity, ext_id)
        check_header(header)
        path = path or segment_path(directory, segment_id)
        fd = env.files.create(path)
        env.failpoint("segment.create.created")
        return cls(env, _segment_file(env, path, fd, header, 0, reserve_step_bytes), header)

    @classmethod
    def reopen(
        cls,
        env: Env,
        active: ActiveSegment,
        *,
        capacity: int = CAPACITY_BYTES,
        reserve_step_bytes: int = RESERVE_STEP_BYTES,
    ) -> SegmentWriter:
        """Goes on where recovery found the end. `capacity` matters for v2 alone, whose header does not keep it."""
        header = active.header if active.header.version != fmt.Version.V2 else replace(active.header, max_size=capacity)
        check_header(header)
        active.path.chmod(0o600)  # a seal that a crash undid may have made it read-only
        fd = env.files.open_rw(active.path)
        try:
            _check_reopened(fd, active)
        except BaseException:
            env.files.close(fd)
            raise
        writer = cls(env, _segment_file(env, active.path, fd, header, active.end_offset, reserve_step_bytes), header)
        writer.crc64 = active.crc64
        writer.record_count = active.record_count
        writer.next_logical_offset = active.next_logical_offset
        writer.last_record_ts_ms = active.last_record_ts_ms
        return writer

    @property
    def end_offset(self) -> int:
        """File offset after the last record; 0 before the first. A reader of this segment passes it as `end`."""
        return self._file.end

    @property
    def fd(self) -> int:
        """For one that appends by itself for a while; `adopt` takes over what it did."""
        return self._file.fd

    @property
    def refused(self) -> bool:
        """Whether it takes no records any more."""
        return bool(self._file.refusal)

    def adopt(self, *, end_offset: int, next_logical_offset: int, record_count: int, crc64: int, ts_ms: int) -> None:
        """Whole records were appended through `fd`, up to there."""
        if end_offset < self.end_offset or record_count < self.record_count:
            raise ValueError(f"{self.path}: ends at {self.end_offset}, not before, at {end_offset}")
        self._file.adopt(end_offset)
        self.crc64, self.record_count = crc64, record_count
        self.next_logical_offset, self.last_record_ts_ms = next_logical_offset, ts_ms

    # -- appending

    def reserve(self, end_offset: int) -> None:
        """Takes the disk's room up to there, footer included. OSError: as before."""
        self._file.check_writable()
        self._file.reserve(min(end_offset, self.header.max_size))

    def set_ext_id(self, ext_id: int) -> None:
        """The segment's external id. The first record fixes it with the header; v2 keeps it in the footer alone."""
        self._file.check_writable()
        if self.record_count and self._version != fmt.Version.V2:
            raise ReadOnlyError(f"{self.path}: the header is written, its ext_id stays {self.header.ext_id}")
        self.header = replace(self.header, ext_id=check_u64("ext_id", ext_id))

    def room_for(self, payload_bytes: int, records: int = 1) -> bool:
        """Whether that many records, with that much payload in all, still fit before the footer."""
        start = self.end_offset or fmt.HEADER_BYTES[self._version]
        end = start + records * fmt.RECORD_BYTES[self._version] + payload_bytes
        return end + fmt.FOOTER_BYTES[self._version] <= self.header.max_size

    def append(
        self,
        payload: fmt.Buffer,
        *,
        timestamp_ms: int | None = None,
        ext_id: int = 0,
        flags: int = 0,
        logical_offset: int | None = None,
    ) -> Position:
        """Adds one record; durable after the next `flush`. OSError: nothing was recorded, the writer is unchanged."""
        self._file.check_writable()
        length = len(payload)
        logical = self.next_logical_offset if logical_offset is None else logical_offset
        ts_ms = self._env.now_ms() if timestamp_ms is None else timestamp_ms
        check_record(self._version, length, logical, ts_ms, ext_id, flags)
        check_order(logical, self.next_logical_offset)
        self._check_room(length, 1)
        data = fmt.encode_record(self._version, payload, logical, ts_ms, ext_id, flags)
        return self._put(data, 1, (logical, logical + length), (ts_ms, ts_ms))

    def append_many(
        self,
        payloads: Sequence[fmt.Buffer],
        *,
        timestamps_ms: Sequence[int] | None = None,
        ext_ids: Sequence[int] | None = None,
        flags: Sequence[int] | None = None,
        logical_offset: int | None = None,
    ) -> Position:
        """Adds all of them in one write, or none, back to back from `logical_offset`; returns the first's position."""
        self._file.check_writable()
        count = len(payloads)
        if not count:
            return Position(self.record_count, self.end_offset, self.next_logical_offset)
        first = self.next_logical_offset if logical_offset is None else logical_offset
        check_order(first, self.next_logical_offset)
        times = [self._env.now_ms()] * count if timestamps_ms is None else timestamps_ms
        ids = [0] * count if ext_ids is None else ext_ids
        bits = [0] * count if flags is None else flags
        logicals, logical = [], first
        for payload, ts_ms, ext_id, flag in zip(payloads, times, ids, bits, strict=True):
            check_record(self._version, len(payload), logical, ts_ms, ext_id, flag)
            logicals.append(logical)
            logical += len(payload)
        self._check_room(logical - first, count)
        data = segment_encode(
            *(int(self._version), b"".join(payloads), array("I", map(len, payloads)), array("Q", logicals)),
            *(array("Q", times), array("Q", ids), array("I", bits)),
        )
        return self._put(data, count, (first, logical), (times[0], times[-1]))

    def _put(self, data: bytes, count: int, logical: tuple[int, int], ts_ms: tuple[int, int]) -> Position:
        """Writes encoded records, behind the header if they are the first; only then counts them."""
        header = self.header
        position = Position(self.record_count, self.end_offset, logical[0])
        if not self.record_count:
            header = replace(header, creation_ts_ms=ts_ms[0], base_offset=logical[0])
            head = fmt.encode_header(header)
            data, position = head + data, position._replace(offset=len(head))
        self._file.append(data)
        self.header = header
        self.crc64 = crc64(data, self.crc64)
        self.record_count += count
        self.next_logical_offset = logical[1]
        self.last_record_ts_ms = ts_ms[1]
        self._env.failpoint("segment.append.written")
        return position

    def _check_room(self, payload_bytes: int, records: int) -> None:
        if not self.room_for(payload_bytes, records):
            raise LimitError(
                f"{self.path}: {records} records of {payload_bytes} bytes do not fit: "
                f"{self.end_offset} of {self.header.max_size} are taken"
            )

    # -- durability

    def flush(self) -> None:
        """Makes every record so far durable, and the file's name with the first of them."""
        self._file.check_writable()
        self._env.failpoint("segment.flush.before")
        end = self.end_offset  # what another thread appends meanwhile is not known to be synced
        if self.flushed_offset == end:
            return
        self._file.sync()
        self._env.failpoint("segment.flush.synced")
        if self._file.sync_name():
            self._env.failpoint("segment.flush.named")
        self.flushed_offset = max(self.flushed_offset, end)

    def seal(self, coordinator_watermark: int, *, flush_failure: bool = False, flags: int = 0) -> SealedSegment:
        """Ends the segment for good and closes it. `flags`: COMPACTED, PARTIAL. OSError (no room): try again."""
        self._file.check_writable()
        if not self.record_count:
            raise ReadOnlyError(f"{self.path}: a segment without records is discarded, not sealed")
        check_footer_flags(flags)
        footer = self._footer(check_u64("coordinator_watermark", coordinator_watermark), flush_failure, flags)
        self.flush()
        self._file.put_tail(fmt.encode_footer(footer))
        self._env.failpoint("segment.seal.footer_written")
        self._file.cut_to_size()
        self._env.failpoint("segment.seal.cut")
        self._file.sync()
        self._file.protect()
        self._env.failpoint("segment.seal.synced")
        self._file.close("it is sealed")
        header = fmt.decode_header(
            fmt.encode_header(self.header)
        )  # as it is read back: v2 drops what it does not store
        return SealedSegment(self.path, header, footer, self.header.base_offset, self.next_logical_offset)

    def _footer(self, coordinator_watermark: int, flush_failure: bool, flags: int) -> fmt.SegmentFooter:
        footer = fmt.SegmentFooter(
            *(int(self._version), self.record_count, self.end_offset, self.crc64, self.header.ext_id),
            flags=int(fmt.FooterFlag.SEALED) | flags,
        )
        if self._version == fmt.Version.V2:
            return footer
        return replace(
            footer,
            segment_id=self.header.segment_id,
            last_record_ts_ms=self.last_record_ts_ms,
            coordinator_watermark=coordinator_watermark,
            flush_failure=flush_failure,
        )

    # -- ending

    def discard(self) -> None:
        """Removes a segment that never got a record."""
        if self.record_count:
            raise ReadOnlyError(f"{self.path}: it holds {self.record_count} records, seal it")
        self.close()
        self._env.files.unlink(self.path)

    def close(self) -> None:
        """Lets go of the file without flushing or sealing: what a crash would leave."""
        self._file.close()

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _segment_file(
    env: Env, path: Path, fd: int, header: fmt.SegmentHeader, end: int, reserve_step_bytes: int
) -> SegmentFile:
    tail_bytes = fmt.FOOTER_BYTES[fmt.Version(header.version)]
    return SegmentFile(
        env, path, fd, end=end, size_max=header.max_size, tail_bytes=tail_bytes, step_bytes=reserve_step_bytes
    )


def _check_reopened(fd: int, active: ActiveSegment) -> None:
    """The file is still the one recovery looked at."""
    path = str(active.path)
    if os.fstat(fd).st_size < active.end_offset:
        raise CorruptError("shorter than recovery found it", path=path, offset=active.end_offset)
    head = os.pread(fd, fmt.HEADER_BYTES[fmt.Version(active.header.version)], 0)
    if fmt.decode_header(head, path=path) != active.header:
        raise CorruptError("the header changed since recovery", path=path, offset=0)
