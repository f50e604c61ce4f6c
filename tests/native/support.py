"""Valid encodings to damage, and comparisons with the reference."""

from __future__ import annotations

import random
from array import array

from aof2 import native
from aof2.native import reference


def segment(version: int, payloads: list[bytes], *, logical: int = 0, flags: int = 0) -> bytes:
    """Consecutive records of these payloads."""
    lengths = array("I", map(len, payloads))
    offsets = array("Q")
    for payload in payloads:
        offsets.append(logical)
        logical += len(payload)
    count = len(payloads)
    return native.segment_encode(
        version,
        b"".join(payloads),
        lengths,
        offsets,
        array("Q", range(1000, 1000 + count)),
        array("Q", range(7, 7 + count)),
        array("I", [flags]) * count,
    )


def manifest(records: list[tuple[int, bytes]], crc64: int = 0) -> bytes:
    """Records of (type, payload)."""
    count = len(records)
    encoded, _ = native.manifest_encode(
        array("H", [kind for kind, _ in records]),
        array("Q", range(1, 1 + count)),
        array("Q", range(100, 100 + count)),
        array("Q", range(1000, 1000 + count)),
        b"".join(payload for _, payload in records),
        array("I", [len(payload) for _, payload in records]),
        crc64,
    )
    return encoded


def with_marker(buf: bytes, span_start: int, durable_len: int) -> bytes:
    """`buf` and a commit marker over [span_start, len(buf))."""
    crc = reference.crc64(buf[span_start:])
    return buf + manifest([(15, reference.marker_payload(span_start, crc, durable_len))])


def two_commits(start: int = 0) -> bytes:
    """`start` bytes of something else, then two committed spans and one uncommitted record."""
    buf = bytes(range(start)) + manifest([(0, b"a" * 12), (3, b"b" * 24)])
    buf = with_marker(buf, start, 4096)
    span = len(buf)
    buf = with_marker(buf + manifest([(15, b"\x02\0\0\0\x02\0xy"), (6, b"key")]), span, 8192)
    return buf + manifest([(13, b"c" * 8)])


def check_segment(buf: bytes, **options: int) -> reference.SegmentScan:
    """Scans by both, in small batches and large ones, and returns what the reference says once they agree."""
    expected = reference.segment_scan(buf, **options)  # type: ignore[arg-type]
    for rows_max in (3, 65536):
        scanner = native.SegmentScanner(buf, rows_max=rows_max, **options)  # type: ignore[arg-type]
        rows = [row for batch in scanner for row in zip(*batch, strict=True)]
        got = reference.SegmentScan(
            scanner.pos,
            scanner.crc64,
            scanner.next_logical,
            scanner.last_ts_ms,
            scanner.outcome,
            scanner.fault,
            rows,
        )
        assert got == expected
        assert scanner.total == len(rows)
    return expected


def check_manifest(buf: bytes, start: int, end: int | None = None, **options: int) -> reference.ManifestScan:
    """Scans by both, and returns what the reference says once they agree."""
    expected = reference.manifest_scan(buf, start, end, **options)
    scan = native.manifest_scan(buf, start, end, **options)
    rows = list(zip(*scan.rows, strict=True))
    got = reference.ManifestScan(
        scan.pos,
        scan.crc64,
        scan.marker_end,
        scan.marker_crc64,
        scan.marker_count,
        scan.durable_len,
        scan.outcome,
        scan.fault,
        rows,
    )
    assert got == expected
    return expected


def patched(buf: bytes, at: int, replacement: bytes) -> bytes:
    """`buf` with some bytes replaced."""
    return buf[:at] + replacement + buf[at + len(replacement) :]


def noise(length: int, seed: int = 1) -> bytes:
    """The same bytes every time."""
    return random.Random(seed).randbytes(length)
