"""Records of a manifest chunk: scanned with their commit markers, encoded (`manifest.c`).

Owner: any thread; no state.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Final, NamedTuple

from aof2.native._native import ffi, lib
from aof2.native.checksums import crc64 as crc64_of
from aof2.native.columns import (
    U32_MAX,
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

_MANIFEST_HEADER_LEN: Final = 40
_MANIFEST_RECORD_LEN_MIN: Final = 48
_MANIFEST_FORMATS: Final[tuple[ItemFormat, ...]] = ("Q", "H", "H", "I", "Q", "Q", "Q")


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
    limit = end_within(buf, end)
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
    columns = ManifestRows(*(empty_column(fmt, rows) for fmt in _MANIFEST_FORMATS))
    with (
        ffi.from_buffer(buf) as view,
        pointer("uint64_t[]", columns.offset) as offset,
        pointer("uint16_t[]", columns.type) as type_,
        pointer("uint16_t[]", columns.flags) as flags,
        pointer("uint32_t[]", columns.payload_len) as payload_len,
        pointer("uint64_t[]", columns.segment_id) as segment_id,
        pointer("uint64_t[]", columns.logical_offset) as logical_offset,
        pointer("uint64_t[]", columns.timestamp_ms) as timestamp_ms,
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
            return crc64_of(span)


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
    out = bytearray(len(types) * (_MANIFEST_HEADER_LEN + 7) + byte_len(payloads))
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
    count = check_columns(
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
        pointer("uint16_t[]", types) as type_,
        pointer("uint64_t[]", segment_ids) as segment_id,
        pointer("uint64_t[]", logical_offsets) as logical_offset,
        pointer("uint64_t[]", timestamps_ms) as timestamp_ms,
        pointer("uint32_t[]", payload_lens) as payload_len,
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
        if length + -length % 8 > U32_MAX:
            return f"record {i}: a payload of {length} bytes is too long"
    if sum(payload_lens) != payloads_len:
        return f"payload_lens add up to {sum(payload_lens)} but payloads holds {payloads_len} bytes"
    needed = sum(_MANIFEST_HEADER_LEN + length + -length % 8 for length in payload_lens)
    return f"{len(payload_lens)} records need {needed} bytes but out has room for {room}"
