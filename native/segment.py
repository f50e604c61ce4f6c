"""Records of a segment: scanned, found again behind damage, encoded (`segment.c`).

Owner: a scanner is its caller's alone; the functions are any thread's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from aof2.native._native import ffi, lib
from aof2.native.columns import (
    Buffer,
    Column,
    Fault,
    ItemFormat,
    Outcome,
    byte_len,
    check_columns,
    empty_column,
    end_within,
    pointer,
)

_MORE: Final = 3
_SEGMENT_HEADER_LEN: Final = {2: 28, 3: 36}
_SEGMENT_FLAGS_KNOWN: Final = 3
_U64_MAX: Final = 2**64 - 1
_CHECK_ROWS: Final = 4096  # `run` does not read its columns: so small, they stay in the cache
_SEGMENT_FORMATS: Final[tuple[ItemFormat, ...]] = ("Q", "I", "Q", "Q", "Q", "I")


def _header_len(version: int) -> int:
    if version not in _SEGMENT_HEADER_LEN:
        raise ValueError(f"segment version {version}: only 2 and 3 exist")
    return _SEGMENT_HEADER_LEN[version]


class SegmentRows(NamedTuple):
    """A batch of segment records, a column a field. `offset` is the record header's; the payload follows it."""

    offset: memoryview
    length: memoryview
    logical_offset: memoryview
    timestamp_ms: memoryview
    ext_id: memoryview
    flags: memoryview


class SegmentScanner:
    """Checks segment records one after the other and yields them in batches.

    Iterate it, or `run()` it where only the verdict matters. Once exhausted it says where it stopped (`pos`, the
    first byte not consumed) and why. The buffer must not change in between; no batch is overwritten by the next.
    """

    def __init__(
        self,
        buf: Buffer,
        *,
        start: int,
        end: int | None = None,
        version: int,
        durable: int = 0,
        crc64: int = 0,
        next_logical: int = 0,
        rows_max: int = 65536,
    ) -> None:
        if rows_max < 1:
            raise ValueError(f"rows_max {rows_max}: must be at least 1")
        self._header_len = _header_len(version)
        self._buf = buf
        self._end = end_within(buf, end)
        self._version = version
        self._durable = durable
        self._rows_max = rows_max
        self._more = True
        self._state = ffi.new("aof2_segment_state *", {"pos": start, "crc64": crc64, "next_logical": next_logical})
        self.outcome = Outcome.CLEAN
        self.fault = Fault.NONE
        self.total = 0

    @property
    def pos(self) -> int:
        """The first byte not consumed."""
        return int(self._state.pos)

    @property
    def crc64(self) -> int:
        """crc64 of every byte consumed, after what it was started with."""
        return int(self._state.crc64)

    @property
    def next_logical(self) -> int:
        """The smallest logical offset the next record may have."""
        return int(self._state.next_logical)

    @property
    def last_ts_ms(self) -> int:
        """Timestamp of the last record consumed, 0 if there was none."""
        return int(self._state.last_ts_ms)

    def __iter__(self) -> Iterator[SegmentRows]:
        while self._more:
            columns = self._columns(self._rows_max)
            count = self._step(columns)
            if count:
                yield SegmentRows(*(column[:count] for column in columns))

    def run(self) -> SegmentScanner:
        """Exhausts the scan without keeping the records."""
        columns = self._columns(min(self._rows_max, _CHECK_ROWS))
        while self._more:
            self._step(columns)
        return self

    def _columns(self, rows_max: int) -> SegmentRows:
        rows = min(rows_max, max(self._end - self.pos, 0) // self._header_len + 1)
        return SegmentRows(*(empty_column(fmt, rows) for fmt in _SEGMENT_FORMATS))

    def _step(self, columns: SegmentRows) -> int:
        """One call into C: fills `columns`, returns how many rows it filled."""
        with (
            ffi.from_buffer(self._buf) as view,
            pointer("uint64_t[]", columns.offset) as offset,
            pointer("uint32_t[]", columns.length) as length,
            pointer("uint64_t[]", columns.logical_offset) as logical_offset,
            pointer("uint64_t[]", columns.timestamp_ms) as timestamp_ms,
            pointer("uint64_t[]", columns.ext_id) as ext_id,
            pointer("uint32_t[]", columns.flags) as flags,
        ):
            outcome = lib.aof2_segment_scan(
                view, len(view), self._end, self._version, self._durable, self._state, len(columns.offset),
                offset, length, logical_offset, timestamp_ms, ext_id, flags,
            )  # fmt: skip
        self._more = outcome == _MORE
        count = int(self._state.count)
        self.total += count
        if not self._more:
            self.outcome = Outcome(outcome)
            self.fault = Fault(self._state.fault)
        return count


def segment_resync(buf: Buffer, from_: int, end: int | None, version: int, min_logical: int) -> int | None:
    """Where, in [from_, end), the first whole valid record at or past `min_logical` starts."""
    _header_len(version)
    with ffi.from_buffer(buf) as view:
        limit = len(view) if end is None else min(end, len(view))
        found = int(lib.aof2_segment_resync(view, len(view), from_, limit, version, min_logical))
    return None if found >= limit else found


def segment_encode(
    version: int,
    payloads: Buffer,
    lengths: Column,
    logical_offsets: Column,
    timestamps_ms: Column,
    ext_ids: Column,
    flags: Column,
) -> bytes:
    """Records of consecutive `payloads`, each `lengths[i]` long. What it writes, a scan accepts."""
    header_len = _header_len(version)
    count = check_columns(
        {
            "lengths": (lengths, "I"),
            "logical_offsets": (logical_offsets, "Q"),
            "timestamps_ms": (timestamps_ms, "Q"),
            "ext_ids": (ext_ids, "Q"),
            "flags": (flags, "I"),
        }
    )
    with (
        ffi.from_buffer(payloads) as source,
        pointer("uint32_t[]", lengths) as length,
        pointer("uint64_t[]", logical_offsets) as logical_offset,
        pointer("uint64_t[]", timestamps_ms) as timestamp_ms,
        pointer("uint64_t[]", ext_ids) as ext_id,
        pointer("uint32_t[]", flags) as flag,
    ):
        out = bytearray(count * header_len + len(source))
        with ffi.from_buffer(out) as target:
            written = lib.aof2_segment_encode(
                version, count, source, len(source), length, logical_offset, timestamp_ms, ext_id, flag,
                target, len(target),
            )  # fmt: skip
    if written != len(out):
        raise ValueError(_segment_misfit(version, byte_len(payloads), lengths, logical_offsets, flags))
    return bytes(out)


def _segment_misfit(version: int, payloads_len: int, lengths: Column, logical_offsets: Column, flags: Column) -> str:
    """Which record the encoder refused, and why."""
    next_logical = 0
    for i, (length, logical_offset, flag) in enumerate(zip(lengths, logical_offsets, flags, strict=True)):
        if length == 0 and version == 2:
            return f"record {i}: a version 2 payload cannot be empty"
        if flag & ~_SEGMENT_FLAGS_KNOWN:
            return f"record {i}: flags {flag:#x} has reserved bits set"
        if logical_offset < next_logical:
            return f"record {i}: logical offset {logical_offset} is before {next_logical}, where the last one ended"
        if logical_offset + length > _U64_MAX:
            return f"record {i}: logical offset {logical_offset} + {length} bytes does not fit 64 bits"
        next_logical = logical_offset + length
    return f"lengths add up to {sum(lengths)} but payloads holds {payloads_len} bytes"
