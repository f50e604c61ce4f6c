"""SegmentReader: verified records out of one segment file, v2 or v3, sealed or not.

Opening a v3 file reads header and footer only. A v2 footer has neither magic nor checksum: it is one when
`durable_bytes` is where it starts, the sealed flag is set and the records before it match its crc64 and count, so
opening a sealed v2 file reads it through.

Invariants
- No payload is returned whose record checksum did not hold; where a sealed file is read from its first record to its
  last, the footer's count, crc64 and last timestamp are checked as well.
- Damage in a sealed file raises, with path and offset. The torn tail of an unsealed one is an outcome (`tail`).
- A file that ends in a damaged footer reads as unsealed, `footer_error` says why, and every byte before that footer
  counts as durable: a fault there is damage, not a torn write.

Lifetimes: payloads are views of the mapping and stay valid as long as they are held, after `close` too; the mapping
goes with the last of them. A file being written is cut when it is sealed, and touching a mapping past the cut is
SIGBUS: a reader of a segment that is still written passes `end=writer.end_offset`, and nothing beyond is mapped.

Owner: one thread at a time. Crash: it writes nothing.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from aof2.engine.env import Env
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment import format as fmt
from aof2.engine.segment import scan
from aof2.engine.segment.model import Position, SealedSegment
from aof2.native import Outcome, SegmentRows, SegmentScanner

ROWS_PER_BATCH: Final = 4096


class Record(NamedTuple):
    """One record whose checksum held. `payload` is a view of the mapping (see Lifetimes above)."""

    record_index: int
    offset: int
    logical_offset: int
    timestamp_ms: int
    ext_id: int
    flags: int
    payload: memoryview

    @property
    def position(self) -> Position:
        return Position(self.record_index, self.offset, self.logical_offset)


class Batch(NamedTuple):
    """Records in columns: `rows.offset[i]` is the file offset of record `first + i`; payloads through `payload(i)`."""

    first: int
    rows: SegmentRows
    view: memoryview
    record_bytes: int

    def payload(self, i: int) -> memoryview:
        start = self.rows.offset[i] + self.record_bytes
        return self.view[start : start + self.rows.length[i]]

    def record(self, i: int) -> Record:
        rows = self.rows
        fields = (rows.offset[i], rows.logical_offset[i], rows.timestamp_ms[i], rows.ext_id[i], rows.flags[i])
        return Record(self.first + i, *fields, self.payload(i))


class SegmentReader:
    """Reads one file. `end` limits what is mapped (an active segment); `durable` is what is known to be synced."""

    def __init__(self, env: Env, path: Path, *, end: int | None = None, durable: int = 0) -> None:
        self.path = path
        self._name = str(path)
        self._durable = durable
        self._tail: scan.Tail | None = None
        self.footer_error: CorruptError | None = None
        with env.files.closing(env.files.open_ro(path)) as fd:
            self._map = _map(fd, end, self._name)
        self._view = memoryview(self._map)
        try:
            self.header = fmt.decode_header(bytes(self._view[: fmt.HEADER_BYTES_MAX]), path=self._name)
            self._version = fmt.Version(self.header.version)
            self.footer = None if end is not None else self._load_footer()
        except BaseException:
            self.close()
            raise
        # Places a scan may start at, each found by a scan: a sparse index that grows with use.
        self._marks = [Position(0, fmt.HEADER_BYTES[self._version], self.header.base_offset)]

    def go_on_from(self, earlier: SegmentReader) -> None:
        """What an earlier look at the same file, when it was shorter, found on its way."""
        self._marks = earlier._marks

    @property
    def sealed(self) -> bool:
        return self.footer is not None

    @property
    def tail(self) -> scan.Tail:
        """Where the records end. Of a sealed file: verified in full, or an error."""
        if self._tail is None:
            self._tail = self._scan()
        return self._tail

    def verify(self) -> scan.Tail:
        """Reads everything again: records against their checksums, and the footer against the records."""
        if self.footer_error:
            raise self.footer_error
        self._tail = self._scan()
        return self._tail

    def _scan(self) -> scan.Tail:
        if self.footer:
            return scan.verify_sealed(self._view, self.header, self.footer, path=self._name)
        return scan.scan_unsealed(self._view, self.header, path=self._name, durable=self._durable)

    def torn_records(self) -> bytes:
        """The bytes behind an unsealed file's tail if a whole record lies among them, else none."""
        tail = self.tail
        if not tail.torn or not scan.records_beyond(
            self._view[: tail.torn_end], self._version, tail.end_offset, tail.next_logical_offset
        ):
            return b""
        return bytes(self._view[tail.end_offset : tail.torn_end])

    # -- records

    def records(self, first: int | Position = 0, count: int | None = None) -> Iterator[Record]:
        """Records from index `first` on, or from a position told earlier; `count` of them at most."""
        mark = first if isinstance(first, Position) else max(m for m in self._marks if m.record_index <= first)
        index = mark.record_index if isinstance(first, Position) else first
        stop = None if count is None else index + count
        for batch in self.batches(mark):
            for i in range(max(0, index - batch.first), len(batch.rows.offset)):
                if stop is not None and batch.first + i >= stop:
                    return
                yield batch.record(i)

    def records_from(self, logical_offset: int) -> Iterator[Record]:
        """From the first record that ends past `logical_offset`: the one that holds it, or the next."""
        mark = max((m for m in self._marks if m.logical_offset <= logical_offset), default=self._marks[0])
        found = False
        for batch in self.batches(mark):
            for i in range(len(batch.rows.offset)):
                found = found or batch.rows.logical_offset[i] + batch.rows.length[i] > logical_offset
                if found:
                    yield batch.record(i)

    def batches(self, start: Position | None = None) -> Iterator[Batch]:
        """Records in columns, from `start` (a position told earlier) or the first record to the last."""
        start = start or self._marks[0]
        whole = start == self._marks[0]
        if not self._marks[0].offset <= start.offset <= self._end():
            raise CorruptError("no record starts there", path=self._name, offset=start.offset)
        durable = self._end() if self.footer else self._durable
        scanner = scan.scanner_of(
            *(self._view, self.header, None if whole else start),
            end=self._end(),
            durable=durable,
            rows_max=ROWS_PER_BATCH,
        )
        index = start.record_index
        for rows in scanner:
            yield Batch(index, rows, self._view, fmt.RECORD_BYTES[self._version])
            index += len(rows.offset)
            self._remember(index, rows)
        self._check_end(scanner, index, whole=whole)

    def _end(self) -> int:
        return self.footer.durable_bytes if self.footer else len(self._view)

    def _remember(self, index: int, rows: SegmentRows) -> None:
        if index > self._marks[-1].record_index:
            end = rows.offset[-1] + fmt.RECORD_BYTES[self._version] + rows.length[-1]
            self._marks.append(Position(index, end, rows.logical_offset[-1] + rows.length[-1]))

    def _check_end(self, scanner: SegmentScanner, index: int, *, whole: bool) -> None:
        """The scan got to the end it had to: the footer's, or the tear of an unsealed file."""
        if not self.footer:
            tail = scan.tail_of(self._view, self.header, scanner, path=self._name, durable=self._durable)
            self._tail = tail if whole else self._tail
        elif whole:
            scan.check_footer(self.header, self.footer, scanner, self._name)
        elif scanner.outcome != Outcome.CLEAN:
            raise scan.damage(self.header.version, scanner, self._name)
        elif index != self.footer.record_count:
            raise CorruptError(f"{index} records, the footer tells {self.footer.record_count}", path=self._name)

    # -- the footer

    def _load_footer(self) -> fmt.SegmentFooter | None:
        at = len(self._view) - fmt.FOOTER_BYTES[self._version]
        if at < fmt.HEADER_BYTES[self._version] or not fmt.footer_claim(self._version, bytes(self._view[at:]), at):
            return None
        try:
            footer = self._footer_v2(at) if self._version == fmt.Version.V2 else self._footer_v3(at)
        except _TornFooterError as e:
            self.footer_error = e
            self._durable = max(self._durable, at)
            return None
        if footer.record_count > (at - fmt.HEADER_BYTES[self._version]) // fmt.RECORD_BYTES[self._version]:
            raise CorruptError(f"a record_count of {footer.record_count} does not fit", path=self._name, offset=at)
        return footer

    def _footer_v3(self, at: int) -> fmt.SegmentFooter:
        try:
            footer = fmt.decode_footer(self._version, bytes(self._view[at:]), path=self._name, offset=at)
        except CorruptError as e:
            raise _TornFooterError(e.what, path=self._name, offset=at) from e
        if footer.durable_bytes != at or footer.segment_id != self.header.segment_id:
            raise CorruptError("the footer is another file's", path=self._name, offset=at)
        if footer.ext_id != self.header.ext_id or len(self._view) > self.header.max_size:
            raise CorruptError("header and footer disagree", path=self._name, offset=at)
        return footer

    def _footer_v2(self, at: int) -> fmt.SegmentFooter:
        footer = fmt.footer_v2(bytes(self._view[at:]))
        scanner = scan.scanner_of(self._view, self.header, end=at, durable=at).run()
        if scanner.outcome != Outcome.CLEAN:
            raise scan.damage(self._version, scanner, self._name)
        if scanner.crc64 != footer.segment_crc64:
            raise CorruptError("segment_crc64 does not match header and records", path=self._name, offset=at)
        if scanner.total != footer.record_count:  # the page before the crc's was lost, the records are whole
            raise _TornFooterError("record_count of the v2 footer", path=self._name, offset=at)
        if footer.flags & ~fmt.FOOTER_FLAGS_KNOWN:
            raise UnsupportedError(f"reserved flags {footer.flags:#x} of the segment footer are set", path=self._name)
        return footer

    def sealed_segment(self) -> SealedSegment:
        """What header and footer tell. Of v2 the first record is read for `base_offset`."""
        if not self.footer:
            raise CorruptError("not sealed", path=self._name)
        base_offset = self.header.base_offset
        if self._version == fmt.Version.V2:
            base_offset = next((r.logical_offset for r in self.records(count=1)), 0)
        next_logical = self._tail.next_logical_offset if self._tail else None
        return SealedSegment(self.path, self.header, self.footer, base_offset, next_logical)

    # -- ending

    def close(self) -> None:
        """Lets go of the mapping; it lives on while payloads are held."""
        with contextlib.suppress(BufferError):
            self._view.release()
        with contextlib.suppress(BufferError):
            self._map.close()

    def __enter__(self) -> SegmentReader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _TornFooterError(CorruptError):
    """A footer was begun and is not whole; the records before it were synced."""


def _map(fd: int, end: int | None, name: str) -> mmap.mmap:
    size = os.fstat(fd).st_size
    length = size if end is None else min(size, end)
    if length < min(fmt.HEADER_BYTES.values()):  # mmap refuses 0 with a ValueError
        raise CorruptError(f"{length} bytes are too few for a segment header", path=name, offset=0)
    return mmap.mmap(fd, length, access=mmap.ACCESS_READ)
