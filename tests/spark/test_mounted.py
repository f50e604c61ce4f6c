"""Streams of a real mount, read and written by Spark: as they are, evicted, remounted, while they grow, and killed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.support import lines
from tests.support.mount import MountedVolume, mounted_volume, skip_where_impossible

pytestmark = pytest.mark.filterwarnings("ignore")  # what Spark's own imports have to say

TENANTS = {
    "events": {"kind": "append", "segment_bytes": "64KiB", "seal_after": "1h"},
    "default": {"kind": "files"},
}


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[MountedVolume]:
    skip_where_impossible()
    with mounted_volume(tmp_path, tenants=TENANTS) as made:
        yield made
        assert made.complaints() == []


def stream_of(volume: MountedVolume, name: str = "clicks") -> Path:
    path = volume.path / name
    path.mkdir(exist_ok=True)
    return path


def append(stream: Path, records: list[bytes]) -> None:
    with (stream / "_append").open("ab", buffering=0) as f:
        for i in range(0, len(records), 50):
            f.write(b"".join(records[i : i + 50]))


def payloads(spark: Any, stream: Path, **options: object) -> list[bytes]:
    frame = spark.read.format("aof2").options(**options).load(str(stream))
    return [bytes(row.payload) for row in sorted(frame.collect(), key=lambda row: row.offset)]


def test_hot_evicted_and_remounted(spark: Any, volume: MountedVolume) -> None:
    stream, written = stream_of(volume), lines(5000)
    append(stream, written)
    volume.done("seal", stream)
    assert payloads(spark, stream) == written
    as_json = spark.read.json(str(stream))
    assert as_json.count() == len(written)
    assert as_json.selectExpr("sum(n)").collect()[0][0] == sum(range(5000))
    volume.done("wait", stream)
    volume.evict(stream)
    assert payloads(spark, stream) == written
    volume.evict(stream)
    assert spark.read.text(str(stream)).count() == len(written)
    volume.umount()
    volume.remount()
    assert payloads(spark, stream, partitionBytes="20KiB") == written


def test_what_is_not_sealed_is_not_read(spark: Any, volume: MountedVolume) -> None:
    stream = stream_of(volume)
    append(stream, lines(10))
    assert payloads(spark, stream) == []
    volume.done("seal", stream)
    append(stream, lines(10, first=10))
    assert payloads(spark, stream) == lines(10)


def test_written_by_a_job(spark: Any, volume: MountedVolume) -> None:
    stream = stream_of(volume)
    append(stream, [b"first\n"])
    frame = spark.range(3000, numPartitions=3).selectExpr("to_json(struct(id)) as value", "id as ext_id")
    frame.write.format("aof2").mode("append").options(conf=volume.conf, staging=volume.root / "staging").save(
        str(stream)
    )
    rows = sorted(spark.read.format("aof2").load(str(stream)).collect(), key=lambda row: row.offset)
    assert [bytes(r.payload) for r in rows] == [b"first\n", *(b'{"id":%d}\n' % n for n in range(3000))]
    assert [r.ext_id for r in rows] == [0, *range(3000)]
    assert list((volume.root / "staging").rglob("*")) == []
    append(stream, [b"last\n"])
    volume.done("seal", stream)
    assert payloads(spark, stream)[-1] == b"last\n"
    volume.done("wait", stream)
    volume.evict(stream)
    assert len(payloads(spark, stream)) == 3002


def test_overwritten_by_a_job_that_reads_it(spark: Any, volume: MountedVolume) -> None:
    stream = stream_of(volume)
    append(stream, lines(2000))
    volume.done("seal", stream)
    some = spark.read.format("aof2").load(str(stream)).where("offset % 2 = 0")
    kept = sorted(bytes(row.payload) for row in some.collect())
    options = {"conf": volume.conf, "staging": volume.root / "staging"}
    some.write.format("aof2").mode("overwrite").options(**options).save(str(stream))
    assert sorted(payloads(spark, stream)) == kept
    some.limit(0).write.format("aof2").mode("overwrite").options(**options).save(str(stream))
    assert payloads(spark, stream) == []


def test_a_job_that_fails_leaves_nothing(spark: Any, volume: MountedVolume) -> None:
    stream = stream_of(volume)
    append(stream, lines(5))
    options = {"conf": volume.conf, "staging": volume.root / "staging"}
    bad = spark.range(2000, numPartitions=4).selectExpr(
        "if(id < 1999, cast(id as string), raise_error('broken')) as value"
    )
    with pytest.raises(Exception, match="broken"):
        bad.write.format("aof2").mode("append").options(**options).save(str(stream))
    two = spark.range(1).selectExpr("cast('two\\nlines\\n' as binary) as payload")
    with pytest.raises(Exception, match="not one line"):
        two.write.format("aof2").mode("append").options(**options).save(str(stream))
    assert list((volume.root / "staging").rglob("*")) == []
    volume.done("seal", stream)
    assert payloads(spark, stream) == lines(5)


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ("cast(cast(id as string) as binary) payload, cast(id as string) value", "name one of them"),
        ("id ext_id", "name one of them"),
        ("id payload", "payload is binary"),
        ("cast(id as string) value, id other", "no column other"),
    ],
)
def test_columns_that_are_not_written(spark: Any, tmp_path: Path, columns: str, why: str) -> None:
    frame = spark.range(3).selectExpr(*columns.split(", "))
    with pytest.raises(Exception, match=why):
        frame.write.format("aof2").mode("append").save(str(tmp_path))


def test_from_one_stream_to_another_while_it_grows(spark: Any, volume: MountedVolume) -> None:
    """Every record once, with the daemon killed and Spark's query begun anew in between."""
    source, target = stream_of(volume), stream_of(volume, "copies")
    written = lines(6000)
    checkpoint, staging = volume.root / "checkpoint", volume.root / "staging"

    def run() -> None:
        reader = spark.readStream.format("aof2").option("maxRecordsPerTrigger", 700).load(str(source))
        query = (
            reader.writeStream.format("aof2")
            .option("checkpointLocation", str(checkpoint))
            .option("conf", str(volume.conf))
            .option("staging", str(staging))
            .trigger(availableNow=True)
            .start(str(target))
        )
        query.awaitTermination()

    def write(some: list[bytes]) -> None:
        append(source, some)

    for part in range(3):
        some = written[part * 2000 : (part + 1) * 2000]
        writer = threading.Thread(target=write, args=(some,))
        writer.start()
        run()
        writer.join()
        volume.done("seal", source)
        if part == 1:
            volume.kill()
            volume.remount()
    run()
    assert payloads(spark, target) == written
    run()
    assert payloads(spark, target) == written


