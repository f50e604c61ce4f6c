"""The C core again, slow and obvious: what tests hold the fast paths to, and what benchmarks start from.

Nothing here shares code or constants with the C side beyond the formats themselves. Rows are plain tuples in the
order of the columns of `SegmentRows` and `ManifestRows`.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from aof2.native import Fault, Outcome

POLY_CRC64 = 0x9A6C9329AC4BC9B5
POLY_CRC32 = 0xEDB88320
ONES_64 = 2**64 - 1

SEGMENT_HEADER = {2: struct.Struct("<IIQQI"), 3: struct.Struct("<IIQQIQ")}
MANIFEST_HEADER = struct.Struct("<HHIQQQQ")
MARKER_PAYLOAD = struct.Struct("<IHQQQH")
CUSTOM_EVENT = 15
MARKER_SCHEMA_ID = 1
MARKER_BLOB_LEN = 24
SEGMENT_FLAGS_KNOWN = 3


# -- checksums ---------------------------------------------------------------------------------------------------


def crc64_bitwise(data: bytes, crc: int = 0) -> int:
    """crc64-nvme straight from its definition, a bit at a time."""
    register = crc ^ ONES_64
    for octet in data:
        register ^= octet
        for _ in range(8):
            register = register >> 1 ^ (POLY_CRC64 if register & 1 else 0)
    return register ^ ONES_64


def _table(poly: int) -> list[int]:
    table = []
    for octet in range(256):
        register = octet
        for _ in range(8):
            register = register >> 1 ^ (poly if register & 1 else 0)
        table.append(register)
    return table


TABLE_CRC64 = _table(POLY_CRC64)
TABLE_CRC32 = _table(POLY_CRC32)


def crc64(data: bytes, crc: int = 0) -> int:
    """crc64-nvme a byte at a time."""
    register = crc ^ ONES_64
    for octet in data:
        register = register >> 8 ^ TABLE_CRC64[(register ^ octet) & 255]
    return register ^ ONES_64


_crc64 = crc64  # where a parameter has the name


def crc32(data: bytes, crc: int = 0) -> int:
    """CRC-32 by zlib."""
    return zlib.crc32(data, crc)


def crc64_prefixes(data: bytes, crc: int = 0) -> list[int]:
    """crc64 of every prefix of `data`, shortest (empty) first."""
    prefixes = [crc]
    for octet in data:
        prefixes.append(crc64(bytes((octet,)), prefixes[-1]))
    return prefixes


def crc64_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """By linearity: A's checksum carried over `len_b` zero bytes, plus B's."""
    return _over_zeros(crc_a, len_b, TABLE_CRC64) ^ crc_b


def crc32_combine(crc_a: int, crc_b: int, len_b: int) -> int:
    """By linearity: A's checksum carried over `len_b` zero bytes, plus B's."""
    return _over_zeros(crc_a, len_b, TABLE_CRC32) ^ crc_b


def _over_zeros(register: int, count: int, table: list[int]) -> int:
    for _ in range(count):
        register = register >> 8 ^ table[register & 255]
    return register


# -- segments ----------------------------------------------------------------------------------------------------


@dataclass
class SegmentScan:
    """What `SegmentScanner` says once exhausted."""

    pos: int
    crc64: int
    next_logical: int
    last_ts_ms: int = 0
    outcome: Outcome = Outcome.CLEAN
    fault: Fault = Fault.NONE
    rows: list[tuple[int, ...]] = field(default_factory=list)


def segment_scan(
    buf: bytes,
    *,
    start: int,
    end: int | None = None,
    version: int,
    durable: int = 0,
    crc64: int = 0,
    next_logical: int = 0,
) -> SegmentScan:
    """One record after the other until the end or a fault."""
    end = len(buf) if end is None else min(end, len(buf))
    scan = SegmentScan(start, crc64, next_logical)
    if start > end:
        scan.outcome, scan.fault = Outcome.TORN, Fault.HEADER_PAST_END
        return scan
    while scan.pos < end:
        fault = _segment_fault(buf, scan.pos, end, version, scan.next_logical)
        if fault:
            scan.fault = fault
            scan.outcome = _segment_outcome(fault, scan.pos, durable)
            break
        _segment_consume(scan, buf, version)
    scan.crc64 = _crc64(buf[start : scan.pos], crc64)
    return scan


def _segment_fault(buf: bytes, pos: int, end: int, version: int, next_logical: int) -> Fault:
    header = SEGMENT_HEADER[version]
    if pos + header.size > end:
        return Fault.HEADER_PAST_END
    if not any(buf[pos : pos + header.size]):
        return Fault.ZEROS
    payload_len, crc, logical_offset, _, flags, *_ = header.unpack_from(buf, pos)
    if payload_len == 0 and version == 2:
        return Fault.EMPTY
    if pos + header.size + payload_len > end:
        return Fault.PAYLOAD_PAST_END
    if crc != segment_record_crc32(buf[pos : pos + header.size + payload_len], version):
        return Fault.CRC
    if logical_offset < next_logical or logical_offset + payload_len > ONES_64:
        return Fault.ORDER
    if flags & ~SEGMENT_FLAGS_KNOWN:
        return Fault.FLAGS
    return Fault.NONE


def segment_record_crc32(record: bytes, version: int) -> int:
    """The checksum a whole record should hold."""
    if version == 2:
        return zlib.crc32(record[SEGMENT_HEADER[2].size :])
    return zlib.crc32(record[:4] + bytes(4) + record[8:])


def _segment_outcome(fault: Fault, pos: int, durable: int) -> Outcome:
    if fault in (Fault.ORDER, Fault.FLAGS) or pos < durable:
        return Outcome.CORRUPT
    return Outcome.TORN


def _segment_consume(scan: SegmentScan, buf: bytes, version: int) -> None:
    header = SEGMENT_HEADER[version]
    payload_len, _, logical_offset, timestamp_ms, flags, *rest = header.unpack_from(buf, scan.pos)
    ext_id = rest[0] if rest else 0
    scan.rows.append((scan.pos, payload_len, logical_offset, timestamp_ms, ext_id, flags))
    scan.next_logical = logical_offset + payload_len
    scan.last_ts_ms = timestamp_ms
    scan.pos += header.size + payload_len


def segment_resync(buf: bytes, from_: int, end: int | None, version: int, min_logical: int) -> int | None:
    """Every offset in turn; checksums stop when eight times the range and 64 KiB have been summed."""
    end = len(buf) if end is None else min(end, len(buf))
    budget = 8 * (end - from_) + 64 * 1024
    header = SEGMENT_HEADER[version]
    for pos in range(from_, end - header.size + 1):
        payload_len, crc, logical_offset, _, flags, *_ = header.unpack_from(buf, pos)
        stop = pos + header.size + payload_len
        zeros = not any(buf[pos : pos + header.size])
        if zeros or (version == 2 and payload_len == 0) or stop > end or flags & ~SEGMENT_FLAGS_KNOWN:
            continue
        if logical_offset < min_logical or logical_offset + payload_len > ONES_64 or stop - pos > budget:
            continue
        budget -= stop - pos
        if crc == segment_record_crc32(buf[pos:stop], version):
            return pos
    return None


def segment_encode(
    version: int,
    payloads: bytes,
    lengths: Sequence[int],
    logical_offsets: Sequence[int],
    timestamps_ms: Sequence[int],
    ext_ids: Sequence[int],
    flags: Sequence[int],
) -> bytes:
    """Header, payload, header, payload."""
    out = bytearray()
    taken = 0
    columns = zip(lengths, logical_offsets, timestamps_ms, ext_ids, flags, strict=True)
    for length, logical_offset, timestamp_ms, ext_id, flag in columns:
        fields = [length, 0, logical_offset, timestamp_ms, flag, *([ext_id] if version == 3 else [])]
        payload = payloads[taken : taken + length]
        fields[1] = segment_record_crc32(SEGMENT_HEADER[version].pack(*fields) + payload, version)
        out += SEGMENT_HEADER[version].pack(*fields) + payload
        taken += length
    return bytes(out)


# -- manifest ----------------------------------------------------------------------------------------------------


@dataclass
class ManifestScan:
    """What the fast `ManifestScan` says."""

    pos: int
    crc64: int
    marker_end: int
    marker_crc64: int
    marker_count: int = 0
    durable_len: int = 0
    outcome: Outcome = Outcome.CLEAN
    fault: Fault = Fault.NONE
    rows: list[tuple[int, ...]] = field(default_factory=list)


def manifest_scan(
    buf: bytes, start: int, end: int | None = None, *, crc64: int = 0, span_start: int | None = None
) -> ManifestScan:
    """One record after the other until the end or a fault."""
    end = len(buf) if end is None else min(end, len(buf))
    scan = ManifestScan(start, crc64, marker_end=start, marker_crc64=crc64)
    span_start = start if span_start is None else span_start
    if start > end:
        scan.outcome, scan.fault = Outcome.TORN, Fault.HEADER_PAST_END
        return scan
    while scan.pos < end:
        fault = _manifest_fault(buf, scan.pos, end, span_start)
        if fault:
            scan.fault = fault
            torn = fault in (Fault.HEADER_PAST_END, Fault.PAYLOAD_PAST_END, Fault.ZEROS)
            scan.outcome = Outcome.TORN if torn else Outcome.CORRUPT
            break
        _manifest_consume(scan, buf)
        if scan.marker_end == scan.pos:
            span_start = scan.pos
    return scan


def _manifest_fault(buf: bytes, pos: int, end: int, span_start: int) -> Fault:
    if pos + MANIFEST_HEADER.size > end:
        return Fault.HEADER_PAST_END
    if not any(buf[pos : pos + MANIFEST_HEADER.size]):
        return Fault.ZEROS
    record_type, _, payload_len, _, _, _, payload_crc64 = MANIFEST_HEADER.unpack_from(buf, pos)
    if payload_len == 0:
        return Fault.EMPTY
    if payload_len % 8:
        return Fault.ALIGN
    if pos + MANIFEST_HEADER.size + payload_len > end:
        return Fault.PAYLOAD_PAST_END
    payload = buf[pos + MANIFEST_HEADER.size : pos + MANIFEST_HEADER.size + payload_len]
    if crc64(payload) != payload_crc64:
        return Fault.CRC
    if _claims_marker(record_type, payload):
        expected = marker_payload(span_start, crc64(buf[span_start:pos]), marker_durable_len(payload))
        return Fault.NONE if payload == expected else Fault.MARKER
    return Fault.NONE


def _claims_marker(record_type: int, payload: bytes) -> bool:
    return record_type == CUSTOM_EVENT and payload[:4] == MARKER_SCHEMA_ID.to_bytes(4, "little")


def marker_payload(span_start: int, span_crc64: int, durable_len: int) -> bytes:
    """The payload of a commit marker."""
    return MARKER_PAYLOAD.pack(MARKER_SCHEMA_ID, MARKER_BLOB_LEN, span_start, span_crc64, durable_len, 0)


def marker_durable_len(payload: bytes) -> int:
    """What a marker's payload says was durable, however damaged the rest of it is."""
    return int.from_bytes(payload[22:30], "little")


