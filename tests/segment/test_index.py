"""A segment in two files: split, composed again byte for byte, and held to a model that does it slowly."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
import zlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment import format as fmt
from aof2.engine.segment.index import INDEX_FIXED_BYTES, IndexHead, RecordRange, SegmentIndex, Split, split
from aof2.native import SegmentRows, crc64
from aof2.native.segment_index import (
    Encoded,
    index_check,
    index_compose,
    index_encode,
    index_rebase,
    index_starts,
    segment_spread,
)
from tests.segment.support import Rec, append, create, samples, sealed

RECORD = struct.Struct("<IIQQIQ")
HEADER = FOOTER = 96


class Model(NamedTuple):
    """A raw v3 segment taken apart with nothing but the page of formats."""

    payload: bytes
    index: bytes
    records: list[Rec]
    starts: list[int]


def model_of(raw: bytes) -> Model:
    payload, headers, records, starts, at = b"", b"", [], [], HEADER
    while at < len(raw) - FOOTER:
        length, _, logical_offset, timestamp_ms, flags, ext_id = RECORD.unpack_from(raw, at)
        starts.append(len(payload))
        headers += raw[at : at + RECORD.size]
        data = raw[at + RECORD.size : at + RECORD.size + length]
        payload += data
        records.append(Rec(data, logical_offset, timestamp_ms, ext_id, flags))
        at += RECORD.size + length
    return Model(payload, raw[:HEADER] + raw[-FOOTER:] + headers, records, starts)


def reader(payload: bytes, start: int = 0) -> Callable[[int, int], bytes]:
    return lambda at, length: payload[at - start : at - start + length]


def split_bytes(raw: bytes) -> tuple[Split, bytes, bytes]:
    with (
        tempfile.TemporaryFile() as source,
        tempfile.TemporaryFile() as payload,
        tempfile.TemporaryFile() as index,
    ):
        source.write(raw)
        source.flush()
        done = split(source.fileno(), payload.fileno(), index.fileno(), path="7.seg")
        return done, payload.read(), index.read()


@st.composite
def segments(draw: st.DrawFn) -> bytes:
    """A sealed segment of a few records: gaps, empty payloads, clocks that go backwards."""
    payloads = draw(st.lists(st.binary(max_size=90), min_size=1, max_size=9))
    logical = base = draw(st.sampled_from([0, 1000, 2**63]))
    with tempfile.TemporaryDirectory() as folder:
        writer = create(Path(folder), base_offset=base, ext_id=3)
        for payload in payloads:
            logical += draw(st.sampled_from([0, 0, 0, 7]))
            times = st.integers(0, 2**63 - 1)
            append(writer, Rec(payload, logical, draw(times), draw(st.integers(0, 2**64 - 1)), draw(st.integers(0, 3))))
            logical += len(payload)
        return writer.seal(41).path.read_bytes()


def whole(tmp_path: Path) -> tuple[bytes, Model]:
    segment, _ = sealed(tmp_path)
    raw = segment.path.read_bytes()
    return raw, model_of(raw)


# -- split and compose


@given(segments())
def test_split_does_what_the_model_does(raw: bytes) -> None:
    model = model_of(raw)
    done, payload, index = split_bytes(raw)
    assert (payload, index) == (model.payload, model.index)
    assert done == (len(payload), len(index), len(model.records))


@given(segments(), st.data())
def test_any_range_composes_to_the_raw_segment(raw: bytes, data: st.DataObject) -> None:
    model = model_of(raw)
    index = SegmentIndex.decode(model.index)
    assert (index.raw_bytes, index.payload_bytes) == (len(raw), len(model.payload))
    for _ in range(20):
        offset = data.draw(st.integers(0, len(raw) + 40))
        size = data.draw(st.integers(0, len(raw) + 40))
        start, length = index.payload_range(offset, size)
        assert 0 <= start <= start + length <= len(model.payload)
        needed = model.payload[start : start + length]  # not a byte more is there
        assert index.raw(offset, size, reader(needed, start)) == raw[offset : offset + size]


def test_every_range_of_a_small_one(tmp_path: Path) -> None:
    raw, model = whole(tmp_path)
    index = SegmentIndex.decode(model.index)
    for offset in range(len(raw) + 1):
        for size in (0, 1, 5, 36, 37, len(raw) - offset):
            start, length = index.payload_range(offset, size)
            asked: list[tuple[int, int]] = []

            def read(at: int, length: int, asked: list[tuple[int, int]] = asked) -> bytes:
                asked.append((at, length))
                return model.payload[at : at + length]

            assert index.raw(offset, size, read) == raw[offset : offset + size]
            assert asked == ([(start, length)] if length else [])


def test_payloads_longer_than_the_scratch_buffer(tmp_path: Path) -> None:
    payloads = [b"short\n", os.urandom(3 << 20), b"", os.urandom((1 << 20) - 6), os.urandom(7), os.urandom(2 << 20)]
    writer = create(tmp_path, capacity=16 << 20, reserve_step_bytes=1 << 20)
    for payload in payloads:
        writer.append(payload)
    raw = writer.seal(1).path.read_bytes()
    done, payload, data = split_bytes(raw)
    assert payload == b"".join(payloads)
    index = SegmentIndex.decode(data)
    assert index.raw(0, len(raw), reader(payload)) == raw
    assert index.check(payload, 0, 0, done.record_count) == 6


def test_more_records_than_a_batch_of_the_scan(tmp_path: Path) -> None:
    lines = [b"%d\n" % i for i in range(10_000)]
    writer = create(tmp_path, capacity=1 << 20, reserve_step_bytes=1 << 20)
    writer.append_many(lines)
    raw = writer.seal(1).path.read_bytes()
    done, payload, data = split_bytes(raw)
    assert (payload, done.record_count) == (b"".join(lines), 10_000)
    index = SegmentIndex.decode(data)
    assert index.raw(0, len(raw), reader(payload)) == raw
    assert index.check(payload, 0, 0, 10_000) == 10_000


# -- what an index tells


@given(segments(), st.data())
def test_records_as_the_model_has_them(raw: bytes, data: st.DataObject) -> None:
    model = model_of(raw)
    index, count = SegmentIndex.decode(model.index), len(model.records)
    first = data.draw(st.integers(0, count))
    many = data.draw(st.integers(0, count - first))
    columns, want = index.columns(first, many), model.records[first : first + many]
    assert list(columns.logical_offset) == [r.logical_offset for r in want]
    assert list(columns.timestamp_ms) == [r.timestamp_ms for r in want]
    assert list(columns.ext_id) == [r.ext_id for r in want]
    assert list(columns.flags) == [r.flags for r in want]
    assert list(columns.length) == [len(r.payload) for r in want]
    assert list(columns.start) == model.starts[first : first + many]
    assert index.check(model.payload, 0, first, many) == many
    for offset in {0, 2**64 - 1, *(r.logical_offset + d for r in model.records for d in (-1, 0, 1))} - {-1}:
        found = [i for i, r in enumerate(model.records) if r.logical_offset >= offset]
        assert index.find(offset) == (found[0] if found else count)
    for time in {-5, 0, 2**64, *(r.timestamp_ms + d for r in model.records for d in (-1, 0, 1))}:
        found = [i for i, r in enumerate(model.records) if r.timestamp_ms >= time]
        assert index.find_time(time) == (found[0] if found else count)


@given(segments(), st.data())
def test_a_part_of_the_headers_is_enough(raw: bytes, data: st.DataObject) -> None:
    """A reader of some records reads their headers and their payloads, and nothing else."""
    model = model_of(raw)
    count = len(model.records)
    first = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(first, count))
    start = model.starts[first]
    stop = model.starts[end] if end < count else len(model.payload)
    headers = model.index[INDEX_FIXED_BYTES + 36 * first : INDEX_FIXED_BYTES + 36 * end]
    part = RecordRange.decode(headers, next_logical=model.records[first].logical_offset, start=start)
    assert list(part.starts) == [*model.starts[first:end], stop]
    assert part.check(model.payload[start:stop], start) == end - first


def test_head_alone(tmp_path: Path) -> None:
    raw, model = whole(tmp_path)
    head = IndexHead.decode(model.index[:INDEX_FIXED_BYTES])
    assert (head.record_count, head.payload_bytes, head.index_bytes) == (5, len(model.payload), len(model.index))
    assert head.raw_bytes == len(raw)
    assert (head.header.segment_id, head.footer.coordinator_watermark) == (7, 41)


# -- damage


def finds(index: bytes, payload: bytes) -> bool:
    """Whether decoding the index and checking its records beside the payload tells that something is wrong."""
    try:
        found = SegmentIndex.decode(index, path="7.idx")
    except (CorruptError, UnsupportedError):
        return True
    return found.check(payload, 0, 0, found.record_count) != found.record_count


def test_any_flipped_byte_is_found(tmp_path: Path) -> None:
    _, model = whole(tmp_path)
    assert not finds(model.index, model.payload)
    for at in range(len(model.index)):
        for bit in range(8):
            bad = bytearray(model.index)
            bad[at] ^= 1 << bit
            assert finds(bytes(bad), model.payload), (at, bit)
    for at in range(len(model.payload)):
        for bit in range(8):
            bad = bytearray(model.payload)
            bad[at] ^= 1 << bit
            assert finds(model.index, bytes(bad)), (at, bit)


@given(segments(), st.data())
def test_any_changed_bytes_are_found(raw: bytes, data: st.DataObject) -> None:
    """Up to four bytes in a row, which no crc32 lets pass."""
    model = model_of(raw)
    both = model.index + model.payload
    at = data.draw(st.integers(0, len(both) - 1))
    room = len(model.index) - at if at < len(model.index) else len(both) - at
    noise = data.draw(st.binary(min_size=1, max_size=min(4, room)).filter(any))
    bad = bytearray(both)
    for i, octet in enumerate(noise):
        bad[at + i] ^= octet
    assert finds(bytes(bad[: len(model.index)]), bytes(bad[len(model.index) :]))


def test_any_other_length_is_found(tmp_path: Path) -> None:
    _, model = whole(tmp_path)
    for length in range(len(model.index)):
        with pytest.raises(CorruptError, match=r"7\.idx"):
            SegmentIndex.decode(model.index[:length], path="7.idx")
    for more in (b"\0", model.index[-36:]):
        with pytest.raises(CorruptError):
            SegmentIndex.decode(model.index + more)
    index = SegmentIndex.decode(model.index, path="7.idx")
    for length in range(len(model.payload)):
        whole_before = sum(
            start + len(r.payload) <= length for start, r in zip(model.starts, model.records, strict=True)
        )
        assert index.check(model.payload[:length], 0, 0, 5) == whole_before
        with pytest.raises(CorruptError, match=r"7\.idx"):
            index.raw(0, index.raw_bytes, reader(model.payload[:length]))


def test_the_footer_of_another_segment(tmp_path: Path) -> None:
    _, model = whole(tmp_path)
    footer = fmt.decode_footer(3, model.index[96:192])
    for other in (replace(footer, segment_id=8), replace(footer, ext_id=1), replace(footer, record_count=2**60)):
        with pytest.raises(CorruptError):
            SegmentIndex.decode(model.index[:96] + fmt.encode_footer(other) + model.index[192:])
    longer = replace(footer, durable_bytes=footer.durable_bytes + 1)
    with pytest.raises(CorruptError, match="payloads of"):
        SegmentIndex.decode(model.index[:96] + fmt.encode_footer(longer) + model.index[192:])
    later = replace(footer, last_record_ts_ms=footer.last_record_ts_ms + 1)
    with pytest.raises(CorruptError, match="timestamp"):
        SegmentIndex.decode(model.index[:96] + fmt.encode_footer(later) + model.index[192:])


def test_split_finds_every_flipped_byte_of_the_raw_segment(tmp_path: Path) -> None:
    raw, _ = whole(tmp_path)
    for at in range(len(raw)):
        bad = bytearray(raw)
        bad[at] ^= 1 << at % 8
        with pytest.raises((CorruptError, UnsupportedError)):
            split_bytes(bytes(bad))
    for length in range(len(raw)):
        with pytest.raises((CorruptError, UnsupportedError)):
            split_bytes(raw[:length])
    with pytest.raises(CorruptError, match=r"7\.seg"):
        split_bytes(raw + bytes(1))


def test_a_failed_split_leaves_no_index(tmp_path: Path) -> None:
    raw, _ = whole(tmp_path)
    source, index = tmp_path / "bad.seg", tmp_path / "bad.idx"
    source.write_bytes(raw[:-98] + bytes([raw[-98] ^ 1]) + raw[-97:])
    with source.open("rb") as s, index.open("w+b") as i, tempfile.TemporaryFile() as p, pytest.raises(CorruptError):
        split(s.fileno(), p.fileno(), i.fileno())
    assert not any(index.read_bytes()[:INDEX_FIXED_BYTES])
    with pytest.raises(CorruptError):
        IndexHead.decode(index.read_bytes())


def test_version_2_has_no_index(tmp_path: Path) -> None:
    segment, _ = sealed(tmp_path, version=2)
    with pytest.raises((UnsupportedError, CorruptError)):
        split_bytes(segment.path.read_bytes())


def test_a_full_disk_is_its_errno(tmp_path: Path) -> None:
    raw, _ = whole(tmp_path)
    source = tmp_path / "source"
    source.write_bytes(raw)
    with (
        source.open("rb") as s,
        open("/dev/full", "wb") as full,
        tempfile.TemporaryFile() as p,
        pytest.raises(OSError) as raised,
    ):
        split(s.fileno(), p.fileno(), full.fileno())
    assert raised.value.errno == errno.ENOSPC


# -- the native functions by themselves


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60), st.integers(0, 5)), max_size=8), st.integers(0, 100))
def test_starts_stop_at_the_first_that_cannot_be(rows: list[tuple[int, int, int]], floor: int) -> None:
    headers = b"".join(RECORD.pack(length, 1, logical, 9, flags, 0) for logical, length, flags in rows)
    good, logical_next, starts = 0, floor, [50]
    for logical, length, flags in rows:
        if logical < logical_next or flags > 3:
            break
        good, logical_next = good + 1, logical + length
        starts.append(starts[-1] + length)
    found = index_starts(headers, next_logical=floor, start=50)
    assert (found.good, found.next_logical) == (good, logical_next)
    assert list(found.starts)[: good + 1] == starts


def test_headers_that_no_segment_holds() -> None:
    assert index_starts(bytes(36), next_logical=0).good == 0
    assert index_starts(RECORD.pack(1, 1, 2**64 - 2, 0, 0, 0), next_logical=0).good == 1
    assert index_starts(RECORD.pack(2, 1, 2**64 - 2, 0, 0, 0), next_logical=0).good == 0
    assert index_starts(RECORD.pack(3, 1, 0, 0, 0, 0), next_logical=0, start=2**64 - 2).good == 0
    with pytest.raises(ValueError, match="36"):
        index_starts(bytes(37), next_logical=0)


def test_payload_that_is_not_there_is_not_read() -> None:
    payload = b"hello"
    header = RECORD.pack(5, 0, 0, 1, 0, 2)
    header = header[:4] + struct.pack("<I", zlib.crc32(header + payload)) + header[8:]
    starts = index_starts(header, next_logical=0, start=10).starts
    assert index_check(header, starts, payload, 10) == 1
    assert index_check(header, starts, b"__" + payload, 8) == 1
    for data, at in ((payload[:4], 10), (payload, 9), (payload, 11), (b"", 10), (payload, 2**64 - 1)):
        assert index_check(header, starts, data, at) == 0
    starts = index_starts(header, next_logical=0).starts
    for data, at, size in ((payload, 0, 42), (payload, 1, 41), (payload[:4], 0, 41), (payload[1:], 1, 41)):
        with pytest.raises(ValueError, match="not all there"):
            index_compose(header, starts, data, 0 if data[:1] == b"h" else 1, at, bytearray(size))


def test_rows_outside_of_the_buffer_are_refused() -> None:
    def rows(offset: int, length: int) -> SegmentRows:
        one, four = memoryview(struct.pack("=Q", offset)).cast("Q"), memoryview(struct.pack("=I", length)).cast("I")
        return SegmentRows(one, four, one, one, one, four)

    with tempfile.TemporaryFile() as file:
        fd = file.fileno()
        for offset, length in ((0, 5), (5, 0), (2**64 - 1, 0), (0, 2**32 - 1)):
            assert segment_spread(bytes(40), rows(offset, length), fd, 0, fd, 0, bytearray(64)) == errno.EINVAL
        assert segment_spread(bytes(40), rows(0, 4), fd, 100, fd, 0, bytearray(0)) == 0
        assert os.fstat(fd).st_size == 104


@settings(max_examples=20)
@given(st.sampled_from([0, 1, 2, 35, 70, 72, 200]))
def test_any_scratch_buffer_will_do(scratch_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = create(Path(folder), base_offset=1000)
        for rec in samples(3):
            append(writer, rec)
        raw = writer.seal(1).path.read_bytes()
    model = model_of(raw)
    ats = [96 + 36 * i + start for i, start in enumerate(model.starts)]
    offset = memoryview(struct.pack(f"={len(ats)}Q", *ats)).cast("Q")
    length = memoryview(struct.pack(f"={len(ats)}I", *(len(r.payload) for r in model.records))).cast("I")
    rows = SegmentRows(offset, length, offset, offset, offset, length)
    with tempfile.TemporaryFile() as payload, tempfile.TemporaryFile() as index:
        assert segment_spread(raw, rows, payload.fileno(), 0, index.fileno(), 192, bytearray(scratch_bytes)) == 0
        assert payload.read() == model.payload
        assert index.read()[192:] == model.index[192:]


# -- made, and put behind others


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=8), st.integers(0, 2**40), st.integers(0, 2**60))
def test_headers_made_are_those_of_a_writer(payloads: list[bytes], logical: int, time_ms: int) -> None:
    made = encoded(payloads, logical, time_ms, crc=7)
    raw = b"".join(made.headers[36 * i : 36 * i + 36] + payload for i, payload in enumerate(payloads))
    at, expected = logical, b""
    for i, payload in enumerate(payloads):
        expected += fmt.encode_record(3, payload, at, time_ms, ext_id=i, flags=i % 4)
        at += len(payload)
    assert (raw, made.crc64) == (expected, crc64(expected, 7))


def encoded(payloads: list[bytes], logical: int, time_ms: int, crc: int = 0) -> Encoded:
    count = len(payloads)
    return index_encode(
        b"".join(payloads),
        memoryview(array("I", map(len, payloads))),
        memoryview(array("Q", range(count))),
        memoryview(array("I", [i % 4 for i in range(count)])),
        timestamp_ms=time_ms,
        logical_first=logical,
        crc64=crc,
    )


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=8), st.integers(0, 2**40), st.integers(0, 20))
def test_records_behind_others(payloads: list[bytes], logical: int, last_ms: int) -> None:
    payload, made = b"".join(payloads), encoded(payloads, 0, 10)
    starts = index_starts(made.headers, next_logical=0, start=3).starts
    headers = bytearray(made.headers)
    done = index_rebase(headers, starts, b"___" + payload, 0, logical_first=logical, last_ts_ms=last_ms, crc64=9)
    expected = encoded(payloads, logical, max(10, last_ms), crc=9)
    assert (headers, done) == (expected.headers, (len(payloads), max(10, last_ms), expected.crc64))


def test_a_damaged_record_is_not_put_behind_others() -> None:
    payloads = [b"one", b"two", b"three"]
    made = encoded(payloads, 0, 10)
    starts = index_starts(made.headers, next_logical=0).starts
    headers = bytearray(made.headers)
    done = index_rebase(headers, starts, b"onetwothrez", 0, logical_first=50, last_ts_ms=0, crc64=0)
    assert done.good == 2
    assert headers[72:] == made.headers[72:]


def test_columns_that_do_not_fit_are_refused() -> None:
    one, ids, bits = memoryview(array("I", [5])), memoryview(array("Q", [0])), memoryview(array("I", [0]))
    fields = {"timestamp_ms": 0, "logical_first": 0, "crc64": 0}
    for payload, lengths, flags in ((b"four", one, bits), (b"sixsix", one, bits), (b"fiver", one, one)):
        with pytest.raises(ValueError, match="add up"):
            index_encode(payload, lengths, ids, flags, **fields)
    with pytest.raises(ValueError, match="formats"):
        index_encode(b"fiver", ids, ids, bits, **fields)
    with pytest.raises(ValueError, match="add up"):
        index_encode(b"fiver", one, ids, bits, timestamp_ms=0, logical_first=2**64 - 2, crc64=0)
