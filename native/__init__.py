"""The C core: checksums, record scans and encodes, line framing, page diff, bytes from a socket into a file. What is
done with many small files at once is in `small`, with a segment in two files in `segment_index`.

Only modules of this folder import the compiled `ffi` and `lib`. Every call works on memory its caller owns, releases
the GIL while it runs, and has let go of each buffer when it returns, so an mmap can be resized or closed right after
it.
`native.h` is the C side of the same API; `reference.py` says the same things slowly.
"""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from aof2.native._native import ffi, lib

Buffer: TypeAlias = bytes | bytearray | memoryview | mmap.mmap
"""What inputs may be; anything contiguous that speaks the buffer protocol works."""
Column: TypeAlias = "array[int] | memoryview"
"""One field of many records: an array, or a memoryview of the same format."""

_MORE: Final = 3
_IMPLEMENTATIONS: Final = ("portable", "pclmul", "vpclmul")
_SEGMENT_HEADER_LEN: Final = {2: 28, 3: 36}
_SEGMENT_FLAGS_KNOWN: Final = 3
_MANIFEST_HEADER_LEN: Final = 40
_MANIFEST_RECORD_LEN_MIN: Final = 48
_U32_MAX: Final = 2**32 - 1
_U64_MAX: Final = 2**64 - 1
_LINES_BATCH: Final = 65536
_CHECK_ROWS: Final = 4096  # `run` does not read its columns: so small, they stay in the cache


class Outcome(IntEnum):
    """How a scan ended."""

    CLEAN = 0
    """At the end, with nothing left over."""
    TORN = 1
    """At a write that never finished: cut there and go on."""
    CORRUPT = 2
    """At damage to bytes that had been whole."""


class Fault(IntEnum):
    """Why a scan ended where it did."""

    NONE = 0
    HEADER_PAST_END = 1
    PAYLOAD_PAST_END = 2
    ZEROS = 3
    CRC = 4
    ORDER = 5
    FLAGS = 6
    EMPTY = 7
    ALIGN = 8
    MARKER = 9


# -- checksums ---------------------------------------------------------------------------------------------------


def crc64(data: Buffer, crc: int = 0) -> int:
    """crc64-nvme of `data`, going on from `crc`."""
    result: int
    if type(data) is bytes:  # cffi passes these straight on: half the cost of a short call
        result = lib.aof2_crc64(crc, data, len(data))
        return result
    with ffi.from_buffer(data) as view:
        result = lib.aof2_crc64(crc, view, len(view))
    return result


def crc32(data: Buffer, crc: int = 0) -> int:
    """CRC-32 (IEEE, zlib's) of `data`, going on from `crc`."""
    result: int
    if type(data) is bytes:  # cffi passes these straight on: half the cost of a short call
        result = lib.aof2_crc32(crc, data, len(data))
        return result
    with ffi.from_buffer(data) as view:
        result = lib.aof2_crc32(crc, view, len(view))
    return result


def crc64_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """crc64 of A followed by B, from those of A and B and B's length."""
    return int(lib.aof2_crc64_combine(crc_a, crc_b, len_b))


def crc32_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """crc32 of A followed by B, from those of A and B and B's length."""
    return int(lib.aof2_crc32_combine(crc_a, crc_b, len_b))


def crc_implementations() -> tuple[str, ...]:
    """The checksum kernels this CPU can run, best last."""
    return _IMPLEMENTATIONS[: lib.aof2_crc_impl_best() + 1]


def crc64_with(name: str, data: Buffer, crc: int = 0) -> int:
    """crc64 by one named kernel, for tests and benchmarks."""
    with ffi.from_buffer(data) as view:
        return int(lib.aof2_crc64_with(_implementation(name), crc, view, len(view)))


def crc32_with(name: str, data: Buffer, crc: int = 0) -> int:
    """crc32 by one named kernel, for tests and benchmarks."""
    with ffi.from_buffer(data) as view:
        return int(lib.aof2_crc32_with(_implementation(name), crc, view, len(view)))


def _implementation(name: str) -> int:
    available = crc_implementations()
    if name not in available:
        raise ValueError(f"no checksum kernel {name!r} on this CPU; it has {', '.join(available)}")
    return available.index(name)


# -- buffers and columns -----------------------------------------------------------------------------------------


def _byte_len(buf: Buffer) -> int:
    with ffi.from_buffer(buf) as view:
        return len(view)


def _end_within(buf: Buffer, end: int | None) -> int:
    length = _byte_len(buf)
    return length if end is None else min(end, length)


