"""Planning and reading without Spark: every record in exactly one partition, whatever the bounds and the sizes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine.errors import CorruptError
from aof2.engine.spark import read as read_module
from aof2.engine.spark import streams as streams_module
from aof2.engine.spark.filters import Bounds, Span
from aof2.engine.spark.options import Mode
from aof2.engine.spark.plan import partitions, ranges
from aof2.engine.spark.streams import StreamDirectory
from tests.spark.support import FIRST_MS, Row, Stream, lines

pa = pytest.importorskip("pyarrow", reason="the spark extra is not installed")

SCHEMA = pa.schema(
    [
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("ext_id", pa.int64()),
        ("flags", pa.int32()),
        ("segment_id", pa.int64()),
        ("payload", pa.binary()),
    ]
)


def request(schema: Any = SCHEMA, mode: Mode = Mode.FAILFAST, *, verify: bool = False) -> read_module.Request:
    return read_module.Request(schema, mode, "_corrupt_record", verify=verify)


def read(stream: Stream, bounds: Bounds | None = None, partition_bytes: int = 1 << 20, **kw: Any) -> list[Row]:
    segments = StreamDirectory(str(stream.path)).segments()
    found = []
    for group in partitions(ranges(segments, bounds or Bounds(), partition_bytes), partition_bytes):
        for piece in group:
            for batch in read_module.read_range(piece, request(**kw)):
                found += [as_row(row) for row in batch.to_pylist()]
    return found


def as_row(row: dict[str, Any]) -> Row:
    moment = row["timestamp"]
    time_ms = round(moment.timestamp() * 1000)
    return Row(row["offset"], time_ms, row["ext_id"] % 2**64, row["flags"], row["segment_id"], row["payload"])


@st.composite
def sizes(draw: st.DrawFn) -> list[list[int]]:
    """Records of segments by their lengths. Not all of a segment's are empty: payload files are named by offsets."""
    some = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any)
    return draw(st.lists(some, min_size=1, max_size=4))


@settings(max_examples=60)
@given(sizes(), st.integers(1, 400), st.data())
def test_every_record_within_the_bounds_once(
    segments: list[list[int]], partition_bytes: int, data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        stream = Stream(Path(folder, "s"))
        for i, lengths in enumerate(segments):
            stream.seal([bytes([i]) * n for n in lengths])
        numbers = st.integers(0, stream.end + 2)
        times = st.integers(FIRST_MS - 1, FIRST_MS + 1000 * len(stream.rows) + 1)
        offsets = Span(data.draw(numbers), data.draw(numbers))
        bounds = Bounds(offsets, Span(data.draw(times), data.draw(times)))
        assert read(stream, partition_bytes=partition_bytes) == stream.rows
        expected = [
            r
            for r in stream.rows
            if offsets.start <= r.offset and bounds.times_ms.start <= r.timestamp_ms < bounds.times_ms.end
        ]
        # An empty record lies at the end of its segment and of the span alike: a span that ends there has it.
        found = read(stream, bounds, partition_bytes)
        assert [r for r in found if r.offset < offsets.end] == [r for r in expected if r.offset < offsets.end]
        assert all(not r.payload and r.offset == offsets.end for r in found if r.offset >= offsets.end)


def test_large_segments_are_cut_and_small_ones_share(tmp_path: Path) -> None:
    stream = Stream(tmp_path / "s")
    stream.seal(lines(40_000, size=200))
    for i in range(20):
        stream.seal(lines(2, first=40_000 + 2 * i))
    segments = StreamDirectory(str(stream.path)).segments()
    pieces = list(ranges(segments, Bounds(), 1 << 20))
    large = [p for p in pieces if p.segment.segment_id == stream.rows[0].segment_id]
    assert len(large) >= 6
    assert max(p.count for p in large) < 2 * min(p.count for p in large)
    groups = partitions(pieces, 1 << 20)
    assert len(groups) < len(pieces)
    assert [p for group in groups for p in group] == pieces
    assert read(stream, partition_bytes=1 << 20) == stream.rows


def test_pruned_segments_are_not_opened(stream: Stream) -> None:
    rows = stream.rows
    segments = StreamDirectory(str(stream.path)).segments()
    stream.index(rows[0].segment_id).unlink()
    at = rows[500].offset
    only = list(ranges(segments, Bounds(Span(at, at + 1)), 1 << 20))
    assert [(p.segment.segment_id, p.first, p.count) for p in only] == [(rows[500].segment_id, 0, 1)]
    late = Bounds(times_ms=Span(rows[503].timestamp_ms))
    assert {p.segment.segment_id for p in ranges(segments, late, 1 << 20)} == {rows[-1].segment_id}


def test_columns_without_the_payload_do_not_open_it(stream: Stream) -> None:
    for row in (stream.rows[0], stream.rows[500], stream.rows[503]):
        stream.payload(row.offset).write_bytes(b"")
    schema = pa.schema([("flags", pa.int32()), ("offset", pa.int64())])
    segments = StreamDirectory(str(stream.path)).segments()
    pieces = list(ranges(segments, Bounds(), 1 << 20))
    found = [row for p in pieces for batch in read_module.read_range(p, request(schema)) for row in batch.to_pylist()]
    assert [(r["flags"], r["offset"]) for r in found] == [(r.flags, r.offset) for r in stream.rows]
    with pytest.raises(CorruptError, match="segment 5: the record at offset 0"):
        list(read_module.read_range(pieces[0], request(schema, verify=True)))


def test_batches_are_bounded_and_large_records_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "BATCH_BYTES", 1000)
    monkeypatch.setattr(read_module, "BATCH_ROWS", 7)
    stream = Stream(tmp_path / "s")
    stream.seal([b"x" * 400, b"y" * 5000, *lines(40, size=5), b"z" * 1001, b""])
    segments = StreamDirectory(str(stream.path)).segments()
    (piece,) = ranges(segments, Bounds(), 1 << 20)
    batches = list(read_module.read_range(piece, request()))
    assert [b.num_rows for b in batches][:3] == [1, 1, 7]
    assert all(b.num_rows <= 7 for b in batches)
    assert [as_row(row) for batch in batches for row in batch.to_pylist()] == stream.rows


def test_a_listing_between_two_names_of_a_segment(stream: Stream) -> None:
    """A payload file whose index is not listed yet, and an index whose payload file a truncation took."""
    (stream.path / f"{stream.end:020}.jsonl").write_bytes(b"later\n")
    assert read(stream) == stream.rows
    stream.payload(0).unlink()
    assert read(stream) == stream.rows[500:]


def test_what_is_no_stream(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ValueError, match="not a stream"):
            StreamDirectory(str(path)).segments()
    empty = Stream(tmp_path / "empty")
    assert read(empty) == []


def test_segments_that_overlap_are_an_error(stream: Stream) -> None:
    other = Stream(stream.path.parent / "other")
    other.seal([b"y" * 50])
    other.index(5).rename(stream.index(9))
    other.payload(0).rename(stream.path / f"{0:020}.txt")
    with pytest.raises(CorruptError, match="overlap"):
        StreamDirectory(str(stream.path)).segments()


def test_what_was_listed_is_read_once(stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = StreamDirectory(str(stream.path))
    first = directory.segments()
    stream.seal(lines(1))
    opened: list[str] = []
    read_bytes = streams_module._read
    monkeypatch.setattr(streams_module, "_read", lambda path, length: opened.append(path) or read_bytes(path, length))
    assert directory.segments()[:3] == first
    assert opened == [str(stream.index(stream.rows[-1].segment_id))]
