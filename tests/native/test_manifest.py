"""Manifest records: round trips, commit markers, and damage refused exactly as the reference refuses it."""

from __future__ import annotations

import mmap
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2 import native
from aof2.native import Fault, Outcome, reference
from tests.native.support import check_manifest, manifest, noise, patched, two_commits, with_marker

U64 = st.integers(0, 2**64 - 1)
RECORDS = st.lists(st.tuples(st.integers(0, 14), st.binary(min_size=1, max_size=100), U64, U64, U64), max_size=12)


@given(RECORDS, U64, st.integers(0, 40))
def test_round_trip(records: list[tuple[int, bytes, int, int, int]], crc: int, start: int) -> None:
    columns = (
        array("H", [r[0] for r in records]),
        array("Q", [r[2] for r in records]),
        array("Q", [r[3] for r in records]),
        array("Q", [r[4] for r in records]),
        b"".join(r[1] for r in records),
        array("I", [len(r[1]) for r in records]),
    )
    encoded, crc_after = native.manifest_encode(*columns, crc64=crc)
    assert (encoded, crc_after) == reference.manifest_encode(*columns, crc64=crc)
    out = bytearray(b"\xee" * (start + len(encoded) + 3))
    assert native.manifest_encode_into(out, start, *columns, crc64=crc) == (len(encoded), crc_after)
    assert out == b"\xee" * start + encoded + b"\xee" * 3
    scan = check_manifest(bytes(out), start, start + len(encoded), crc64=crc)
    assert (scan.outcome, scan.crc64, scan.marker_end) == (Outcome.CLEAN, crc_after, start)
    for row, record in zip(scan.rows, records, strict=True):
        assert out[row[0] + 40 :][: len(record[1])] == record[1]
        assert row[1:] == (record[0], 0, len(record[1]) + -len(record[1]) % 8, *record[2:])


def test_commits() -> None:
    buf = two_commits(64)
    scan = check_manifest(buf, 64, crc64=5)
    assert (scan.outcome, scan.durable_len, scan.marker_count) == (Outcome.CLEAN, 8192, 6)
    assert scan.marker_end == len(buf) - 48
    assert scan.marker_crc64 == native.crc64(buf[64 : scan.marker_end], 5)


def test_a_scan_may_start_inside_a_span() -> None:
    buf = two_commits(64)
    second = check_manifest(buf, 64).rows[1][0]
    assert check_manifest(buf, second, span_start=64).outcome is Outcome.CLEAN
    assert check_manifest(buf, second).fault is Fault.MARKER
    with pytest.raises(ValueError, match="span_start 65"):
        native.manifest_scan(buf, 64, span_start=65)
    with pytest.raises(ValueError, match="span_start 0"):
        native.manifest_scan(buf, len(buf) + 1, span_start=0)


def test_truncation_at_every_byte() -> None:
    buf = two_commits(16)
    for length in range(len(buf) + 1):
        scan = check_manifest(buf[:length], 16)
        assert scan.outcome is not Outcome.CORRUPT
        assert check_manifest(buf, 16, length) == scan


def test_a_flipped_bit_at_every_byte() -> None:
    buf = two_commits(16)
    vouched_for = set(range(16, len(buf)))
    for offset, kind, _, payload_len, *_ in check_manifest(buf, 16).rows:
        is_last = offset + 40 + payload_len == len(buf)
        if is_last or (kind, payload_len) == (15, 32):  # in no marker's span: only the chunk's crc covers
            vouched_for -= {*range(offset, offset + 4), *range(offset + 8, offset + 32)}
    for at in range(16, len(buf)):
        scan = check_manifest(patched(buf, at, bytes((buf[at] ^ 1 << at % 8,))), 16)
        if at in vouched_for:
            assert scan.fault is not Fault.NONE
            assert scan.marker_end <= at


@pytest.mark.parametrize("lie", [0, 1, 4, 8, 4096, 2**31, 2**32 - 40, 2**32 - 8, 2**32 - 1])
def test_lengths_that_lie(lie: int) -> None:
    buf = two_commits(0)
    for offset, *_ in check_manifest(buf, 0).rows:
        scan = check_manifest(patched(buf, offset + 4, struct.pack("<I", lie)), 0)
        assert scan.pos >= offset


def test_faults() -> None:
    buf = manifest([(0, b"abc")])
    for damaged, outcome, fault in (
        (buf + bytes(40), Outcome.TORN, Fault.ZEROS),
        (buf + bytes(39), Outcome.TORN, Fault.HEADER_PAST_END),
        (buf + buf[:-1], Outcome.TORN, Fault.PAYLOAD_PAST_END),
        (buf + patched(buf, 4, b"\0"), Outcome.CORRUPT, Fault.EMPTY),
        (buf + patched(buf, 4, b"\x07"), Outcome.CORRUPT, Fault.ALIGN),
        (buf + patched(buf, 47, b"\x07"), Outcome.CORRUPT, Fault.CRC),
    ):
        scan = check_manifest(damaged, 0)
        assert (scan.outcome, scan.fault, scan.pos, len(scan.rows)) == (outcome, fault, 48, 1)


@pytest.mark.parametrize(
    "payload",
    [
        struct.pack("<IHQQQH", 1, 23, 48, 0, 9, 0),
        struct.pack("<IHQQQH", 1, 24, 47, 0, 9, 0),
        struct.pack("<IHQQQH", 1, 24, 0, 1, 9, 0),
        struct.pack("<IHQQQH", 1, 24, 0, native.crc64(manifest([(0, b"abc")])), 9, 1),
        struct.pack("<IHxx", 1, 24),
        struct.pack("<IHQQQH8x", 1, 24, 0, native.crc64(manifest([(0, b"abc")])), 9, 0),
    ],
)
def test_a_marker_that_disagrees(payload: bytes) -> None:
    buf = manifest([(0, b"abc")])
    scan = check_manifest(buf + manifest([(15, payload)]), 0)
    assert (scan.outcome, scan.fault, scan.pos) == (Outcome.CORRUPT, Fault.MARKER, 48)
    assert scan.durable_len == 0


