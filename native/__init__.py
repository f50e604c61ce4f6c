"""The C core: checksums and hashes, record scans and encodes, line framing, page diff, bytes from a socket into a
file. What is done with many small files at once is in `small`, with a segment in two files in `segment_index`, with
stretches of a large file in `spans`.

Only modules of this folder import the compiled `ffi` and `lib`. Every call works on memory its caller owns, releases
the GIL while it runs, and has let go of each buffer when it returns, so an mmap can be resized or closed right after
it.
`native.h` is the C side of the same API; `reference.py` says the same things slowly.
"""

from __future__ import annotations

from aof2.native.checksums import (
    crc32,
    crc32_combine,
    crc32_with,
    crc64,
    crc64_combine,
    crc64_with,
    crc_implementations,
)
from aof2.native.columns import Buffer, Column, Fault, Outcome
from aof2.native.framing import frame_lines, page_diff
from aof2.native.manifest import (
    ManifestRows,
    ManifestScan,
    manifest_encode,
    manifest_encode_into,
    manifest_probe_durable,
    manifest_scan,
)
from aof2.native.receiving import Ending, Received, receive
from aof2.native.segment import SegmentRows, SegmentScanner, segment_encode, segment_resync
from aof2.native.spans import SPANS_MAX, SpanDigest, Spans, sha256_lanes, sha256_many

__all__ = [
    "SPANS_MAX",
    "Buffer",
    "Column",
    "Ending",
    "Fault",
    "ManifestRows",
    "ManifestScan",
    "Outcome",
    "Received",
    "SegmentRows",
    "SegmentScanner",
    "SpanDigest",
    "Spans",
    "crc32",
    "crc32_combine",
    "crc32_with",
    "crc64",
    "crc64_combine",
    "crc64_with",
    "crc_implementations",
    "frame_lines",
    "manifest_encode",
    "manifest_encode_into",
    "manifest_probe_durable",
    "manifest_scan",
    "page_diff",
    "receive",
    "segment_encode",
    "segment_resync",
    "sha256_lanes",
    "sha256_many",
]
