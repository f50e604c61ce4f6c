"""Segment records: what is encoded scans, what is damaged is refused exactly as the reference refuses it."""

from __future__ import annotations

import mmap
import struct
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2 import native
from aof2.native import Fault, Outcome, reference
from tests.native.support import check_segment, noise, patched, segment

VERSIONS = pytest.mark.parametrize("version", [2, 3])
HEADER_LEN = {2: 28, 3: 36}
PAYLOADS = [b"first", noise(300), b"x", noise(64)]
U64 = st.integers(0, 2**64 - 1)


def resummed(buf: bytes, version: int) -> bytes:
    """One record, its checksum made right again."""
    return patched(buf, 4, struct.pack("<I", reference.segment_record_crc32(buf, version)))


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[bytes], list[tuple[int, int, int, int]]]:
    version = draw(st.sampled_from([2, 3]))
    payloads = draw(st.lists(st.binary(min_size=3 - version, max_size=400), max_size=12))
    logical, fields = 0, []
    for payload in payloads:
        logical += draw(st.integers(0, 1000))
        fields.append((logical, draw(U64), draw(U64), draw(st.integers(0, 3))))
        logical += len(payload)
    return version, payloads, fields


@given(batches(), st.binary(max_size=50))
def test_round_trip(batch: tuple[int, list[bytes], list[tuple[int, int, int, int]]], before: bytes) -> None:
    version, payloads, fields = batch
    columns = (
        array("I", map(len, payloads)),
        array("Q", [f[0] for f in fields]),
        array("Q", [f[1] for f in fields]),
        array("Q", [f[2] for f in fields]),
        array("I", [f[3] for f in fields]),
    )
    encoded = native.segment_encode(version, b"".join(payloads), *columns)
    assert encoded == reference.segment_encode(version, b"".join(payloads), *columns)
    buf = before + encoded
    scan = check_segment(buf, start=len(before), version=version, crc64=native.crc64(before))
    assert (scan.outcome, scan.pos, scan.crc64) == (Outcome.CLEAN, len(buf), native.crc64(buf))
    found = [buf[row[0] + HEADER_LEN[version] :][: row[1]] for row in scan.rows]
    assert found == payloads
    assert [row[4] for row in scan.rows] == [f[2] if version == 3 else 0 for f in fields]


@VERSIONS
def test_truncation_at_every_byte(version: int) -> None:
    buf = segment(version, PAYLOADS)
    for length in range(len(buf) + 1):
        scan = check_segment(buf[:length], start=0, version=version)
        assert scan.outcome is not Outcome.CORRUPT
        by_end = check_segment(buf, start=0, end=length, version=version, durable=length)
        assert (by_end.pos, by_end.fault) == (scan.pos, scan.fault)
        assert by_end.outcome == (Outcome.CORRUPT if scan.fault else Outcome.CLEAN)


@VERSIONS
def test_a_flipped_bit_at_every_byte(version: int) -> None:
    buf = segment(version, PAYLOADS)
    for at in range(len(buf)):
        damaged = patched(buf, at, bytes((buf[at] ^ 1 << at % 8,)))
        scan = check_segment(damaged, start=0, version=version, durable=200)
        if version == 3:
            assert scan.fault is not Fault.NONE
            assert scan.pos <= at


@VERSIONS
@pytest.mark.parametrize("lie", [0, 1, 2**16, 2**31, 2**32 - 37, 2**32 - 1])
def test_lengths_that_lie(version: int, lie: int) -> None:
    buf = segment(version, PAYLOADS)
    for record in (0, 1, 3):
        at = sum(HEADER_LEN[version] + len(payload) for payload in PAYLOADS[:record])
        scan = check_segment(patched(buf, at, struct.pack("<I", lie)), start=0, version=version)
        assert scan.fault is not Fault.NONE or lie == len(PAYLOADS[record])
        assert len(scan.rows) in (record, len(PAYLOADS))


@VERSIONS
def test_zeros(version: int) -> None:
    buf = segment(version, PAYLOADS)
    scan = check_segment(buf + bytes(100), start=0, version=version, durable=len(buf))
    assert (scan.outcome, scan.fault, scan.pos) == (Outcome.TORN, Fault.ZEROS, len(buf))
    scan = check_segment(buf + bytes(100), start=0, version=version, durable=len(buf) + 1)
    assert (scan.outcome, scan.fault) == (Outcome.CORRUPT, Fault.ZEROS)