def test_markers_are_not_told_by_type_alone() -> None:
    buf = manifest([(15, struct.pack("<IHxx", 2, 0)), (14, struct.pack("<IHxx", 1, 0))])
    assert check_manifest(buf, 0).outcome is Outcome.CLEAN


def test_a_long_chunk_is_summed_in_blocks() -> None:
    buf, span = b"", 0
    for i in range(6):
        buf = with_marker(buf + manifest([(1, noise(8000, i))] * (i + 1)), span, i)
        span = len(buf)
    scan = check_manifest(buf, 0)
    assert (scan.outcome, scan.marker_end, scan.durable_len) == (Outcome.CLEAN, len(buf), 5)


def test_start_past_the_end() -> None:
    buf = two_commits(0)
    for start, end in ((len(buf) + 1, None), (11, 10), (2**64 - 1, None)):
        scan = check_manifest(buf, start, end)
        assert (scan.outcome, scan.fault, scan.pos) == (Outcome.TORN, Fault.HEADER_PAST_END, start)
    assert check_manifest(b"", 0).outcome is Outcome.CLEAN
    assert check_manifest(buf, 0, 2**40).outcome is Outcome.CLEAN


def test_columns_are_exact_and_typed() -> None:
    rows = native.manifest_scan(two_commits(0), 0).rows
    assert [column.format for column in rows] == ["Q", "H", "H", "I", "Q", "Q", "Q"]
    assert {len(column) for column in rows} == {7}


# -- probe -------------------------------------------------------------------------------------------------------


def test_probe_needs_nothing_before_the_marker() -> None:
    buf = bytearray(two_commits(0))
    buf[:48] = noise(48)
    assert native.manifest_scan(buf, 0).durable_len == 0
    assert native.manifest_probe_durable(buf, 0) == 8192
    first, second = (row[0] for row in check_manifest(two_commits(0), 0).rows if row[1] == 15 and row[3] == 32)
    assert native.manifest_probe_durable(buf, 0, second) == 4096
    assert native.manifest_probe_durable(buf, first + 1, second + 71) == 0
    assert native.manifest_probe_durable(buf, first + 1, second + 72) == 8192
    assert native.manifest_probe_durable(buf, 2**64 - 1) == 0


@given(st.data())
def test_probe_agrees_on_anything(data: st.DataObject) -> None:
    buf = bytearray(two_commits(0))
    for _ in range(data.draw(st.integers(0, 4))):
        buf[data.draw(st.integers(0, len(buf) - 1))] = data.draw(st.integers(0, 255))
    from_, end = data.draw(st.integers(0, 500)), data.draw(st.none() | st.integers(0, 500))
    assert native.manifest_probe_durable(buf, from_, end) == reference.manifest_probe_durable(bytes(buf), from_, end)


# -- encode ------------------------------------------------------------------------------------------------------


def columns_of(**changes: array[int]) -> dict[str, array[int]]:
    columns = {
        "types": array("H", [1, 2]),
        "segment_ids": array("Q", [1, 1]),
        "logical_offsets": array("Q", [1, 1]),
        "timestamps_ms": array("Q", [1, 1]),
        "payload_lens": array("I", [1, 7]),
    }
    return columns | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"payload_lens": array("I", [8, 0])}, "record 1: a payload cannot be empty"),
        ({"payload_lens": array("I", [1, 2**32 - 1])}, "record 1: a payload of 4294967295 bytes is too long"),
        ({"payload_lens": array("I", [1, 6])}, "add up to 7 but payloads holds 8"),
        ({"payload_lens": array("I", [1, 8])}, "add up to 9 but payloads holds 8"),
        ({"types": array("H", [1])}, "has 1"),
        ({"types": array("I", [1, 2])}, "types: items of format 'I', must be 'H'"),
    ],
)
def test_encode_refuses(changes: dict[str, array[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.manifest_encode(payloads=b"abcdefgh", **columns_of(**changes))


def test_many_records_are_summed_in_blocks() -> None:
    count = 1000
    ids = array("Q", range(count))
    columns = (array("H", [3]) * count, ids, ids, ids, noise(37 * count), array("I", [37]) * count)
    assert native.manifest_encode(*columns, crc64=9) == reference.manifest_encode(*columns, crc64=9)


def test_encode_into_room_that_is_not_there() -> None:
    out = bytearray(100)
    with pytest.raises(ValueError, match="need 96 bytes but out has room for 95"):
        native.manifest_encode_into(out, 5, payloads=b"abcdefgh", **columns_of())
    with pytest.raises(ValueError, match="offset 101: out has 100 bytes"):
        native.manifest_encode_into(out, 101, payloads=b"abcdefgh", **columns_of())
    assert native.manifest_encode_into(out, 4, payloads=b"abcdefgh", **columns_of())[0] == 96
    with pytest.raises(BufferError):
        native.manifest_encode_into(memoryview(bytes(100)), 0, payloads=b"abcdefgh", **columns_of())


def test_buffers_are_let_go() -> None:
    with mmap.mmap(-1, 4096) as mapped:
        written, _ = native.manifest_encode_into(mapped, 8, payloads=b"abcdefgh", **columns_of())
        assert native.manifest_scan(mapped, 8, 8 + written, span_start=0).outcome is Outcome.CLEAN
        assert native.manifest_probe_durable(mapped, 0) == 0
        mapped.resize(8192)  # refused while anything holds the buffer
