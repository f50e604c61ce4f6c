"""The Spark session of `aof2 bench spark`: `python sparkwork.py SOCKET LOCAL` answers one task a connection.

A session takes ten seconds to start and its first jobs are slow: one serves a whole run, in a process of its own that
can be given up on. A task is a line of JSON, `[name, argument, …]`; its answer is one too: what the task found, and the
seconds it took. Nothing of Spark is configured for AOF2.

Owner: the run that started it. A crash leaves nothing but LOCAL, which is a folder of the run.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

CORES: Final = 2
LINE_SCHEMA: Final = "n bigint, kind int, text string"
SUMS: Final = ("count(*)", "sum(n)", "sum(kind)", "sum(length(text))")
RECORD_SUMS: Final = (
    *("count(*)", "sum(ordinal)", "sum(value)", "sum(segment_id % 1000)"),
    *("count(distinct type)", "max(timestamp_ms)", "sum(chunk_offset)"),
)
SOURCE_SCHEMA: Final = "offset bigint, timestamp timestamp, ext_id bigint, flags int, segment_id bigint, payload binary"


def started(local: str) -> SparkSession:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    session: SparkSession = (
        SparkSession.builder.master(f"local[{CORES}]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.warehouse.dir", f"{local}/warehouse")
        .config("spark.local.dir", local)
        .config("spark.driver.memory", "1g")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    session.dataSource.register(Prepared)
    return session


# -- what is read and written


class Tasks:
    """Each public method is a task."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def json(self, folder: str) -> list[Any]:
        return self._first(self._spark.read.schema(LINE_SCHEMA).json(folder).selectExpr(*SUMS))

    def text(self, folder: str) -> list[Any]:
        return self._first(self._spark.read.text(folder).selectExpr("count(*)", "sum(length(value))"))

    def parquet(self, folder: str) -> list[Any]:
        return self._first(self._spark.read.parquet(folder).selectExpr(*SUMS))

    def count_json(self, folder: str) -> int:
        """As people count: the schema is inferred."""
        return self._spark.read.json(folder).count()

    def count_aof2(self, folder: str) -> int:
        return self._spark.read.format("aof2").load(folder).count()

    def count_offsets(self, folder: str) -> int:
        """One column is enough to count, and Spark does not find that out by itself."""
        return self._spark.read.format("aof2").schema("offset bigint").load(folder).count()

    def partitions_aof2(self, folder: str) -> int:
        return self._spark.read.format("aof2").load(folder).rdd.getNumPartitions()

    def count_prepared(self, records: int, record_bytes: int, partitions: int) -> int:
        """The same rows out of a source that has them ready: what Spark takes at most."""
        options = {"records": records, "recordBytes": record_bytes, "partitions": partitions}
        return self._spark.read.format("prepared").options(**options).load().count()

    def write(self, folder: str, rows: int, seed: int) -> None:
        self._rows(rows, seed).write.parquet(folder)

    def write_partitioned(self, folder: str, rows: int, seed: int) -> None:
        """A file for each kind from each task."""
        self._rows(rows, seed).write.partitionBy("kind").parquet(folder)

    def _rows(self, rows: int, seed: int) -> Any:
        """No two runs write the same bytes, and most of them do not compress."""
        text = f"concat(md5(cast(id + {seed} as string)), sha2(cast(id * {seed} as string), 256))"
        columns = ("id as n", "cast(id % 100 as int) as kind", f"{text} as text")
        return self._spark.range(rows, numPartitions=2 * CORES).selectExpr(*columns)

    def verify_remote(self, conf: str) -> list[Any]:
        """`aof2 spark verify`, in this session: bytes proven, findings."""
        from aof2.engine.settings import load_settings
        from aof2.engine.spark.pipelines import verify
        from aof2.engine.spark.pipelines.seam import silent

        report = verify.run(self._spark, verify.Arguments(load_settings(Path(conf))), silent).report
        return [report["remote_bytes"], report["errors"] + report["warnings"]]

    def manifest_to_parquet(self, folder: str, target: str) -> int:
        frame = self._records(folder)
        frame.write.parquet(target)
        return 0

    def manifest_log(self, folder: str) -> list[Any]:
        return self._first(self._records(folder).selectExpr(*RECORD_SUMS))

    def manifest_parquet(self, folder: str) -> list[Any]:
        return self._first(self._spark.read.parquet(folder).selectExpr(*RECORD_SUMS))

    def _records(self, folder: str) -> Any:
        from aof2.engine.spark.pipelines import manifest

        return manifest.LogFrames(self._spark, manifest.Arguments(None, folder)).records()

    def compact_stream(self, stream: str, target: str, conf: str) -> list[Any]:
        """`aof2 spark compact`, in this session; rows and checksum."""
        from aof2.engine.spark.pipelines import compact

        asked = compact.Arguments(source=stream, target=target, schema=LINE_SCHEMA, layout=_layout(), conf=conf)
        report = compact.run(self._spark, asked).report
        return [report["rows"], report["checksum"]]

    def compact_json(self, folder: str, target: str) -> list[Any]:
        """The same out of files of JSON, counted and compared as well."""
        from aof2.engine.spark.pipelines import tables
        from aof2.engine.spark.pipelines.seam import silent

        rows = tables.laid_out(self._spark.read.schema(LINE_SCHEMA).json(folder), _layout())
        tally = tables.write(self._spark, rows, Path(target), _layout(), silent)
        return [tally.rows, f"{tally.checksum:016x}"]

    def compact_unchecked(self, folder: str, target: str) -> None:
        """As people write it."""
        from pyspark.sql.functions import col

        rows = self._spark.read.schema(LINE_SCHEMA).json(folder).hint("rebalance", col("kind"))
        rows.write.partitionBy("kind").option("compression", "zstd").parquet(target)

    @staticmethod
    def _first(frame: Any) -> list[Any]:
        return list(frame.collect()[0])