def test_empty_payloads() -> None:
    buf = segment(3, [b"", b"a", b"", b""])
    assert check_segment(buf, start=0, version=3).outcome is Outcome.CLEAN
    scan = check_segment(struct.pack("<IIQQI", 0, 0, 5, 5, 0), start=0, version=2)
    assert (scan.outcome, scan.fault) == (Outcome.TORN, Fault.EMPTY)


@VERSIONS
def test_order(version: int) -> None:
    buf = segment(version, [b"abc"], logical=10)
    assert check_segment(buf, start=0, version=version, next_logical=10).next_logical == 13
    scan = check_segment(buf, start=0, version=version, next_logical=11)
    assert (scan.outcome, scan.fault, scan.next_logical) == (Outcome.CORRUPT, Fault.ORDER, 11)
    overflowing = resummed(patched(buf, 8, struct.pack("<Q", 2**64 - 2)), version)
    assert check_segment(overflowing, start=0, version=version).fault is Fault.ORDER
    last = resummed(patched(buf, 8, struct.pack("<Q", 2**64 - 4)), version)
    assert check_segment(last, start=0, version=version).next_logical == 2**64 - 1


@VERSIONS
def test_reserved_flags(version: int) -> None:
    buf = resummed(patched(segment(version, [b"abc"]), 24, struct.pack("<I", 4)), version)
    scan = check_segment(buf, start=0, version=version)
    assert (scan.outcome, scan.fault) == (Outcome.CORRUPT, Fault.FLAGS)


@VERSIONS
def test_start_past_the_end(version: int) -> None:
    buf = segment(version, PAYLOADS)
    for start, end in ((len(buf) + 1, None), (11, 10), (2**64 - 1, None)):
        options = {"start": start, "version": version, "durable": 2**64 - 1}
        scan = check_segment(buf, **options, **({"end": end} if end is not None else {}))
        assert (scan.outcome, scan.fault, scan.pos) == (Outcome.TORN, Fault.HEADER_PAST_END, start)
    assert check_segment(buf, start=len(buf), version=version).outcome is Outcome.CLEAN
    assert check_segment(buf, start=0, end=2**40, version=version).outcome is Outcome.CLEAN
    assert check_segment(b"", start=0, version=version).outcome is Outcome.CLEAN


@VERSIONS
def test_a_long_segment_is_summed_in_blocks(version: int) -> None:
    buf = segment(version, [noise(700 * i + 1, i) for i in range(12)] + [noise(40_000)])
    scan = check_segment(buf, start=0, version=version)
    assert (scan.outcome, scan.crc64) == (Outcome.CLEAN, native.crc64(buf))


def test_columns_are_exact_and_typed() -> None:
    rows = next(iter(native.SegmentScanner(segment(3, PAYLOADS), start=0, version=3)))
    assert [column.format for column in rows] == ["Q", "I", "Q", "Q", "Q", "I"]
    assert {len(column) for column in rows} == {len(PAYLOADS)}


def test_run_keeps_nothing_and_says_the_same() -> None:
    buf = segment(3, [b"abc"] * 1000)
    scanner = native.SegmentScanner(buf, start=0, version=3, rows_max=7)
    assert scanner.run() is scanner
    assert (scanner.total, scanner.pos, scanner.outcome) == (1000, len(buf), Outcome.CLEAN)
    assert list(scanner) == []


def test_buffers_are_let_go() -> None:
    buf = segment(3, PAYLOADS)
    with mmap.mmap(-1, len(buf)) as mapped:
        mapped[:] = buf
        scanner = native.SegmentScanner(mapped, start=0, version=3, rows_max=1)
        batches = iter(scanner)
        next(batches)
        assert native.segment_resync(mapped, 1, None, 3, 0) is not None
        mapped.resize(2 * len(buf))  # refused while anything holds the buffer
        assert len(list(batches)) == len(PAYLOADS) - 1


# -- resync ------------------------------------------------------------------------------------------------------


