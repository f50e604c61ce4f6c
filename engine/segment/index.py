"""A sealed v3 segment in two files: its payloads, and the index that makes the raw segment of them again.

    <base_offset>.<ext>  = payload[0] · payload[1] · …
    <segment_id>.idx     = header · footer · record header[0] · record header[1] · …     (as the raw segment has them)

Header and footer stand in front, so that one short read tells what a segment holds and when it was written. Any range
of the raw segment is composed from the two; a record's checksum covers its header and its payload wherever they lie.

Invariants
- `split` verifies what it splits: every record, the footer, segment_crc64. Header and footer of the index are written
  last, so what a failed split leaves is no index.
- Decoding is strict: both checksums, that the footer is the header's, the exact length, and of every record header what
  can be known without the payload (order, flags, the sum of the lengths, the last timestamp). What is left, a
  timestamp or an ext_id that changed, `check` finds beside the payload.

Owner: a SegmentIndex is a frozen view of its bytes and may be shared. Crash: `split` syncs nothing; its caller does,
and drops what a crash left.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from aof2.engine.errors import CorruptError, UnsupportedError, os_error
from aof2.engine.segment import format as fmt
from aof2.engine.segment import scan
from aof2.native.segment_index import (
    index_check,
    index_columns,
    index_compose,
    index_find_time,
    index_starts,
    segment_spread,
)

_HEADER: Final = fmt.HEADER_BYTES[fmt.Version.V3]
_RECORD: Final = fmt.RECORD_BYTES[fmt.Version.V3]
_FOOTER: Final = fmt.FOOTER_BYTES[fmt.Version.V3]
_LOGICAL_OFFSET: Final = Struct("<8xQ")
_TIMESTAMP_MS: Final = Struct("<16xQ")

INDEX_FIXED_BYTES: Final = _HEADER + _FOOTER
SPLIT_ROWS: Final = 4096
SPLIT_SCRATCH_BYTES: Final = 2 << 20


class Split(NamedTuple):
    """How long the two files are, and of how many records."""

    payload_bytes: int
    index_bytes: int
    record_count: int


class Columns(NamedTuple):
    """Fields of consecutive records. `start` is where in the payload file a record's payload begins."""

    logical_offset: memoryview
    timestamp_ms: memoryview
    ext_id: memoryview
    flags: memoryview
    start: memoryview
    length: memoryview


# -- splitting


def split(raw_fd: int, payload_fd: int, index_fd: int, *, path: str = "") -> Split:
    """Writes payload file and index of a sealed v3 segment, both from offset 0 on. `path` is for errors."""
    size = os.fstat(raw_fd).st_size
    if size < INDEX_FIXED_BYTES:
        raise CorruptError(f"{size} bytes are too few for a sealed segment", path=path, offset=0)
    with mmap.mmap(raw_fd, size, prot=mmap.PROT_READ) as raw, memoryview(raw) as view:
        ends = bytes(view[:_HEADER]) + bytes(view[size - _FOOTER :])
        head = IndexHead.decode(ends, path=path, footer_offset=size - _FOOTER)
        if size != head.raw_bytes:
            raise CorruptError(f"{size} bytes, by its footer {head.raw_bytes}", path=path, offset=size - _FOOTER)
        done = _spread(view, head, payload_fd, index_fd, path)
    _put(index_fd, ends)
    return done


def _spread(view: memoryview, head: IndexHead, payload_fd: int, index_fd: int, path: str) -> Split:
    end, scratch = head.footer.durable_bytes, bytearray(SPLIT_SCRATCH_BYTES)
    scanner = scan.scanner_of(view, head.header, end=end, durable=end, rows_max=SPLIT_ROWS)
    payload_at, index_at = 0, INDEX_FIXED_BYTES
    for rows in scanner:
        error = segment_spread(view, rows, payload_fd, payload_at, index_fd, index_at, scratch)
        if error:
            raise os_error(error, path)
        count = len(rows.offset)
        payload_at += int(rows.offset[-1] - rows.offset[0]) + int(rows.length[-1]) - (count - 1) * _RECORD
        index_at += count * _RECORD
    scan.check_footer(head.header, head.footer, scanner, path)
    return Split(payload_at, index_at, scanner.total)


