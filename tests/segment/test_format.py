"""The bytes: worked examples, round trips, and everything a decoder must refuse."""

from __future__ import annotations

import contextlib
import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment import format as fmt
from aof2.engine.segment.format import Pointer, SegmentFooter, SegmentHeader
from aof2.native import crc64

u64 = st.integers(0, 2**64 - 1)
HEADER_V3 = SegmentHeader(3, 1, 2, 3, 4, 5, 4096, 6)
FOOTER_V3 = SegmentFooter(3, 1, 100, 0xDEAD, 6, 1, 2, 7, 8, True)


def resum(data: bytes) -> bytes:
    """`data` with its trailing crc64 made right again."""
    return data[:-8] + struct.pack("<Q", crc64(data[:-8]))


def patched(data: bytes, offset: int, piece: bytes, *, sum_again: bool = True) -> bytes:
    out = data[:offset] + piece + data[offset + len(piece) :]
    return resum(out) if sum_again else out


def test_worked_v2() -> None:
    header = bytes.fromhex(
        "4d474553 32464f41 02000000 0100000000000000 0200000000000000 03000000000000000000000000000000 0000000000000000"
    )
    assert fmt.encode_header(SegmentHeader(2, 1, 2, 3)) == header
    record = bytes.fromhex("02000000 ac2a93d8 0400000000000000 0500000000000000 01000000 6869")
    assert fmt.encode_record(2, b"hi", 4, 5, flags=1) == record
    footer = bytes.fromhex("0100000000000000 5200000000000000 0900000000000000 0600000000000000 0100000000000000")
    assert fmt.encode_footer(SegmentFooter(2, 1, 82, 9, 6)) == footer


def test_worked_v3() -> None:
    header = fmt.encode_header(HEADER_V3)
    assert header[:88] == bytes.fromhex(
        "4d474553 32464f41 03000000 60000000 0100000000000000 0200000000000000 0300000000000000 0400000000000000"
        "0500000000000000 00100000 00000000 0600000000000000 0000000000000000 0000000000000000"
    )
    assert header == resum(header) and len(header) == 96
    footer = fmt.encode_footer(FOOTER_V3)
    assert footer[:88] == bytes.fromhex(
        "544f4f46 32464f41 03000000 60000000 0200000000000000 0100000000000000 6400000000000000 adde000000000000"
        "0600000000000000 0100000000000000 0700000000000000 0800000000000000 01 00000000000000"
    )
    assert footer == resum(footer) and len(footer) == 96
    record = fmt.encode_record(3, b"hi", 4, 5, 6, 1)
    head = struct.pack("<IIQQIQ", 2, 0, 4, 5, 1, 6)
    assert record == head[:4] + struct.pack("<I", zlib.crc32(head + b"hi")) + head[8:] + b"hi"


def test_worked_pointer() -> None:
    data = fmt.encode_pointer(Pointer(2, 3, 4))
    assert data[:40] == bytes.fromhex(
        "54505343 32464f41 01000000 30000000 0200000000000000 0300000000000000 0400000000000000"
    )
    assert data == resum(data) and len(data) == 48


@given(u64, u64, u64, u64, u64, st.integers(192, 2**32 - 1), u64)
def test_header_round_trip(a: int, b: int, c: int, d: int, e: int, size: int, ext_id: int) -> None:
    v3 = SegmentHeader(3, a, b, c, d, e, size, ext_id)
    assert fmt.decode_header(fmt.encode_header(v3) + b"more") == v3
    v2 = SegmentHeader(2, a, b, c)
    assert fmt.decode_header(fmt.encode_header(v2)) == v2


@given(u64, u64, u64, u64, st.integers(0, 3), u64, st.integers(0, 2**63 - 1), u64, st.booleans())
def test_footer_round_trip(
    n: int, durable: int, crc: int, ext_id: int, bits: int, segment_id: int, ts_ms: int, mark: int, failed: bool
) -> None:
    v3 = SegmentFooter(3, n, durable, crc, ext_id, 1 | bits << 1, segment_id, ts_ms, mark, failed)
    assert fmt.decode_footer(3, fmt.encode_footer(v3)) == v3
    v2 = SegmentFooter(2, n, durable, crc, ext_id, 1 | bits << 1)
    assert fmt.decode_footer(2, fmt.encode_footer(v2)) == v2