def _layout() -> Any:
    from aof2.engine.spark.pipelines.tables import Layout

    return Layout(partition_by=("kind",))


class Prepared(DataSource):
    """Batches that were made before: the ceiling of any source in Python."""

    @classmethod
    def name(cls) -> str:
        return "prepared"

    def schema(self) -> str:
        return SOURCE_SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        return PreparedReader({key: int(self.options[key]) for key in ("records", "recordBytes", "partitions")})


class PreparedReader(DataSourceReader):
    def __init__(self, sizes: dict[str, int]) -> None:
        self._sizes = sizes

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(i) for i in range(self._sizes["partitions"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow as pa

        from aof2.engine.spark.read import BATCH_BYTES, BATCH_ROWS

        records, size = self._sizes["records"], self._sizes["recordBytes"]
        left = (partition.value + 1) * records // self._sizes["partitions"]
        left -= partition.value * records // self._sizes["partitions"]
        rows = max(1, min(BATCH_ROWS, BATCH_BYTES // size))
        numbers = pa.array(range(rows), pa.int64())
        arrays = [
            numbers,
            numbers.view(pa.timestamp("us", "UTC")),
            *(numbers, numbers.cast(pa.int32()), numbers),
            pa.array([os.urandom(size) for _ in range(rows)], pa.binary()),
        ]
        names = [column.split()[0] for column in SOURCE_SCHEMA.split(", ")]
        batch = pa.RecordBatch.from_arrays(arrays, names)
        while left:
            yield batch.slice(0, min(rows, left))
            left -= min(rows, left)


# -- answering


def timed(task: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    start = time.perf_counter()
    found = task(*arguments)
    return {"seconds": time.perf_counter() - start, "started": start, "found": found}


def serve(listening: socket.socket, tasks: Tasks) -> None:
    """One task at a time, until the process is ended."""
    while True:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as asked:
            line = asked.readline()
            if not line:
                continue
            name, *arguments = json.loads(line)
            try:
                answer = timed(getattr(tasks, name), *arguments)
            except Exception as e:  # noqa: BLE001  # whatever Spark says, the run goes on
                answer = {"error": str(e).splitlines()[0] if str(e) else type(e).__name__}
            connection.sendall(json.dumps(answer).encode() + b"\n")


def main(path: str, local: str) -> None:
    Path(local).mkdir(exist_ok=True)
    os.chdir(Path(path).parent)  # an address holds 107 bytes, a path more
    tasks = Tasks(started(local))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(Path(path).name)
        listening.listen()
        serve(listening, tasks)


if __name__ == "__main__":
    main(*sys.argv[1:])
