"""`aof2 spark ingest`: what Spark can read, into a stream or into Parquet on the mount.

    batch     source ──► records of a stream, one job; or a directory of Parquet, put into place by one rename
    growing   source ──► micro-batches, each a job of its own: records, or the directory `batch=N` of the target

What was read is compared with what is there, by count and checksum, before a directory is put into place and after a
job was delivered.

Invariants
- A run that was killed and is run again delivers nothing twice and misses nothing. A batch is the same job as long as
  the request and the files it reads are the same (`jobs.py`); a micro-batch by its checkpoint's query and its number.

Owner: the driver. Crash: staged files of tasks, a workspace beside the target; the next run of the same job goes on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aof2.engine.env import Env
from aof2.engine.spark.pipelines import jobs, tables
from aof2.engine.spark.pipelines.reconcile import Tally
from aof2.engine.spark.pipelines.records import Brought, StreamTarget
from aof2.engine.spark.pipelines.seam import PipelineError, Summary, Tell, silent
from aof2.engine.spark.pipelines.tables import Layout
from aof2.engine.spark.pipelines.work import Work
from aof2.engine.spark.pipelines.workspace import Workspace, beside, marker_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAME: Final = "ingest"
AVAILABLE_NOW: Final = "available-now"
FILE_FORMATS: Final = ("avro", "csv", "json", "orc", "parquet", "text", "xml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """`into`: "records", "parquet", or "" for what the target's tenant is. `trigger`: "" for a batch, "available-now",
    or an interval as Spark spells it. `write_options` go to `format("aof2")`."""

    target: str
    sources: Sequence[str] = ()
    format: str = "parquet"
    options: Mapping[str, str] = field(default_factory=dict)
    schema: str = ""
    select: Sequence[str] = ()
    into: str = ""
    layout: Layout = field(default_factory=Layout)
    write_options: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False
    job: str = ""
    trigger: str = ""
    checkpoint: str = ""
    conf: str = ""


def run(session: SparkSession, arguments: Arguments, tell: Tell = silent, env: Env | None = None) -> Summary:
    """All there is of a batch; of a growing source until its trigger has no more, or it is interrupted."""
    work = _Ingestion(session, arguments, tell, env or Env())
    if arguments.trigger:
        return _Growing(work).run()
    frame = work.selected(work.reader(session.read))
    job = work.batch_job(frame)
    total = Total()
    total.add(work.put(frame, job, Path(arguments.target)))
    return work.summary(total)


@dataclass(frozen=True, slots=True)
class Done:
    """What came of one job."""

    job: str
    tally: Tally
    before: bool
    first_offset: int | None = None
    next_offset: int | None = None


class Total:
    """What came of all jobs so far, and the last of them."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.jobs = 0
        self.before = 0
        self.last: Done | None = None

    def add(self, done: Done) -> None:
        self.tally += done.tally
        self.jobs += 1
        self.before += done.before
        self.last = done