def _put(fd: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], done)


# -- the index


@dataclass(frozen=True, slots=True)
class IndexHead:
    """The first INDEX_FIXED_BYTES of an index: what a segment holds."""

    header: fmt.SegmentHeader
    footer: fmt.SegmentFooter

    @classmethod
    def decode(cls, data: fmt.Buffer, *, path: str = "", footer_offset: int = _HEADER) -> IndexHead:
        """Of the bytes at the start of `data`, which may be longer; `footer_offset` is for messages."""
        header = fmt.decode_header(bytes(data[:_HEADER]), path=path)
        if header.version != fmt.Version.V3:
            raise UnsupportedError(f"a segment of version {header.version} has no index", path=path)
        ending = bytes(data[_HEADER:INDEX_FIXED_BYTES])
        footer = fmt.decode_footer(fmt.Version.V3, ending, path=path, offset=footer_offset)
        if footer.segment_id != header.segment_id or footer.ext_id != header.ext_id:
            raise CorruptError("the footer is another segment's", path=path, offset=footer_offset)
        head = cls(header, footer)
        if not footer.record_count or head.payload_bytes < 0 or head.raw_bytes > header.max_size:
            what = f"{footer.record_count} records in {footer.durable_bytes} bytes do not fit"
            raise CorruptError(what, path=path, offset=footer_offset)
        return head

    @property
    def record_count(self) -> int:
        return self.footer.record_count

    @property
    def payload_bytes(self) -> int:
        """Length of the payload file."""
        return self.footer.durable_bytes - _HEADER - self.record_count * _RECORD

    @property
    def index_bytes(self) -> int:
        """Length of the index."""
        return INDEX_FIXED_BYTES + self.record_count * _RECORD

    @property
    def raw_bytes(self) -> int:
        """Length of the raw segment."""
        return self.footer.durable_bytes + _FOOTER


class RecordRange:
    """Headers of consecutive records, their order looked at. `starts` has one more, where the last payload ends."""

    def __init__(self, headers: memoryview, starts: memoryview, next_logical: int) -> None:
        self._headers = headers
        self.starts = starts
        self.count = len(starts) - 1
        self.next_logical = next_logical

    @classmethod
    def decode(
        cls, headers: fmt.Buffer, *, next_logical: int, start: int = 0, path: str = "", first: int = 0
    ) -> RecordRange:
        """Of the header of record `first` and those behind it; its payload begins at `start` of the payload file."""
        found = index_starts(headers, next_logical=next_logical, start=start)
        if found.good < len(found.starts) - 1:
            at = INDEX_FIXED_BYTES + (first + found.good) * _RECORD
            raise CorruptError(f"header of record {first + found.good}", path=path, offset=at)
        return cls(memoryview(headers).cast("B"), found.starts, found.next_logical)

    @property
    def headers(self) -> memoryview:
        return self._headers

    def part(self, first: int, count: int) -> RecordRange:
        if not 0 <= first <= first + count <= self.count:
            raise IndexError(f"records {first} to {first + count} of {self.count}")
        headers = self._headers[first * _RECORD : (first + count) * _RECORD]
        return RecordRange(headers, self.starts[first : first + count + 1], self.next_logical)

    def columns(self) -> Columns:
        c = index_columns(self._headers)
        return Columns(c.logical_offset, c.timestamp_ms, c.ext_id, c.flags, self.starts[: self.count], c.length)

    def check(self, payload: fmt.Buffer, payload_start: int) -> int:
        """How many records, from the first on, are whole beside `payload`, the payload file's bytes from there on."""
        return index_check(self._headers, self.starts, payload, payload_start)