def _manifest_consume(scan: ManifestScan, buf: bytes) -> None:
    *fields, _ = MANIFEST_HEADER.unpack_from(buf, scan.pos)
    stop = scan.pos + MANIFEST_HEADER.size + fields[2]
    payload = buf[scan.pos + MANIFEST_HEADER.size : stop]
    scan.rows.append((scan.pos, *fields))
    scan.crc64 = crc64(buf[scan.pos : stop], scan.crc64)
    scan.pos = stop
    if _claims_marker(fields[0], payload):
        scan.marker_end, scan.marker_count, scan.marker_crc64 = stop, len(scan.rows), scan.crc64
        scan.durable_len = max(scan.durable_len, marker_durable_len(payload))


def manifest_probe_durable(buf: bytes, from_: int, end: int | None = None) -> int:
    """Every multiple of 8 in turn."""
    end = len(buf) if end is None else min(end, len(buf))
    record_len = MANIFEST_HEADER.size + MARKER_PAYLOAD.size
    durable_len = 0
    for pos in range(-(-from_ // 8) * 8, end - record_len + 1, 8):
        record_type, _, payload_len, _, _, _, payload_crc64 = MANIFEST_HEADER.unpack_from(buf, pos)
        payload = buf[pos + MANIFEST_HEADER.size : pos + record_len]
        shape = MARKER_PAYLOAD.unpack(payload)
        is_marker = (record_type, payload_len, shape[0], shape[1], shape[5]) == (15, 32, 1, 24, 0)
        if is_marker and crc64(payload) == payload_crc64:
            durable_len = max(durable_len, marker_durable_len(payload))
    return durable_len


def manifest_encode(
    types: Sequence[int],
    segment_ids: Sequence[int],
    logical_offsets: Sequence[int],
    timestamps_ms: Sequence[int],
    payloads: bytes,
    payload_lens: Sequence[int],
    crc64: int = 0,
) -> tuple[bytes, int]:
    """Header, padded payload, header, padded payload."""
    out = bytearray()
    taken = 0
    columns = zip(types, segment_ids, logical_offsets, timestamps_ms, payload_lens, strict=True)
    for record_type, segment_id, logical_offset, timestamp_ms, length in columns:
        payload = payloads[taken : taken + length] + bytes(-length % 8)
        out += MANIFEST_HEADER.pack(
            record_type, 0, len(payload), segment_id, logical_offset, timestamp_ms, _crc64(payload)
        )
        out += payload
        taken += length
    return bytes(out), _crc64(bytes(out), crc64)


# -- framing and diff --------------------------------------------------------------------------------------------


def frame_lines(buf: bytes, max_record: int) -> tuple[list[int], int]:
    """Grow a record a byte at a time until a newline or the limit ends it."""
    lengths: list[int] = []
    length = 0
    for octet in buf:
        length += 1
        if octet == ord("\n") or length == max_record:
            lengths.append(length)
            length = 0
    return lengths, sum(lengths)


def page_diff(a: bytes, b: bytes, page_len: int) -> tuple[bytes, int]:
    """Compare slices; a slice past the end is empty."""
    pages = -(-max(len(a), len(b)) // page_len)
    bits = 0
    for i in range(pages):
        page = slice(i * page_len, (i + 1) * page_len)
        bits |= (a[page] != b[page]) << i
    return bits.to_bytes(-(-pages // 8), "little"), bits.bit_count()
