"""The way of rows into a stream of a mount on this machine: files beside the stream, and the daemon is asked.

Owner: Spark; what is kept can be pickled. Crash: staged files, swept after a day.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import WriterCommitMessage

from aof2.engine.spark.options import WriteOptions, folder_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


@dataclass
class StagedMessage(WriterCommitMessage):
    """What a task staged."""

    partition: int
    files: list[tuple[str, str]]
    records: int


@dataclass(frozen=True)
class MountWay:
    options: WriteOptions

    def begin(self, job: str) -> None:
        folder_of(self.options.staging, job).mkdir(parents=True, exist_ok=True)

    def stage(self, batches: Iterator[pa.RecordBatch], _: StructType, job: str) -> StagedMessage:
        from aof2.engine.spark.stage import stage

        folder = folder_of(self.options.staging, job)
        if not folder.is_dir():
            raise ValueError(
                f"{folder}: this task runs on another machine than its driver, or the job is over; set option conf or "
                "remote and tenant to one that it can reach, and no staging"
            )
        staged = stage(batches, folder)
        return StagedMessage(partition_of_task(), staged.files, staged.records)

    def commit(self, messages: Sequence[WriterCommitMessage | None], job_id: str, *, overwrite: bool) -> None:
        from aof2.engine.spark.deliver import deliver

        staged = sorted((m for m in messages if isinstance(m, StagedMessage)), key=lambda m: m.partition)
        files = [pair for message in staged for pair in message.files]
        if files or overwrite:
            deliver(self.options.conf, self.options.path, job_id, files, overwrite=overwrite)
        self.forget(messages)

    def forget(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        from aof2.engine.spark.stage import remove, sweep

        for message in messages:
            if isinstance(message, StagedMessage):
                remove(message.files)
        sweep(folder_of(self.options.staging, "any").parent)

    def end(self, job: str) -> None:
        """What other attempts staged goes, too."""
        from aof2.engine.spark.stage import remove_job

        remove_job(folder_of(self.options.staging, job))


def partition_of_task() -> int:
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    return int(context.partitionId()) if context else 0
