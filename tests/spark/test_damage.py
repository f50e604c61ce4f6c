"""Damaged records: FAILFAST names them, the other modes give every other record, and none is ever served wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.segment.index import INDEX_FIXED_BYTES
from aof2.engine.spark import read as read_module
from aof2.engine.spark.filters import Bounds, Span
from aof2.engine.spark.options import Mode
from aof2.engine.spark.plan import ranges
from aof2.engine.spark.streams import StreamDirectory
from tests.spark.support import Stream, lines, patch

pa = pytest.importorskip("pyarrow", reason="the spark extra is not installed")

CORRUPT = "_corrupt_record"
SCHEMA = pa.schema([("offset", pa.int64()), ("payload", pa.binary()), ("segment_id", pa.int64())])
PERMISSIVE = SCHEMA.append(pa.field(CORRUPT, pa.binary()))


def rows(stream: Stream, mode: Mode, partition_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    schema = PERMISSIVE if mode is Mode.PERMISSIVE else SCHEMA
    request = read_module.Request(schema, mode, CORRUPT, verify=False)
    segments = StreamDirectory(str(stream.path)).segments()
    pieces = ranges(segments, Bounds(), partition_bytes)
    return [row for p in pieces for batch in read_module.read_range(p, request) for row in batch.to_pylist()]


def check(stream: Stream, damaged: set[int], partition_bytes: int = 1 << 20) -> None:
    """All modes, where the records numbered `damaged` are."""
    whole = [r for i, r in enumerate(stream.rows) if i not in damaged]
    with pytest.raises(CorruptError, match=f"segment {stream.rows[min(damaged)].segment_id}|record"):
        rows(stream, Mode.FAILFAST, partition_bytes)
    dropped = rows(stream, Mode.DROPMALFORMED, partition_bytes)
    assert [(r["offset"], r["payload"]) for r in dropped] == [(r.offset, r.payload) for r in whole]
    kept = rows(stream, Mode.PERMISSIVE, partition_bytes)
    assert [r["payload"] for r in kept if r[CORRUPT] is None] == [r.payload for r in whole]
    bad = [r for r in kept if r[CORRUPT] is not None]
    assert len(bad) == len(damaged)
    assert all(r["payload"] is None and r["segment_id"] for r in bad)


def test_a_payload(stream: Stream) -> None:
    row = stream.rows[40]
    patch(stream.payload(0), row.offset + 3)
    with pytest.raises(CorruptError, match=f"segment 5: the record at offset {row.offset} is damaged"):
        rows(stream, Mode.FAILFAST)
    check(stream, {40})
    (bad,) = [r for r in rows(stream, Mode.PERMISSIVE) if r[CORRUPT] is not None]
    assert (bad["offset"], len(bad[CORRUPT])) == (row.offset, len(row.payload))
    assert bad[CORRUPT] != row.payload
    assert bad[CORRUPT][:3] == row.payload[:3]


@pytest.mark.parametrize("field", [0, 4, 8, 9, 16, 24, 28], ids=lambda at: f"byte{at}")
def test_a_header(stream: Stream, field: int) -> None:
    """Length, checksum, offset, time, flags, ext_id: what it claims misleads none of its neighbours."""
    for record in (0, 17, 499):
        for mask in (1, 0x80):
            at = 192 + 36 * record + field
            index = stream.index(5)
            patch(index, at, mask)
            check(stream, {record})
            patch(index, at, mask)
    assert len(rows(stream, Mode.FAILFAST)) == len(stream.rows)


def test_many_at_once_and_in_any_partition(tmp_path: Path) -> None:
    stream = Stream(tmp_path / "s")
    stream.seal(lines(900))
    damaged = {3, 4, 5, 300, 301, 898, 899}
    for record in damaged:
        patch(stream.payload(0), stream.rows[record].offset)
    for partition_bytes in (1 << 20, 9000, 500):
        check(stream, damaged, partition_bytes)


def test_a_payload_file_that_was_cut(stream: Stream) -> None:
    row = stream.rows[480]
    with stream.payload(0).open("r+b") as f:
        f.truncate(row.offset + 1)
    check(stream, set(range(480, 500)))


@pytest.mark.parametrize("field", [8, 16])
def test_a_search_led_astray_is_an_error(tmp_path: Path, field: int) -> None:
    """Any one header that lies about its offset or its time: what is found is right, or nothing is."""
    stream = Stream(tmp_path / "s")
    stream.seal(lines(40))
    segments = StreamDirectory(str(stream.path)).segments()
    middle = stream.rows[20]
    bounds = Bounds(Span(middle.offset)) if field == 8 else Bounds(times_ms=Span(middle.timestamp_ms))
    for record in range(40):
        for byte in (0, 1, 6):
            at = 192 + 36 * record + field + byte
            patch(stream.index(5), at, 0xFF)
            try:
                found = [(p.first, p.count) for p in ranges(segments, bounds, 1 << 20)]
            except CorruptError:
                assert record != 35  # no search comes there
            else:
                assert found == [(20, 20)]
            patch(stream.index(5), at, 0xFF)


@settings(max_examples=150)
@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans(), st.sampled_from([100, 1 << 20]))
def test_any_byte(where: int, mask: int, in_index: bool, partition_bytes: int) -> None:
    """What is given out was written, whatever was damaged; and FAILFAST does not pass over anything."""
    stream = damage_stream()
    path = stream.index(5) if in_index else stream.payload(0)
    at = where % path.stat().st_size
    patch(path, at, mask)
    try:
        written = {(r.offset, r.payload) for r in stream.rows}
        with pytest.raises((CorruptError, UnsupportedError)):
            rows(stream, Mode.FAILFAST, partition_bytes)
        for mode in (Mode.DROPMALFORMED, Mode.PERMISSIVE):
            if in_index and at < INDEX_FIXED_BYTES:  # header or footer: there is no plan
                with pytest.raises((CorruptError, UnsupportedError)):
                    rows(stream, mode, partition_bytes)
                continue
            found = rows(stream, mode, partition_bytes)
            given_out = [(r["offset"], r["payload"]) for r in found if r["payload"] is not None]
            assert set(given_out) <= written
            assert len(set(given_out)) == len(given_out) == len(stream.rows) - 1
    finally:
        patch(path, at, mask)


_MADE: list[Stream] = []


def damage_stream() -> Stream:
    return _MADE[0]


@pytest.fixture(autouse=True, scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> None:
    stream = Stream(tmp_path_factory.mktemp("damage") / "s")
    stream.seal(lines(25))
    _MADE[:] = [stream]
