"""`spark.read.format("aof2")` in a real session: found by itself, and every record as it was written."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import Row, Stream, lines, patch

pytestmark = pytest.mark.filterwarnings("ignore")  # what Spark's own imports have to say


def load(spark: Any, *paths: Path, schema: str = "", **options: object) -> Any:
    reader = spark.read.format("aof2")
    if schema:
        reader = reader.schema(schema)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load(str(paths[0]) if len(paths) == 1 else [str(p) for p in paths])


def collected(frame: Any) -> list[Row]:
    got = frame.selectExpr("offset", "unix_millis(timestamp)", "ext_id", "flags", "segment_id", "payload").collect()
    return [Row(r[0], r[1], r[2] % 2**64, r[3], r[4], bytes(r[5])) for r in got]


@pytest.fixture
def pushing(spark: Any) -> Iterator[Any]:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    yield spark
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_every_record(spark: Any, stream: Stream) -> None:
    frame = load(spark, stream.path)
    assert frame.dtypes == [
        ("offset", "bigint"), ("timestamp", "timestamp"), ("ext_id", "bigint"),
        ("flags", "int"), ("segment_id", "bigint"), ("payload", "binary"),
    ]  # fmt: skip
    assert sorted(collected(frame)) == stream.rows
    assert frame.count() == len(stream.rows)
    small = load(spark, stream.path, partitionBytes="4KiB")
    assert small.rdd.getNumPartitions() > 5
    assert sorted(collected(small)) == stream.rows


def test_several_streams_and_patterns(spark: Any, stream: Stream) -> None:
    other = Stream(stream.path.parent / "views")
    other.seal(lines(50))
    both = sorted(stream.rows + other.rows)
    assert sorted(collected(load(spark, stream.path, other.path))) == both
    assert sorted(collected(load(spark, stream.path.parent / "[cv]*s"))) == both


def test_columns_asked_for(spark: Any, stream: Stream) -> None:
    frame = load(spark, stream.path, schema="payload binary, offset bigint")
    assert sorted((r.offset, bytes(r.payload)) for r in frame.collect()) == [(r.offset, r.payload) for r in stream.rows]
    for row in (stream.rows[0], stream.rows[500], stream.rows[503]):
        stream.payload(row.offset).unlink()
        stream.payload(row.offset).touch()
    assert load(spark, stream.path, schema="offset bigint").count() == len(stream.rows)


@pytest.mark.parametrize("schema", ["nothing int", "offset int", "payload string"])
def test_columns_that_are_not_there(spark: Any, stream: Stream, schema: str) -> None:
    with pytest.raises(Exception, match=r"column (nothing|offset|payload)"):
        load(spark, stream.path, schema=schema).count()


def test_an_empty_stream_and_none(spark: Any, tmp_path: Path) -> None:
    empty = Stream(tmp_path / "empty")
    assert load(spark, empty.path).count() == 0
    with pytest.raises(Exception, match="not a stream"):
        load(spark, tmp_path).count()
    with pytest.raises(Exception, match=r"option .startingoffest.: there is"):
        load(spark, empty.path, startingOffest=5).count()


def test_options_bound_what_is_read(spark: Any, stream: Stream) -> None:
    rows = stream.rows
    bounded = load(spark, stream.path, startingOffset=rows[490].offset, endingOffset=rows[510].offset)
    assert sorted(collected(bounded)) == rows[490:510]
    timed = load(spark, stream.path, startingTimestamp=rows[20].timestamp_ms, endingTimestamp=rows[30].timestamp_ms)
    assert sorted(collected(timed)) == rows[20:30]


def test_filters(pushing: Any, stream: Stream) -> None:
    rows = stream.rows
    frame = load(pushing, stream.path, pushdown="true")
    assert sorted(collected(frame)) == rows
    where = frame.where(f"offset >= {rows[3].offset} and offset < {rows[9].offset} and flags = 0")
    assert sorted(collected(where)) == rows[3:9]
    moment = datetime.fromtimestamp(rows[600].timestamp_ms / 1000, UTC).isoformat(sep=" ")
    assert sorted(collected(frame.where(f"timestamp >= '{moment}'"))) == rows[600:]
    assert sorted(collected(frame.where(f"timestamp < '{moment}' and offset > 10"))) == rows[1:600]


def test_filters_prune(pushing: Any, stream: Stream) -> None:
    """Damage outside of what a pushed filter leaves is not met."""
    rows = stream.rows
    patch(stream.payload(0), 5)
    frame = load(pushing, stream.path, pushdown="true")
    assert sorted(collected(frame.where(f"offset >= {rows[500].offset}"))) == rows[500:]
    moment = datetime.fromtimestamp(rows[500].timestamp_ms / 1000, UTC).isoformat(sep=" ")
    assert sorted(collected(frame.where(f"timestamp >= '{moment}'"))) == rows[500:]
    with pytest.raises(Exception, match="segment 5: the record at offset 0 is damaged"):
        load(pushing, stream.path, pushdown="true").count()


def test_a_frame_that_was_filtered_is_whole_again(pushing: Any, stream: Stream) -> None:
    """Spark keeps what a source planned for pushed filters, and reads by it without them."""
    frame = load(pushing, stream.path)
    assert frame.where("offset < 100").count() == sum(r.offset < 100 for r in stream.rows)
    assert frame.count() == len(stream.rows)


def test_modes(spark: Any, stream: Stream) -> None:
    rows = stream.rows
    patch(stream.payload(0), rows[40].offset)
    with pytest.raises(Exception, match=f"segment 5: the record at offset {rows[40].offset} is damaged"):
        load(spark, stream.path).count()
    dropped = load(spark, stream.path, mode="DROPMALFORMED")
    assert sorted(collected(dropped)) == rows[:40] + rows[41:]
    kept = load(spark, stream.path, mode="PERMISSIVE", columnNameOfCorruptRecord="bad")
    (bad,) = kept.where("bad is not null").collect()
    assert (bad.offset, bad.segment_id, bad.payload, bad.timestamp) == (rows[40].offset, 5, None, None)
    assert bytes(bad.bad)[1:] == rows[40].payload[1:]
    assert kept.count() == len(rows)


def test_a_view(spark: Any, stream: Stream) -> None:
    load(spark, stream.path).createOrReplaceTempView("clicks")
    (row,) = spark.sql("select count(*), max(offset), sum(length(payload)) from clicks").collect()
    assert tuple(row) == (len(stream.rows), stream.rows[-1].offset, stream.end)
    joined = spark.sql("select get_json_object(cast(payload as string), '$.n') n from clicks where offset = 0")
    assert [r.n for r in joined.collect()] == ["0"]


def test_finding_it_imports_next_to_nothing() -> None:
    """Spark imports it in every session that uses any data source in Python, on machines that mount nothing."""
    code = (
        "import sys, pkgutil; assert 'pyspark_aof2' in {m.name for m in pkgutil.iter_modules()};"
        "import pyspark_aof2; assert pyspark_aof2.DefaultSource.name() == 'aof2';"
        "import aof2.engine.spark.read, aof2.engine.spark.batch, aof2.engine.spark.micro;"
        "print([m for m in ('trio', 'pyfuse3', 'boto3', 'lmdb', 'aof2.fs') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd="/")
    assert (done.stdout, done.stderr) == ("[]\n", "")
