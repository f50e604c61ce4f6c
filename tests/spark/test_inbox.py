"""Rows that Spark writes with no mount in its tasks: through the inbox of a volume that is mounted elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aof2.engine.spark.options import What, write_options
from tests.spark.support import lines
from tests.spark.test_mounted import TENANTS, append, payloads, stream_of
from tests.support.mount import MountedVolume, mounted_volume, skip_where_impossible

pytestmark = pytest.mark.filterwarnings("ignore")  # what Spark's own imports have to say


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[MountedVolume]:
    skip_where_impossible()
    with mounted_volume(tmp_path, tenants=TENANTS, timeout_s=300.0, follow={"inbox_period": "200ms"}) as made:
        yield made
        assert made.complaints() == []


def remote_of(volume: MountedVolume, tenant: str) -> dict[str, str]:
    return {"remote": f"file://{volume.remote}", "tenant": tenant}


def test_records(spark: Any, volume: MountedVolume) -> None:
    stream = stream_of(volume)
    append(stream, lines(100))
    frame = spark.range(3000, numPartitions=3).selectExpr("to_json(struct(id)) as value", "id as ext_id")
    frame.write.format("aof2").mode("append").options(**remote_of(volume, "events")).save("clicks")
    rows = sorted(spark.read.format("aof2").load(str(stream)).collect(), key=lambda row: row.offset)
    assert [bytes(r.payload) for r in rows] == [*lines(100), *(b'{"id":%d}\n' % n for n in range(3000))]
    assert [r.ext_id for r in rows][100:] == list(range(3000))
    frame.limit(10).write.format("aof2").mode("overwrite").options(**remote_of(volume, "events")).save("clicks")
    assert len(payloads(spark, stream)) == 10
    two = spark.range(1).selectExpr("cast('two\\nlines\\n' as binary) as payload")
    with pytest.raises(Exception, match=r"was refused.*one line"):
        two.write.format("aof2").mode("append").options(**remote_of(volume, "events")).save("clicks")
    assert len(payloads(spark, stream)) == 10


def test_parquet(spark: Any, volume: MountedVolume) -> None:
    target = volume.mountpoint / "default" / "table"
    frame = spark.range(2000, numPartitions=2).selectExpr(
        "id", "cast(id as string) name", "id % 3 as part", "if(id % 2 = 0, 'a/b', null) as word"
    )
    write = frame.write.format("aof2").options(**{"as": "parquet", "partition_by": "part,word", "conf": volume.conf})
    write.mode("append").save(str(target))
    found = spark.read.parquet(str(target))
    assert found.count() == 2000
    assert {d.name for d in target.iterdir()} == {"part=0", "part=1", "part=2"}
    assert {d.name for d in (target / "part=0").iterdir()} == {"word=a%2Fb", "word=__HIVE_DEFAULT_PARTITION__"}
    key = "id, name, cast(part as bigint) part, word"
    assert sorted(found.selectExpr(*key.split(", ")).collect()) == sorted(frame.collect())
    write.mode("append").save(str(target))
    assert spark.read.parquet(str(target)).count() == 4000
    frame.limit(5).drop("word").write.format("aof2").options(**{"as": "parquet"}, **remote_of(volume, "default")).mode(
        "overwrite"
    ).save("table")
    assert spark.read.parquet(str(target)).count() == 5
    (volume.mountpoint / "default" / "plain").write_bytes(b"a file")
    with pytest.raises(Exception, match=r"was refused.*not a directory"):
        write.mode("append").save(str(volume.mountpoint / "default" / "plain"))


def test_micro_batches_are_there_once(spark: Any, volume: MountedVolume) -> None:
    source, target = stream_of(volume), stream_of(volume, "copies")
    written = lines(2000)
    append(source, written)
    volume.done("seal", source)

    def run() -> None:
        reader = spark.readStream.format("aof2").option("maxRecordsPerTrigger", 700).load(str(source))
        query = (
            reader.writeStream.format("aof2")
            .options(checkpointLocation=str(volume.root / "checkpoint"), **remote_of(volume, "events"))
            .trigger(availableNow=True)
            .start(target.name)
        )
        query.awaitTermination()

    run()
    last = max((volume.root / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()  # as if it was killed before it noted the end of its last batch
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    run()
    assert payloads(spark, target) == written


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"as": "csv"}, "records, parquet"),
        ({"partition_by": "day"}, "parquet"),
        ({"remote": "s3://b/p"}, "tenant"),
        ({"endpoint_url": "http://x"}, "remote"),
        ({"staging": "/tmp/x", "as": "parquet"}, "staging"),
        ({"deadline": "soon"}, "deadline"),
    ],
)
def test_options_that_contradict(given: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        write_options({"path": "/aof2/events/clicks", **given})


def test_options() -> None:
    found = write_options({"path": "t", "tenant": "default", "as": "Parquet", "partition_by": "a, b", "deadline": "5s"})
    assert (found.path, found.tenant, found.what, found.partition_by) == ("t", "default", What.PARQUET, ("a", "b"))
    assert found.deadline_s == 5.0
