"""`spark.readStream.format("aof2")`: each record in one micro-batch exactly, across restarts, limits, truncations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import Row, Stream, lines

pytestmark = pytest.mark.filterwarnings("ignore")  # what Spark's own imports have to say


class Query:
    """A query that writes what it reads to Parquet, run again and again over one checkpoint."""

    def __init__(self, spark: Any, work: Path, *paths: Path, **options: object) -> None:
        self._spark, self._work, self._paths, self._options = spark, work, paths, options

    def run(self, **options: object) -> list[dict[str, Any]]:
        """Everything there is now; the progress of each micro-batch."""
        reader = self._spark.readStream.format("aof2")
        for name, value in (self._options | options).items():
            reader = reader.option(name, value)
        if len(self._paths) > 1:
            raise AssertionError("streams are loaded one path at a time")
        query = (
            reader.load(str(self._paths[0]))
            .writeStream.format("parquet")
            .option("checkpointLocation", str(self._work / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(self._work / "out"))
        )
        query.awaitTermination()
        return [dict(p) for p in query.recentProgress if p["numInputRows"]]

    def rows(self) -> list[Row]:
        frame = self._spark.read.parquet(str(self._work / "out"))
        columns = ("offset", "unix_millis(timestamp)", "ext_id", "flags", "segment_id", "payload")
        got = frame.selectExpr(*columns).collect()
        return sorted(Row(r[0], r[1], r[2] % 2**64, r[3], r[4], bytes(r[5])) for r in got)


def test_each_record_once_across_restarts(spark: Any, stream: Stream, tmp_path: Path) -> None:
    query = Query(spark, tmp_path, stream.path)
    query.run()
    assert query.rows() == stream.rows
    assert query.run() == []
    for i in range(3):
        stream.seal(lines(40 + i, first=1000 * i))
        query.run()
        assert query.rows() == stream.rows


def test_rate_limits(spark: Any, stream: Stream, tmp_path: Path) -> None:
    by_rows = Query(spark, tmp_path / "rows", stream.path, maxRecordsPerTrigger=100)
    counts = [p["numInputRows"] for p in by_rows.run()]
    assert sum(counts) == len(stream.rows)
    assert counts[:7] == [100] * 7
    assert by_rows.rows() == stream.rows
    by_bytes = Query(spark, tmp_path / "bytes", stream.path, maxBytesPerTrigger="8KiB")
    assert len(by_bytes.run()) >= stream.end // 8192
    assert by_bytes.rows() == stream.rows


def test_a_record_larger_than_the_limit(spark: Any, tmp_path: Path) -> None:
    stream = Stream(tmp_path / "s")
    stream.seal([b"small\n", b"x" * 5000, b"small again\n", b"", b"", b"y" * 3000])
    stream.seal([b"z" * 2000, b"end\n"])
    query = Query(spark, tmp_path, stream.path, maxBytesPerTrigger="1000B")
    assert len(query.run()) >= 5
    assert query.rows() == stream.rows


def test_where_to_begin(spark: Any, stream: Stream, tmp_path: Path) -> None:
    latest = Query(spark, tmp_path / "latest", stream.path, startingOffsets="latest")
    assert latest.run() == []
    middle = Query(spark, tmp_path / "middle", stream.path, startingOffsets=stream.rows[350].offset)
    middle.run()
    assert middle.rows() == stream.rows[350:]
    before = len(stream.rows)
    stream.seal(lines(5))
    latest.run()
    assert latest.rows() == stream.rows[before:]


def test_an_empty_stream_that_fills(spark: Any, tmp_path: Path) -> None:
    stream = Stream(tmp_path / "s")
    query = Query(spark, tmp_path, stream.path)
    assert query.run() == []
    stream.seal(lines(3))
    query.run()
    assert query.rows() == stream.rows


def test_what_was_truncated_before_it_was_read(spark: Any, stream: Stream, tmp_path: Path) -> None:
    query = Query(spark, tmp_path, stream.path, maxRecordsPerTrigger=1000)
    query.run()
    read = list(stream.rows)
    gone = stream.seal(lines(10))
    kept = stream.seal(lines(10, first=10))
    stream.index(gone[0].segment_id).unlink()
    stream.payload(gone[0].offset).unlink()
    with pytest.raises(Exception, match=f"records from offset {gone[0].offset} up to {kept[0].offset} are gone"):
        query.run()
    query.run(failOnDataLoss="false")
    assert query.rows() == read + kept
