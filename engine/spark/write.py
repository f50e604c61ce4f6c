"""Aof2Writer and Aof2StreamWriter: `df.write.format("aof2")`, `df.writeStream.format("aof2")`.

Tasks stage what they get, and the driver's commit has all of it published by one step, by the job's number: by the
daemon of a mount on this machine (`by_mount.py`), or by the writer of the volume, wherever it is (`by_inbox.py`). A
batch has a number of its own; a micro-batch has that of its checkpoint and its batchId: one that Spark runs again after
a crash is there once.

As records, a row has `payload` (binary, as it is) or `value` (text, a newline behind each); `ext_id` and `flags` if
they are there. `offset`, `timestamp` and `segment_id` are the stream's to give and are passed over: one can be written
to another. As Parquet, rows are what they are.

Owner: Spark; what is kept can be pickled. Crash: what was staged, which is swept after a day.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from aof2.engine.spark.options import What, WriteOptions
from aof2.engine.spark.way import way_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

TYPES: Final = {
    "payload": ("binary",),
    "value": ("string",),
    "ext_id": ("bigint", "int"),
    "flags": ("int",),
    "offset": ("bigint",),
    "timestamp": ("timestamp",),
    "segment_id": ("bigint",),
}


def check_schema(schema: StructType, options: WriteOptions) -> None:
    if options.what is What.RECORDS:
        check_columns(schema)
        return
    missing = [name for name in options.partition_by if name not in schema.names]
    if missing:
        raise ValueError(f"partition_by: there is no column {missing[0]}, there is {', '.join(schema.names)}")
    if len(options.partition_by) == len(schema.names):
        raise ValueError("partition_by: no column is left that is not in a directory's name")


def check_columns(schema: StructType) -> None:
    for field in schema.fields:
        if field.name not in TYPES:
            raise ValueError(f"no column {field.name} can be written: there is {', '.join(TYPES)}")
        if field.dataType.simpleString() not in TYPES[field.name]:
            raise ValueError(f"column {field.name} is {TYPES[field.name][0]}, not {field.dataType.simpleString()}")
    if sum(field.name in ("payload", "value") for field in schema.fields) != 1:
        raise ValueError("a record is either `payload` (binary) or `value` (string): name one of them")


class Aof2Writer(DataSourceArrowWriter):
    """All rows of a job, behind what is there or instead of it."""

    def __init__(self, schema: StructType, options: WriteOptions, *, overwrite: bool) -> None:
        check_schema(schema, options)
        self._way = way_of(options)
        self._schema = schema
        self._overwrite = overwrite
        self._job = options.job or uuid.uuid4().hex
        self._way.begin(self._job)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._way.stage(iterator, self._schema, self._job)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._way.commit(messages, self._job, overwrite=self._overwrite)
        self._way.end(self._job)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._way.forget(messages)
        self._way.end(self._job)


class Aof2StreamWriter(DataSourceStreamArrowWriter):
    """The rows of each micro-batch, once."""

    def __init__(self, schema: StructType, options: WriteOptions, *, overwrite: bool) -> None:
        check_schema(schema, options)
        if not options.checkpoint:
            raise ValueError("set option checkpointLocation on the query: it is what tells its micro-batches apart")
        self._way = way_of(options)
        self._schema = schema
        self._overwrite = overwrite
        self._query = hashlib.sha256(options.checkpoint.encode()).hexdigest()[:32]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        self._way.begin(self._query)
        return self._way.stage(iterator, self._schema, self._query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._way.commit(messages, f"{self._query}-{batchId}", overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._way.forget(messages)
