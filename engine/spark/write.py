"""Aof2Writer and Aof2StreamWriter: `df.write.format("aof2")`, `df.writeStream.format("aof2")`.

Tasks stage their records (`stage.py`); the driver's commit has the daemon deliver all of them by one step, by the job's
number. A batch has a number of its own; a micro-batch has that of its checkpoint and its batchId: one that Spark runs
again after a crash is delivered once.

A row has `payload` (binary, as it is) or `value` (text, a newline behind each); `ext_id` and `flags` if they are there.
`offset`, `timestamp` and `segment_id` are the stream's to give and are passed over: one can be written to another.

Owner: Spark; what is kept can be pickled. Crash: staged files, swept after a day.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from aof2.engine.spark.options import WriteOptions, folder_of

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


@dataclass
class StagedMessage(WriterCommitMessage):
    """What a task staged."""

    partition: int
    files: list[tuple[str, str]]
    records: int


def check_columns(schema: StructType) -> None:
    for field in schema.fields:
        if field.name not in TYPES:
            raise ValueError(f"no column {field.name} can be written: there is {', '.join(TYPES)}")
        if field.dataType.simpleString() not in TYPES[field.name]:
            raise ValueError(f"column {field.name} is {TYPES[field.name][0]}, not {field.dataType.simpleString()}")
    if sum(field.name in ("payload", "value") for field in schema.fields) != 1:
        raise ValueError("a record is either `payload` (binary) or `value` (string): name one of them")


def _stage(batches: Iterator[pa.RecordBatch], options: WriteOptions, job: str) -> StagedMessage:
    from pyspark import TaskContext

    from aof2.engine.spark.stage import stage

    staged = stage(batches, folder_of(options.staging, job))
    context: Any = TaskContext.get()
    return StagedMessage(context.partitionId() if context else 0, staged.files, staged.records)


def _deliver(
    messages: Sequence[WriterCommitMessage | None], options: WriteOptions, job_id: str, *, overwrite: bool
) -> None:
    from aof2.engine.spark.deliver import deliver

    staged = sorted((m for m in messages if isinstance(m, StagedMessage)), key=lambda m: m.partition)
    files = [pair for message in staged for pair in message.files]
    if files or overwrite:
        deliver(options.conf, options.path, job_id, files, overwrite=overwrite)
    _forget(messages, options)


def _forget(messages: Sequence[WriterCommitMessage | None], options: WriteOptions) -> None:
    from aof2.engine.spark.stage import remove, sweep

    for message in messages:
        if isinstance(message, StagedMessage):
            remove(message.files)
    sweep(folder_of(options.staging, "any").parent)


class Aof2Writer(DataSourceArrowWriter):
    """All records of a job, behind what is there or instead of it."""

    def __init__(self, schema: StructType, options: WriteOptions, *, overwrite: bool) -> None:
        check_columns(schema)
        self._options = options
        self._overwrite = overwrite
        self._staged = uuid.uuid4().hex  # of its own, also where the job had a run before
        folder_of(options.staging, self._staged).mkdir(parents=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        return _stage(iterator, self._options, self._staged)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        _deliver(messages, self._options, self._options.job or self._staged, overwrite=self._overwrite)
        self._clear()

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        _forget(messages, self._options)
        self._clear()

    def _clear(self) -> None:
        """What other attempts staged, too."""
        from aof2.engine.spark.stage import remove_job

        remove_job(folder_of(self._options.staging, self._staged))


class Aof2StreamWriter(DataSourceStreamArrowWriter):
    """The records of each micro-batch, once."""

    def __init__(self, schema: StructType, options: WriteOptions, *, overwrite: bool) -> None:
        check_columns(schema)
        if not options.checkpoint:
            raise ValueError("set option checkpointLocation on the query: it is what tells its micro-batches apart")
        self._options = options
        self._overwrite = overwrite
        self._query = hashlib.sha256(options.checkpoint.encode()).hexdigest()[:32]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StagedMessage:
        folder_of(self._options.staging, self._query).mkdir(parents=True, exist_ok=True)
        return _stage(iterator, self._options, self._query)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        _deliver(messages, self._options, f"{self._query}-{batchId}", overwrite=self._overwrite)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        _forget(messages, self._options)
