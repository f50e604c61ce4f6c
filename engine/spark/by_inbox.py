"""The way of rows into a volume that need not be mounted here: blobs in the remote, and the writer takes them in.

A task puts what it gets under an attempt of its own, and tells the driver what a commit lists of it; the driver's
commit is one conditional put. Its answer, or why the writer refused, is the job's.

Owner: Spark; what is kept can be pickled: each process opens the remote by itself. Crash: blobs without a commit, which
the writer sweeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql.datasource import WriterCommitMessage

from aof2.engine.blob.writer import LEVEL
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.inbox.format import Door
from aof2.engine.inbox.job import Inbox, record_stage
from aof2.engine.inbox.stage import RAW, Attempt, Staged
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.spark.by_mount import partition_of_task
from aof2.engine.spark.deliver import ask
from aof2.engine.spark.options import What

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


@dataclass
class PutMessage(WriterCommitMessage):
    """What a task put."""

    partition: int
    staged: Staged


@dataclass(frozen=True)
class InboxWay:
    """`control`: the socket of the writer's daemon, where that is on the driver's machine."""

    remote: RemoteSettings
    door: Door
    to: str
    what: What
    partition_by: tuple[str, ...]
    deadline_s: float
    control: Path | None = None

    def begin(self, job: str) -> None:
        """Nothing has to be there before tasks put."""

    def stage(self, batches: Iterator[pa.RecordBatch], schema: StructType, job: str) -> PutMessage:
        partition = partition_of_task()
        with self._store() as store:
            level = RAW if self.what is What.PARQUET else LEVEL
            attempt = Attempt(store, self.door, job, level=level)
            if self.what is What.PARQUET:
                from aof2.engine.spark.parquet import put_parquet

                put_parquet(batches, schema, attempt, partition, self.partition_by)
            else:
                self._put_records(batches, attempt)
            return PutMessage(partition, attempt.finish())

    def _put_records(self, batches: Iterator[pa.RecordBatch], attempt: Attempt) -> None:
        from aof2.engine.spark.stage import records_of

        records = record_stage(attempt, self.door)
        for batch in batches:
            if batch.num_rows:
                records.add(*records_of(batch))
        records.flush()

    def commit(self, messages: Sequence[WriterCommitMessage | None], job_id: str, *, overwrite: bool) -> None:
        put = sorted((m for m in messages if isinstance(m, PutMessage)), key=lambda m: m.partition)
        parts = [message.staged for message in put if message.staged.objects or message.staged.files]
        if not parts and not overwrite:
            return
        with self._store() as store:
            inbox = Inbox(store, self.door.tenant, door=self.door)
            job = inbox.open_job(job_id, to=self.to, mode="overwrite" if overwrite else "append")
            job.commit(parts)
            if self.control is not None:
                with contextlib.suppress(Aof2Error):  # it looks by itself soon
                    ask(self.control, verb="inbox")
            job.wait(self.deadline_s)

    def forget(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        keys = [one.key for m in messages if isinstance(m, PutMessage) for one in m.staged.objects]
        if keys:
            with self._store() as store, contextlib.suppress(Aof2Error):  # the writer sweeps them in time
                store.delete(keys)

    def end(self, job: str) -> None:
        """Other attempts are swept by the writer."""

    @contextlib.contextmanager
    def _store(self) -> Iterator[RemoteStore]:
        store = open_remote(Env(), self.remote)
        try:
            yield store
        finally:
            store.close()