class SegmentIndex:
    """All of an index. Made by `decode`."""

    def __init__(self, head: IndexHead, data: memoryview, records: RecordRange, path: str) -> None:
        self._data = data
        self._records = records
        self._path = path
        self.header = head.header
        self.footer = head.footer
        self.record_count = head.record_count
        self.payload_bytes = head.payload_bytes
        self.raw_bytes = head.raw_bytes
        self.next_logical_offset = records.next_logical

    @classmethod
    def decode(cls, data: fmt.Buffer, *, path: str = "") -> SegmentIndex:
        """`data` is kept, and must not change."""
        view = memoryview(data).cast("B")
        head = IndexHead.decode(view, path=path)
        if len(view) != head.index_bytes:
            raise CorruptError(f"{len(view)} bytes, by its footer {head.index_bytes}", path=path, offset=len(view))
        records = RecordRange.decode(view[INDEX_FIXED_BYTES:], next_logical=head.header.base_offset, path=path)
        if records.starts[-1] != head.payload_bytes:
            what = f"payloads of {records.starts[-1]} bytes, by its footer {head.payload_bytes}"
            raise CorruptError(what, path=path, offset=INDEX_FIXED_BYTES)
        last_at = len(view) - _RECORD
        if _TIMESTAMP_MS.unpack_from(view, last_at)[0] != head.footer.last_record_ts_ms:
            raise CorruptError("the last record's timestamp is not the footer's", path=path, offset=last_at)
        return cls(head, view, records, path)

    # -- the raw segment

    def raw(self, offset: int, size: int, read_payload: Callable[[int, int], bytes]) -> bytes:
        """A range of the raw segment, cut where that ends. `read_payload(start, length)` reads the payload file."""
        start, length = self.payload_range(offset, size)
        payload = read_payload(start, length) if length else b""
        if len(payload) != length:
            what = f"{len(payload)} bytes of payload where {length} belong to it"
            raise CorruptError(what, path=self._path, offset=start)
        end, footer_at = self._end(offset, size), self.footer.durable_bytes
        out = bytearray(self._data[min(offset, _HEADER) : min(end, _HEADER)])
        lo, hi = max(offset, _HEADER), min(end, footer_at)
        if lo < hi:
            records = bytearray(hi - lo)
            index_compose(self._data[INDEX_FIXED_BYTES:], self._records.starts, payload, start, lo - _HEADER, records)
            out += records
        if end > footer_at:
            out += self._data[_HEADER + max(offset - footer_at, 0) : _HEADER + end - footer_at]
        return bytes(out)

    def payload_range(self, offset: int, size: int) -> tuple[int, int]:
        """What `raw(offset, size)` needs of the payload file: where that begins, and how long it is."""
        start = self._payload_at(offset)
        return start, self._payload_at(self._end(offset, size)) - start

    def _end(self, offset: int, size: int) -> int:
        if offset < 0 or size < 0:
            raise ValueError(f"no range: {size} bytes at {offset}")
        return max(offset, min(offset + size, self.raw_bytes))

    def _payload_at(self, offset: int) -> int:
        """How many payload bytes lie before a place of the raw segment."""
        starts, area_at = self._records.starts, offset - _HEADER
        record = bisect_right(range(self.record_count), area_at, key=lambda i: i * _RECORD + starts[i]) - 1
        if record < 0:
            return 0
        into = area_at - record * _RECORD - starts[record] - _RECORD
        return int(min(starts[record] + max(0, into), starts[record + 1]))

    # -- records

    def find(self, logical_offset: int) -> int:
        """The first record at or behind it; `record_count` when there is none."""
        view = self._data[INDEX_FIXED_BYTES:]

        def logical(i: int) -> int:
            return int(_LOGICAL_OFFSET.unpack_from(view, i * _RECORD)[0])

        return bisect_left(range(self.record_count), logical_offset, key=logical)

    def find_time(self, timestamp_ms: int) -> int:
        """The first record that was not appended before it, by its own clock; `record_count` when there is none."""
        return index_find_time(self._data[INDEX_FIXED_BYTES:], min(max(0, timestamp_ms), fmt.U64_MAX))

    def records(self) -> RecordRange:
        """All of them."""
        return self._records

    def columns(self, first: int, count: int) -> Columns:
        return self._records.part(first, count).columns()

    def check(self, payload: fmt.Buffer, payload_start: int, first: int, count: int) -> int:
        """How many of `count` records from `first` on are whole, before the first that is not."""
        return self._records.part(first, count).check(payload, payload_start)