def test_a_micro_batch_that_is_run_again_is_there_once(spark: Any, volume: MountedVolume) -> None:
    """Spark was killed between the commit of a micro-batch and its own note of it."""
    source, target = stream_of(volume), stream_of(volume, "copies")
    append(source, lines(300))
    volume.done("seal", source)
    checkpoint = volume.root / "checkpoint"

    def run() -> None:
        query = (
            spark.readStream.format("aof2")
            .load(str(source))
            .writeStream.format("aof2")
            .option("checkpointLocation", str(checkpoint))
            .option("conf", str(volume.conf))
            .trigger(availableNow=True)
            .start(str(target))
        )
        query.awaitTermination()

    run()
    for note in (checkpoint / "commits").iterdir():
        note.unlink()
    run()
    assert payloads(spark, target) == lines(300)


def test_readers_beside_eight_writers(spark: Any, volume: MountedVolume, tmp_path: Path) -> None:
    stream = stream_of(volume)
    stop = time.monotonic() + 4

    def write(word: int) -> None:
        fd = os.open(stream / "_append", os.O_WRONLY | os.O_APPEND)
        n = 0
        while time.monotonic() < stop:
            os.write(fd, b'{"w": %d, "n": %d}\n' % (word, n))
            n += 1
            time.sleep(0.001)
        os.close(fd)

    writers = [threading.Thread(target=write, args=(word,)) for word in range(8)]
    for writer in writers:
        writer.start()
    query = (
        spark.readStream.format("aof2")
        .load(str(stream))
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="200 milliseconds")
        .start(str(tmp_path / "out"))
    )
    for writer in writers:
        writer.join()
    volume.done("seal", stream)
    query.processAllAvailable()
    query.stop()
    found = spark.read.parquet(str(tmp_path / "out")).selectExpr("offset", "cast(payload as string) line")
    rows = sorted((row.offset, row.line) for row in found.collect())
    assert "".join(line for _, line in rows).encode() == b"".join(payloads(spark, stream))
    assert len({offset for offset, _ in rows}) == len(rows) > 1000