def _header_len(version: int) -> int:
    if version not in _SEGMENT_HEADER_LEN:
        raise ValueError(f"segment version {version}: only 2 and 3 exist")
    return _SEGMENT_HEADER_LEN[version]


def _format_of(column: Column) -> str:
    return column.format if isinstance(column, memoryview) else column.typecode


def _check_columns(columns: dict[str, tuple[Column, str]]) -> int:
    """Each column has its format and all have one length, which is returned."""
    count = len(next(iter(columns.values()))[0])
    for name, (column, fmt) in columns.items():
        if _format_of(column) != fmt:
            raise ValueError(f"{name}: items of format {_format_of(column)!r}, must be {fmt!r}")
        if len(column) != count:
            raise ValueError(f"{name}: {len(column)} items where {next(iter(columns))} has {count}")
    return count


def _pointer(ctype: str, column: Column | bytearray) -> Any:
    return ffi.from_buffer(ctype, column)


_ItemFormat: TypeAlias = Literal["H", "I", "Q"]
_ITEM_LEN: Final = {"H": 2, "I": 4, "Q": 8}
_SEGMENT_FORMATS: Final[tuple[_ItemFormat, ...]] = ("Q", "I", "Q", "Q", "Q", "I")
_MANIFEST_FORMATS: Final[tuple[_ItemFormat, ...]] = ("Q", "H", "H", "I", "Q", "Q", "Q")


def _empty_column(fmt: _ItemFormat, rows: int) -> memoryview:
    return memoryview(bytearray(rows * _ITEM_LEN[fmt])).cast(fmt)