class _Ingestion(Work[Arguments]):
    """A run, and where it brings what it reads."""

    def __init__(self, session: SparkSession, arguments: Arguments, tell: Tell, env: Env) -> None:
        super().__init__(session, arguments, tell, env)
        self.into = arguments.into or ("records" if self._target_is_stream() else "parquet")
        if self.into == "records" and arguments.layout.partition_by:
            raise PipelineError("--partition-by is for Parquet; a stream has no partitions")
        if self.into == "parquet" and arguments.overwrite:
            raise PipelineError("--overwrite is for streams; name another directory, or remove this one before")

    def _target_is_stream(self) -> bool:
        return self.mounted is not None and self.mounted.holds_streams(self.asked.target)

    # -- reading

    def reader(self, reader: Any) -> DataFrame:
        """`session.read` or `session.readStream`, told everything."""
        asked = self.asked
        reader = reader.format(asked.format).options(**asked.options)
        if asked.schema:
            reader = reader.schema(asked.schema)
        if len(asked.sources) > 1 and asked.trigger:
            raise PipelineError("a growing source is one path; a pattern may stand for many")
        frame: DataFrame
        if not asked.sources:
            frame = reader.load()
        elif asked.trigger:
            frame = reader.load(asked.sources[0])
        else:
            frame = reader.load(list(asked.sources))
        return frame

    def selected(self, frame: DataFrame) -> DataFrame:
        return frame.selectExpr(*self.asked.select) if self.asked.select else frame

    # -- jobs

    def _request(self) -> list[object]:
        """What makes it this request and no other; the conf and how far the source is do not."""
        a, layout = self.asked, self.asked.layout
        return [
            *(list(a.sources), a.format, dict(a.options), a.schema, list(a.select)),
            *(str(Path(a.target).absolute()), self.into, list(layout.partition_by), a.overwrite),
        ]

    def batch_job(self, frame: DataFrame) -> str:
        if self.asked.job:
            return jobs.named(NAME, self.asked.job)
        return jobs.number_of(NAME, self._request(), jobs.seen(self._inputs(frame)))

    def _inputs(self, frame: DataFrame) -> Iterable[str]:
        """Files that the frame reads, as far as Spark tells."""
        if self.asked.format == "aof2":
            return [str(path) for source in self.asked.sources for path in Path(source, ".segments").glob("*.idx")]
        return list(frame.inputFiles())

    def put(self, frame: DataFrame, job: str, target: Path) -> Done:
        if self.into == "parquet":
            return self._put_table(frame, job, target)
        stream = StreamTarget(self.session, str(target), self.mounted, self._write_options(), self.env)
        found: Brought = stream.put(frame, job, self.tell, overwrite=self.asked.overwrite)
        return Done(job, found.tally, found.before, found.where.first_offset, found.where.next_offset)

    def _write_options(self) -> dict[str, str]:
        conf = {"conf": self.mounted.conf} if self.mounted else {}
        return conf | dict(self.asked.write_options)

    def _put_table(self, frame: DataFrame, job: str, target: Path) -> Done:
        """A directory, by one rename."""
        with Workspace.opened(beside(target), self.env) as workspace:
            marker = marker_of(target)
            before = marker is not None
            if marker is None:
                if target.exists():
                    raise PipelineError(f"{target}: it is there already; name another, or move it away")
                marker = self._made(workspace, frame, job, target)
            if marker["job"] != job:
                raise PipelineError(
                    f"{target}: another job made it, from other files or by other options; name another"
                )
            workspace.end()
        return Done(job, Tally(marker["rows"], int(marker["checksum"], 16)), before)

    def _made(self, workspace: Workspace, frame: DataFrame, job: str, target: Path) -> dict[str, Any]:
        """Made and checked, unless a run before did; then in place."""
        marker = workspace.checked()
        if marker is None or marker["job"] != job:
            workspace.begin({"job": job})
            rows = tables.laid_out(frame, self.asked.layout)
            tally = tables.write(self.session, rows, workspace.new, self.asked.layout, self.tell)
            marker = {"job": job, "pipeline": NAME, "rows": tally.rows, "checksum": f"{tally.checksum:016x}"}
            workspace.check(marker)
        workspace.publish(target)
        return marker

    # -- saying

    def summary(self, total: Total, *, exit_code: int = 0) -> Summary:
        asked, last = self.asked, total.last
        checksum = f"{total.tally.checksum:016x}"
        report: dict[str, object] = {
            "pipeline": NAME,
            "target": asked.target,
            "into": self.into,
            "jobs": total.jobs,
            "jobs_before": total.before,
            "rows": total.tally.rows,
            "checksum": checksum,
        }
        facts = [("target", f"{asked.target} ({self.into})"), ("rows", str(total.tally.rows))]
        if asked.trigger:
            facts.append(("micro-batches", f"{total.jobs}" + (f", {total.before} done before" * bool(total.before))))
        elif last is not None:
            report["job"] = last.job
            facts.append(("job", last.job + ", done before: nothing was written" * last.before))
            if last.first_offset is not None:
                report |= {"first_offset": last.first_offset, "next_offset": last.next_offset}
                facts.append(("offsets", f"{last.first_offset} up to {last.next_offset}"))
        facts.append(("checksum", f"{checksum}, of what was read and of what is there"))
        return Summary(report, facts, exit_code=exit_code)


class _Growing:
    """A query whose micro-batches are jobs."""

    def __init__(self, work: _Ingestion) -> None:
        self._work = work
        self._total = Total()
        self._query_id = ""
        self._known = threading.Event()  # the query's own number: Spark tells when it has begun

    def run(self) -> Summary:
        work, asked = self._work, self._work.asked
        if not asked.checkpoint:
            raise PipelineError("name a folder by --checkpoint: it is what tells one micro-batch from another")
        if work.into == "parquet":
            Path(asked.target).mkdir(parents=True, exist_ok=True)
        writer = self._source().writeStream.option("checkpointLocation", asked.checkpoint)
        now = asked.trigger == AVAILABLE_NOW
        writer = writer.trigger(availableNow=True) if now else writer.trigger(processingTime=asked.trigger)
        query = writer.foreachBatch(self._batch).start()
        self._query_id = str(query.id)
        self._known.set()
        exit_code = 0
        try:
            query.awaitTermination()
        except KeyboardInterrupt:
            exit_code = 130
        finally:
            with contextlib.suppress(Exception):  # the error that ended it is on its way
                query.stop()
        return work.summary(self._total, exit_code=exit_code)

    def _source(self) -> DataFrame:
        """Spark wants the schema of files that come; those that are there tell it."""
        work, asked = self._work, self._work.asked
        reader = work.session.readStream
        if not asked.schema and asked.format in FILE_FORMATS and asked.format != "text":
            reader = reader.schema(work.reader(work.session.read).schema)
        return work.selected(work.reader(reader))

    def _batch(self, frame: DataFrame, number: int) -> None:
        self._known.wait()
        work = self._work
        job = f"{NAME}-{self._query_id}-{number}"
        target = Path(work.asked.target)
        done = work.put(frame, job, target if work.into == "records" else target / f"batch={number}")
        self._total.add(done)
        work.tell("rows", self._total.tally.rows, 0, "rows")
