"""Spark as it comes, on the mount: what it writes and reads there is what it writes and reads on a local disk.

One session for all: it takes ten seconds to start. Nothing of Spark is configured for AOF2.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mount.world import World, world

pyspark = pytest.importorskip("pyspark", reason="the spark extra is not installed")
if not shutil.which("java"):
    pytest.skip("there is no Java: apt-get install default-jre-headless", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore")  # what Spark's own imports have to say

ROWS = 20_000
PARTS = 4
HYDRATIONS = ("HydrationStarted", "HydrationDone")


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    local = tmp_path_factory.mktemp("spark")
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", str(local / "warehouse"))
        .config("spark.local.dir", str(local))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def w(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("mounted")) as made:
        made.mount()
        yield made


def write_all(spark: Any, top: str) -> None:
    """Every format; one written to twice, one overwritten."""
    rows = spark.range(ROWS, numPartitions=PARTS).selectExpr(
        "id", "id % 3 as kind", "cast(id as string) as name", "id * 1.5 as price"
    )
    rows.write.partitionBy("kind").parquet(f"{top}/parquet")
    rows.limit(50).write.mode("append").partitionBy("kind").parquet(f"{top}/parquet")
    rows.write.json(f"{top}/json")
    rows.limit(10).write.csv(f"{top}/csv", header=True)
    rows.write.mode("overwrite").csv(f"{top}/csv", header=True)
    rows.select("name").write.text(f"{top}/text")
    rows.write.orc(f"{top}/orc")
    for version in (1, 2):  # task output is renamed at the job's commit, or at the task's
        committer = rows.write.option("mapreduce.fileoutputcommitter.algorithm.version", version)
        committer.mode("overwrite").option("partitionOverwriteMode", "dynamic").partitionBy("kind").json(f"{top}/twice")
    stream = spark.readStream.schema("id long, name string").json(f"{top}/json").writeStream.format("parquet")
    stream = stream.option("checkpointLocation", f"{top}/checkpoint").trigger(availableNow=True)
    for _ in range(2):  # the second finds what the first committed
        stream.start(f"{top}/streamed").awaitTermination()
    spark.sql("DROP TABLE IF EXISTS made")
    spark.sql(f"CREATE TABLE made USING parquet LOCATION '{top}/table' AS SELECT id, name FROM json.`{top}/json`")
    spark.sql("INSERT INTO made SELECT -id, name FROM made WHERE id < 10")


def read_all(spark: Any, top: str) -> dict[str, object]:
    """What queries over them answer."""
    sums = ("count(*)", "sum(id)", "sum(price)", "min(name)", "max(name)")
    parquet = spark.read.parquet(f"{top}/parquet")
    json, csv = spark.read.json(f"{top}/json"), spark.read.csv(f"{top}/csv", header=True)
    return {
        "schemas": [frame.schema.simpleString() for frame in (parquet, json, csv)],
        "parquet": [tuple(row) for row in parquet.selectExpr(*sums).collect()],
        "pruned": sorted(row.id for row in parquet.where("kind = 1 and id < 40").select("id").collect()),
        "json": [tuple(row) for row in json.selectExpr(*sums).collect()],
        "csv": [tuple(row) for row in csv.selectExpr(*sums).collect()],
        "orc": [tuple(row) for row in spark.read.orc(f"{top}/orc").selectExpr(*sums).collect()],
        "twice": [tuple(row) for row in spark.read.json(f"{top}/twice").selectExpr(*sums).collect()],
        "streamed": [tuple(row) for row in spark.read.parquet(f"{top}/streamed").selectExpr(*sums[:2]).collect()],
        "table": [
            tuple(row) for row in spark.sql(f"SELECT count(*), sum(id), max(name) FROM parquet.`{top}/table`").collect()
        ],
        "binary": sorted(
            bytes(row.content) for row in spark.read.format("binaryFile").load(f"{top}/text/part-*").collect()
        ),
        "text": [tuple(row) for row in spark.read.text(f"{top}/text").selectExpr("count(*)", "max(value)").collect()],
    }


def hydrations(w: World) -> int:
    return sum(row["type"] in HYDRATIONS for row in w.json_lines("manifest inspect", "default"))


def test_spark_on_the_mount_as_on_a_disk(spark: Any, w: World, tmp_path: Path) -> None:
    disk, mounted = str(tmp_path / "disk"), str(w.files / "spark")
    write_all(spark, disk)
    write_all(spark, mounted)
    expected = read_all(spark, disk)
    assert read_all(spark, mounted) == expected
    names = sorted(p.suffix for p in Path(disk).rglob("*"))
    assert sorted(p.suffix for p in Path(mounted).rglob("*")) == names  # nothing temporary is left, nothing is missing

    w.ok("evict", w.files)
    before = hydrations(w)
    assert read_all(spark, mounted) == expected
    assert hydrations(w) > before
    part = max(Path(mounted, "json").glob("part-*.json"), key=lambda p: p.stat().st_size)
    history = w.ok("why", part)
    assert "ydrat" in history and "vict" in history

    w.ok("evict", w.files)
    w.umount()
    w.verify("--remote")
    w.mount()
    assert read_all(spark, mounted) == expected
    spark.read.parquet(f"{mounted}/parquet").where("kind = 2").write.parquet(f"{mounted}/again")
    assert spark.read.parquet(f"{mounted}/again").count() == sum(n % 3 == 2 for n in [*range(ROWS), *range(50)])
    w.umount()
    w.verify("--remote")
    assert w.complaints() == []