@given(u64, u64, u64)
def test_pointer_round_trip(a: int, b: int, c: int) -> None:
    assert fmt.decode_pointer(fmt.encode_pointer(Pointer(a, b, c))) == Pointer(a, b, c)


@pytest.mark.parametrize(
    ("offset", "piece", "error"),
    [
        (0, b"\0", CorruptError),  # magic
        (8, struct.pack("<I", 4), UnsupportedError),
        (8, struct.pack("<I", 0), CorruptError),
        (8, struct.pack("<I", 1), CorruptError),
        (12, struct.pack("<I", 95), CorruptError),  # header_len
        (12, struct.pack("<I", 0), CorruptError),
        (12, struct.pack("<I", 2**32 - 1), CorruptError),
        (56, struct.pack("<I", 191), CorruptError),  # max_size
        (60, b"\1", UnsupportedError),  # reserved0
        (72, b"\1", UnsupportedError),  # reserved
        (87, b"\1", UnsupportedError),
    ],
)
def test_header_v3_refused(offset: int, piece: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        fmt.decode_header(patched(fmt.encode_header(HEADER_V3), offset, piece))


def test_reserved_without_checksum_is_corrupt() -> None:
    with pytest.raises(CorruptError):
        fmt.decode_header(patched(fmt.encode_header(HEADER_V3), 72, b"\1", sum_again=False))
    with pytest.raises(CorruptError):
        fmt.decode_footer(3, patched(fmt.encode_footer(FOOTER_V3), 81, b"\1", sum_again=False))


def test_header_v2_refused() -> None:
    data = fmt.encode_header(SegmentHeader(2, 1, 2, 3))
    with pytest.raises(UnsupportedError):
        fmt.decode_header(patched(data, 36, b"\1", sum_again=False))
    for length in range(52):
        with pytest.raises(CorruptError):
            fmt.decode_header(data[:length])


@pytest.mark.parametrize(
    ("offset", "piece", "error"),
    [
        (0, b"\0", CorruptError),
        (8, struct.pack("<I", 4), UnsupportedError),
        (8, struct.pack("<I", 2), CorruptError),
        (12, struct.pack("<I", 97), CorruptError),  # footer_len
        (56, struct.pack("<Q", 9), UnsupportedError),  # flags
        (56, struct.pack("<Q", 2), CorruptError),  # not sealed
        (64, struct.pack("<q", -1), CorruptError),
        (80, b"\2", UnsupportedError),  # flush_failure
        (81, b"\1", UnsupportedError),  # reserved
    ],
)
def test_footer_v3_refused(offset: int, piece: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        fmt.decode_footer(3, patched(fmt.encode_footer(FOOTER_V3), offset, piece))


def test_footer_v2_refused() -> None:
    footer = SegmentFooter(2, 1, 82, 9, 6)
    with pytest.raises(UnsupportedError):
        fmt.decode_footer(2, fmt.encode_footer(replace(footer, flags=1 | 8)))
    with pytest.raises(CorruptError):
        fmt.decode_footer(2, fmt.encode_footer(replace(footer, flags=2)))
    with pytest.raises(CorruptError):
        fmt.decode_footer(2, fmt.encode_footer(footer)[:-1])


def test_pointer_refused() -> None:
    data = fmt.encode_pointer(Pointer(2, 3, 4))
    with pytest.raises(UnsupportedError):
        fmt.decode_pointer(patched(data, 8, struct.pack("<I", 2)))
    for bad in (patched(data, 8, bytes(4)), patched(data, 12, struct.pack("<I", 49)), data + b"\0", b"", data[:47]):
        with pytest.raises(CorruptError):
            fmt.decode_pointer(bad)


@given(st.binary(max_size=300))
def test_noise_is_a_typed_error(data: bytes) -> None:
    for decode in (
        fmt.decode_header,
        fmt.decode_pointer,
        lambda d: fmt.decode_footer(2, d),
        lambda d: fmt.decode_footer(3, d),
    ):
        with contextlib.suppress(CorruptError, UnsupportedError):
            decode(data)