@VERSIONS
def test_resync_finds_the_next_record(version: int) -> None:
    buf = segment(version, PAYLOADS, logical=50)
    starts = [row[0] for row in check_segment(buf, start=0, version=version).rows]
    for from_ in range(len(buf) + 2):
        expected = next((start for start in starts if start >= from_), None)
        assert native.segment_resync(buf, from_, None, version, 0) == expected
        assert reference.segment_resync(buf, from_, None, version, 0) == expected
    assert native.segment_resync(buf, 0, None, version, 56) == starts[2]
    assert native.segment_resync(buf, 0, None, version, 2**63) is None
    assert native.segment_resync(buf, 1, starts[2], version, 0) == starts[1]
    assert native.segment_resync(buf, 1, starts[2] - 1, version, 0) is None


@VERSIONS
def test_resync_past_damage(version: int) -> None:
    buf = bytearray(segment(version, [noise(200, seed) for seed in range(20)]))
    starts = [row[0] for row in check_segment(bytes(buf), start=0, version=version).rows]
    buf[starts[3] : starts[9] + 5] = noise(starts[9] + 5 - starts[3], 77)
    assert native.segment_resync(buf, starts[3], None, version, 0) == starts[10]
    assert reference.segment_resync(bytes(buf), starts[3], None, version, 0) == starts[10]


@given(st.sampled_from([2, 3]), st.data())
def test_resync_agrees_on_anything(version: int, data: st.DataObject) -> None:
    pieces = st.one_of(
        st.binary(max_size=60),
        st.integers(1, 80).map(bytes),
        st.just(segment(version, [b"abc", b"de"], logical=5)),
    )
    buf = b"".join(data.draw(st.lists(pieces, max_size=6)))
    from_, end = data.draw(st.integers(0, 300)), data.draw(st.none() | st.integers(0, 400))
    min_logical = data.draw(st.sampled_from([0, 6, 9]))
    found = native.segment_resync(buf, from_, end, version, min_logical)
    assert found == reference.segment_resync(buf, from_, end, version, min_logical)


@VERSIONS
def test_resync_through_lengths_that_lie_is_bounded(version: int) -> None:
    """Every offset claims a record that reaches almost to the end: unbounded, this sums terabytes."""
    length = 4 << 20
    claim = struct.pack("<IIQQI", 1 << 20, 0, 0, 0, 0)[: HEADER_LEN[2]]
    buf = (claim * (length // len(claim) + 1))[:length]
    assert native.segment_resync(buf, 0, None, version, 0) is None


# -- encode ------------------------------------------------------------------------------------------------------


def columns_of(**changes: array[int]) -> dict[str, array[int]]:
    columns = {
        "lengths": array("I", [2, 3]),
        "logical_offsets": array("Q", [0, 2]),
        "timestamps_ms": array("Q", [1, 1]),
        "ext_ids": array("Q", [0, 0]),
        "flags": array("I", [0, 0]),
    }
    return columns | changes


@pytest.mark.parametrize(
    ("version", "changes", "message"),
    [
        (4, {}, "segment version 4"),
        (2, {"lengths": array("I", [5, 0])}, "record 1: a version 2 payload cannot be empty"),
        (3, {"lengths": array("I", [2, 2])}, "add up to 4 but payloads holds 5"),
        (3, {"lengths": array("I", [2, 4])}, "add up to 6 but payloads holds 5"),
        (3, {"lengths": array("I", [2])}, "has 1"),
        (3, {"lengths": array("Q", [2, 3])}, "lengths: items of format 'Q', must be 'I'"),
        (3, {"flags": array("I", [0, 8])}, "record 1: flags 0x8"),
        (3, {"logical_offsets": array("Q", [0, 1])}, "record 1: logical offset 1 is before 2"),
        (3, {"logical_offsets": array("Q", [0, 2**64 - 1])}, "does not fit 64 bits"),
    ],
)
def test_encode_refuses(version: int, changes: dict[str, array[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.segment_encode(version, b"abcde", **columns_of(**changes))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="segment version 1"):
        native.SegmentScanner(b"", start=0, version=1)
    with pytest.raises(ValueError, match="segment version 1"):
        native.segment_resync(b"", 0, None, 1, 0)
    with pytest.raises(ValueError, match="rows_max 0"):
        native.SegmentScanner(b"", start=0, version=3, rows_max=0)
    with pytest.raises(OverflowError):
        native.SegmentScanner(b"", start=-1, version=3)