# -- segments ----------------------------------------------------------------------------------------------------


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
        self._end = _end_within(buf, end)
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
        return SegmentRows(*(_empty_column(fmt, rows) for fmt in _SEGMENT_FORMATS))

    def _step(self, columns: SegmentRows) -> int:
        """One call into C: fills `columns`, returns how many rows it filled."""
        with (
            ffi.from_buffer(self._buf) as view,
            _pointer("uint64_t[]", columns.offset) as offset,
            _pointer("uint32_t[]", columns.length) as length,
            _pointer("uint64_t[]", columns.logical_offset) as logical_offset,
            _pointer("uint64_t[]", columns.timestamp_ms) as timestamp_ms,
            _pointer("uint64_t[]", columns.ext_id) as ext_id,
            _pointer("uint32_t[]", columns.flags) as flags,
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
    count = _check_columns(
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
        _pointer("uint32_t[]", lengths) as length,
        _pointer("uint64_t[]", logical_offsets) as logical_offset,
        _pointer("uint64_t[]", timestamps_ms) as timestamp_ms,
        _pointer("uint64_t[]", ext_ids) as ext_id,
        _pointer("uint32_t[]", flags) as flag,
    ):
        out = bytearray(count * header_len + len(source))
        with ffi.from_buffer(out) as target:
            written = lib.aof2_segment_encode(
                version, count, source, len(source), length, logical_offset, timestamp_ms, ext_id, flag,
                target, len(target),
            )  # fmt: skip
    if written != len(out):
        raise ValueError(_segment_misfit(version, _byte_len(payloads), lengths, logical_offsets, flags))
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


# -- manifest ----------------------------------------------------------------------------------------------------


class ManifestRows(NamedTuple):
    """Manifest records, a column a field. `offset` is the record header's; `payload_len` includes padding."""

    offset: memoryview
    type: memoryview
    flags: memoryview
    payload_len: memoryview
    segment_id: memoryview
    logical_offset: memoryview
    timestamp_ms: memoryview


@dataclass(frozen=True, slots=True)
class ManifestScan:
    """What a manifest chunk holds, up to its end or first fault."""

    rows: ManifestRows
    outcome: Outcome
    fault: Fault
    pos: int
    """The first byte not consumed."""
    crc64: int
    """Of every byte consumed, after what the scan was started with."""
    marker_end: int
    """Where the last valid commit marker ends; the scan's start if there was none."""
    marker_count: int
    """Records up to `marker_end`."""
    marker_crc64: int
    """`crc64` at `marker_end`."""
    durable_len: int
    """The largest durable length a valid marker told, 0 if none did."""


def manifest_scan(
    buf: Buffer, start: int, end: int | None = None, *, crc64: int = 0, span_start: int | None = None
) -> ManifestScan:
    """Checks every record in [start, end) and every commit marker among them.

    `span_start` is where the marker span that `start` lies in begins, if not at `start`.
    """
    limit = _end_within(buf, end)
    span_start = start if span_start is None else span_start
    state = ffi.new(
        "aof2_manifest_state *",
        {
            "pos": start,
            "crc64": crc64,
            "span_start": span_start,
            "span_crc64": _span_crc64(buf, span_start, start),
            "marker_end": start,
            "marker_crc64": crc64,
        },
    )
    rows = max(limit - start, 0) // _MANIFEST_RECORD_LEN_MIN + 1
    columns = ManifestRows(*(_empty_column(fmt, rows) for fmt in _MANIFEST_FORMATS))
    with (
        ffi.from_buffer(buf) as view,
        _pointer("uint64_t[]", columns.offset) as offset,
        _pointer("uint16_t[]", columns.type) as type_,
        _pointer("uint16_t[]", columns.flags) as flags,
        _pointer("uint32_t[]", columns.payload_len) as payload_len,
        _pointer("uint64_t[]", columns.segment_id) as segment_id,
        _pointer("uint64_t[]", columns.logical_offset) as logical_offset,
        _pointer("uint64_t[]", columns.timestamp_ms) as timestamp_ms,
    ):
        outcome = lib.aof2_manifest_scan(
            view, len(view), limit, state, rows,
            offset, type_, flags, payload_len, segment_id, logical_offset, timestamp_ms,
        )  # fmt: skip
    return ManifestScan(
        rows=ManifestRows(*(column[: state.count] for column in columns)),
        outcome=Outcome(outcome),
        fault=Fault(state.fault),
        pos=int(state.pos),
        crc64=int(state.crc64),
        marker_end=int(state.marker_end),
        marker_count=int(state.marker_total),
        marker_crc64=int(state.marker_crc64),
        durable_len=int(state.durable_len),
    )


def _span_crc64(buf: Buffer, span_start: int, start: int) -> int:
    if span_start == start:
        return 0
    with memoryview(buf) as whole, whole.cast("B") as octets:
        if not 0 <= span_start <= start <= len(octets):
            raise ValueError(f"span_start {span_start}: must be between 0 and start {start}, inside the buffer")
        with octets[span_start:start] as span:
            return crc64(span)


def manifest_probe_durable(buf: Buffer, from_: int, end: int | None = None) -> int:
    """The largest durable length told by a whole commit marker at a multiple of 8 in [from_, end), 0 if none."""
    with ffi.from_buffer(buf) as view:
        limit = len(view) if end is None else min(end, len(view))
        return int(lib.aof2_manifest_probe_durable(view, len(view), from_, limit))


def manifest_encode(
    types: Column,
    segment_ids: Column,
    logical_offsets: Column,
    timestamps_ms: Column,
    payloads: Buffer,
    payload_lens: Column,
    crc64: int = 0,
) -> tuple[bytes, int]:
    """Records of consecutive `payloads` (lengths without padding), and `crc64` carried on over them."""
    out = bytearray(len(types) * (_MANIFEST_HEADER_LEN + 7) + _byte_len(payloads))
    written, crc = manifest_encode_into(
        out, 0, types, segment_ids, logical_offsets, timestamps_ms, payloads, payload_lens, crc64
    )
    with memoryview(out) as view, view[:written] as records:
        return bytes(records), crc


def manifest_encode_into(
    out: bytearray | memoryview | mmap.mmap,
    offset: int,
    types: Column,
    segment_ids: Column,
    logical_offsets: Column,
    timestamps_ms: Column,
    payloads: Buffer,
    payload_lens: Column,
    crc64: int = 0,
) -> tuple[int, int]:
    """As `manifest_encode`, into `out` from `offset` on: bytes written and the checksum.

    On ValueError nothing past `offset` is to be trusted.
    """
    count = _check_columns(
        {
            "types": (types, "H"),
            "segment_ids": (segment_ids, "Q"),
            "logical_offsets": (logical_offsets, "Q"),
            "timestamps_ms": (timestamps_ms, "Q"),
            "payload_lens": (payload_lens, "I"),
        }
    )
    crc = ffi.new("uint64_t *", crc64)
    with (
        ffi.from_buffer("uint8_t[]", out, require_writable=True) as target,
        ffi.from_buffer(payloads) as source,
        _pointer("uint16_t[]", types) as type_,
        _pointer("uint64_t[]", segment_ids) as segment_id,
        _pointer("uint64_t[]", logical_offsets) as logical_offset,
        _pointer("uint64_t[]", timestamps_ms) as timestamp_ms,
        _pointer("uint32_t[]", payload_lens) as payload_len,
    ):
        if not 0 <= offset <= len(target):
            raise ValueError(f"offset {offset}: out has {len(target)} bytes")
        room = len(target) - offset
        payloads_len = len(source)
        written = lib.aof2_manifest_encode(
            count, type_, segment_id, logical_offset, timestamp_ms, source, payloads_len, payload_len,
            target + offset, room, crc,
        )  # fmt: skip
    if written < 0 or sum(payload_lens) != payloads_len:
        raise ValueError(_manifest_misfit(payloads_len, payload_lens, room))
    return int(written), int(crc[0])


def _manifest_misfit(payloads_len: int, payload_lens: Column, room: int) -> str:
    """Why the encoder refused these records."""
    for i, length in enumerate(payload_lens):
        if length == 0:
            return f"record {i}: a payload cannot be empty"
        if length + -length % 8 > _U32_MAX:
            return f"record {i}: a payload of {length} bytes is too long"
    if sum(payload_lens) != payloads_len:
        return f"payload_lens add up to {sum(payload_lens)} but payloads holds {payloads_len} bytes"
    needed = sum(_MANIFEST_HEADER_LEN + length + -length % 8 for length in payload_lens)
    return f"{len(payload_lens)} records need {needed} bytes but out has room for {room}"


# -- framing and diff --------------------------------------------------------------------------------------------


def frame_lines(buf: Buffer, max_record: int) -> tuple[array[int], int]:
    """Lengths of the whole lines at the start of `buf`, newlines included, and their sum.

    A line longer than `max_record` is cut into records of that length. What follows the sum is a partial line.
    """
    if not 1 <= max_record <= _U32_MAX:
        raise ValueError(f"max_record {max_record}: must be between 1 and {_U32_MAX}")
    lengths = array("I")
    batch = ffi.new("uint32_t[]", _LINES_BATCH)
    consumed = ffi.new("size_t *")
    total = 0
    with ffi.from_buffer("uint8_t[]", buf) as view:
        count = _LINES_BATCH
        while count == _LINES_BATCH:
            count = lib.aof2_frame_lines(view + total, len(view) - total, max_record, _LINES_BATCH, batch, consumed)
            lengths.frombytes(ffi.buffer(batch, count * 4))
            total += int(consumed[0])
    return lengths, total


def page_diff(a: Buffer, b: Buffer, page_len: int) -> tuple[bytes, int]:
    """Bitmap (LSB first) of the pages that differ, and how many do. A page only one side has differs."""
    if page_len < 1:
        raise ValueError(f"page_len {page_len}: must be at least 1")
    with ffi.from_buffer(a) as view_a, ffi.from_buffer(b) as view_b:
        pages = -(-max(len(view_a), len(view_b)) // page_len)
        bitmap = bytearray(-(-pages // 8))
        with ffi.from_buffer("uint8_t[]", bitmap) as bits:
            changed = lib.aof2_page_diff(view_a, len(view_a), view_b, len(view_b), page_len, bits, len(bitmap))
    return bytes(bitmap), int(changed)


# -- moving ------------------------------------------------------------------------------------------------------


class Ending(IntEnum):
    """How receiving ended."""

    ALL = 0
    """Everything came and is in the file."""
    ENDED = 1
    """The peer closed."""
    SILENT = 2
    """Nothing came for as long as was allowed."""
    SOCKET = 3
    """The socket failed, by `error`."""
    FILE = 4
    """The file failed, by `error`."""


class Received(NamedTuple):
    """What came of `receive`: the first `done` bytes are in the file, and in the checksums of their pieces."""

    ending: Ending
    done: int
    crc64s: list[int]
    error: int


def receive(
    sock: int,
    file: int,
    offset: int,
    length: int,
    scratch: bytearray,
    *,
    timeout_s: float,
    piece_bytes: int,
    begun: bytes = b"",
) -> Received:
    """Takes `length` bytes off a socket and writes them to a file, each piece checksummed on the way.

    `begun` is what was there before of the first piece.
    """
    if not 0 <= len(begun) < piece_bytes:
        raise ValueError(f"begun: {len(begun)} bytes of a piece of {piece_bytes}")
    crcs = ffi.new("uint64_t[]", max(1, -(-(len(begun) + length) // piece_bytes)))
    crcs[0] = crc64(begun)
    done, error = ffi.new("uint64_t *"), ffi.new("int *")
    with ffi.from_buffer("uint8_t[]", scratch, require_writable=True) as buf:
        if not len(buf):
            raise ValueError("scratch: must have room for a byte")
        timeout_ms = min(max(0, round(timeout_s * 1000)), 2**31 - 1)
        ending = lib.aof2_receive(
            sock, file, offset, length, piece_bytes, len(begun), buf, len(buf), timeout_ms, crcs, done, error
        )
    return Received(Ending(ending), int(done[0]), list(crcs), int(error[0]))
