"""A sealed v3 segment in two files, payloads and record headers (`segment_index.c`): split, checked, composed again.

`headers` are the 36-byte headers of consecutive records, `starts` where each payload begins among the payloads laid
back to back, and behind the last one where that ends. Every call releases the GIL and has let go of each buffer when it
returns.

Owner: any thread. A crash leaves nothing of its own: `spread` writes to files of its caller and syncs none.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from aof2.native import Buffer, SegmentRows
from aof2.native._native import ffi, lib

RECORD_HEADER_LEN: Final = 36


class IndexColumns(NamedTuple):
    """Fields of consecutive records, a column each."""

    length: memoryview
    logical_offset: memoryview
    timestamp_ms: memoryview
    ext_id: memoryview
    flags: memoryview


class Starts(NamedTuple):
    """`starts` as above; `good` is the number of headers before the first that no segment would hold there."""

    starts: memoryview
    good: int
    next_logical: int


def _count(headers: Buffer) -> int:
    count, rest = divmod(memoryview(headers).nbytes, RECORD_HEADER_LEN)
    if rest:
        raise ValueError(f"{rest} bytes of headers too many: each is {RECORD_HEADER_LEN} long")
    return count


def _check_starts(starts: memoryview, count: int) -> None:
    if starts.format != "Q" or len(starts) != count + 1:
        raise ValueError(f"{count} records need {count + 1} starts of format 'Q'")


def _u64s(count: int) -> memoryview:
    return memoryview(bytearray(8 * count)).cast("Q")


def _u32s(count: int) -> memoryview:
    return memoryview(bytearray(4 * count)).cast("I")


def index_starts(headers: Buffer, *, next_logical: int, start: int = 0) -> Starts:
    """Adds the lengths up from `start`, and looks at what needs no payload: order, flags, no header that is zeros."""
    count = _count(headers)
    starts, logical = _u64s(count + 1), ffi.new("uint64_t *", next_logical)
    with ffi.from_buffer(headers) as view, ffi.from_buffer("uint64_t[]", starts) as out:
        good = int(lib.aof2_index_starts(view, count, logical, start, out))
    return Starts(starts, good, int(logical[0]))


def index_columns(headers: Buffer) -> IndexColumns:
    count = _count(headers)
    columns = IndexColumns(_u32s(count), _u64s(count), _u64s(count), _u64s(count), _u32s(count))
    with (
        ffi.from_buffer(headers) as view,
        ffi.from_buffer("uint32_t[]", columns.length) as length,
        ffi.from_buffer("uint64_t[]", columns.logical_offset) as logical_offset,
        ffi.from_buffer("uint64_t[]", columns.timestamp_ms) as timestamp_ms,
        ffi.from_buffer("uint64_t[]", columns.ext_id) as ext_id,
        ffi.from_buffer("uint32_t[]", columns.flags) as flags,
    ):
        lib.aof2_index_columns(view, count, length, logical_offset, timestamp_ms, ext_id, flags)
    return columns


def index_find_time(headers: Buffer, timestamp_ms: int) -> int:
    """The first record that was not appended before `timestamp_ms`; their number if all were."""
    with ffi.from_buffer(headers) as view:
        return int(lib.aof2_index_find_time(view, _count(headers), timestamp_ms))


def index_check(headers: Buffer, starts: memoryview, payload: Buffer, payload_start: int) -> int:
    """How many records, from the first on, have the checksum that their header tells, payload included."""
    count = _count(headers)
    _check_starts(starts, count)
    with (
        ffi.from_buffer(headers) as view,
        ffi.from_buffer("uint64_t[]", starts) as start,
        ffi.from_buffer(payload) as data,
    ):
        return int(lib.aof2_index_check(view, count, start, data, len(data), payload_start))


def index_compose(
    headers: Buffer, starts: memoryview, payload: Buffer, payload_start: int, at: int, out: bytearray | memoryview
) -> None:
    """Fills `out` with the raw segment's records from `at` on, counted from the first record's header."""
    count = _count(headers)
    _check_starts(starts, count)
    with (
        ffi.from_buffer(headers) as view,
        ffi.from_buffer("uint64_t[]", starts) as start,
        ffi.from_buffer(payload) as data,
        ffi.from_buffer("uint8_t[]", out, require_writable=True) as target,
    ):
        if lib.aof2_index_compose(view, count, start, data, len(data), payload_start, at, target, len(target)):
            raise ValueError(f"bytes {at} to {at + len(target)} of the records are not all there")


class Encoded(NamedTuple):
    """Headers of records, and the checksum of the raw segment with them."""

    headers: bytearray
    crc64: int


def index_encode(
    payload: Buffer,
    lengths: memoryview,
    ext_ids: memoryview,
    flags: memoryview,
    *,
    timestamp_ms: int,
    logical_first: int,
    crc64: int,
) -> Encoded:
    """Headers of records whose payloads lie one behind the other; `crc64` goes on over the raw segment."""
    count = len(lengths)
    if (lengths.format, ext_ids.format, flags.format) != ("I", "Q", "I") or not count == len(ext_ids) == len(flags):
        raise ValueError(f"{count} lengths need as many ext_ids and flags, of formats 'I', 'Q', 'I'")
    headers, crc = bytearray(count * RECORD_HEADER_LEN), ffi.new("uint64_t *", crc64)
    with (
        ffi.from_buffer(payload) as data,
        ffi.from_buffer("uint32_t[]", lengths) as length,
        ffi.from_buffer("uint64_t[]", ext_ids) as ext_id,
        ffi.from_buffer("uint32_t[]", flags) as flag,
        ffi.from_buffer("uint8_t[]", headers) as out,
    ):
        total = len(data)
        taken = lib.aof2_index_encode(count, data, total, length, ext_id, flag, timestamp_ms, logical_first, out, crc)
    if taken != total:
        raise ValueError("the lengths do not add up to the payload, or flags have reserved bits set")
    return Encoded(headers, int(crc[0]))


class Rebased(NamedTuple):
    """`good` records were whole; `last_ts_ms` and `crc64` go on behind the last of them."""

    good: int
    last_ts_ms: int
    crc64: int


def index_rebase(
    headers: bytearray,
    starts: memoryview,
    payload: Buffer,
    payload_start: int,
    *,
    logical_first: int,
    last_ts_ms: int,
    crc64: int,
) -> Rebased:
    """Makes headers, in place, of records that come behind others: offsets, times that do not go back, checksums."""
    count = _count(headers)
    _check_starts(starts, count)
    last, crc = ffi.new("uint64_t *", last_ts_ms), ffi.new("uint64_t *", crc64)
    with (
        ffi.from_buffer("uint8_t[]", headers, require_writable=True) as view,
        ffi.from_buffer("uint64_t[]", starts) as start,
        ffi.from_buffer(payload) as data,
    ):
        good = lib.aof2_index_rebase(view, count, start, data, len(data), payload_start, logical_first, last, crc)
    return Rebased(int(good), int(last[0]), int(crc[0]))


def segment_spread(
    buf: Buffer, rows: SegmentRows, payload_fd: int, payload_at: int, index_fd: int, index_at: int, scratch: bytearray
) -> int:
    """Writes payloads and headers of scanned records to two files, each back to back: 0, or an errno."""
    with (
        ffi.from_buffer(buf) as view,
        ffi.from_buffer("uint64_t[]", rows.offset) as offset,
        ffi.from_buffer("uint32_t[]", rows.length) as length,
        ffi.from_buffer("uint8_t[]", scratch, require_writable=True) as room,
    ):
        return int(
            lib.aof2_segment_spread(
                view, len(view), len(rows.offset), offset, length,
                payload_fd, payload_at, index_fd, index_at, room, len(room),
            )
        )  # fmt: skip
