"""`aof2 spark compact`: many segments of a stream, or many small files of Parquet, into few large ones.

    stream ──► Parquet       `compact_stream.py`: what is sealed since the last run, as the directory `run=OFFSET`
    stream ──► a stream      `compact_records.py`: the same as larger segments of another stream
    files  ──► Parquet       `compact_files.py`: a directory of Parquet, into another or in place

Invariants
- What was read is what is there, by count and checksum, before it is in place; it comes into place by one step.
- Sources go only when that was asked for, and when the result is in the remote.

Owner: the driver. Crash: a workspace beside the result; the next run of the same command goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aof2.engine.env import Env
from aof2.engine.spark.pipelines.reconcile import Tally
from aof2.engine.spark.pipelines.seam import PipelineError, Summary, Tell, silent
from aof2.engine.spark.pipelines.tables import Layout
from aof2.engine.spark.pipelines.work import Work

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME: Final = "compact"
CRASH_POINTS: Final = ("compact.durable", "compact.removed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """`target`: "" for in place. `schema`: what a record's JSON has; then `record` is a column, too, that `select` may
    name. `checkpoint`: for records only, how far the source was read."""

    source: str
    target: str = ""
    into: str = ""
    schema: str = ""
    select: Sequence[str] = ()
    layout: Layout = field(default_factory=Layout)
    remove_sources: bool = False
    skip_gap: bool = False
    checkpoint: str = ""
    conf: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a run did: rows that it brought, sources and results by files and bytes; what went afterwards."""

    tally: Tally = field(default_factory=Tally)
    result: str = ""
    files_before: int = 0
    bytes_before: int = 0
    files_after: int = 0
    bytes_after: int = 0
    removed: int = 0
    notes: tuple[str, ...] = ()


class Compaction(Work[Arguments]):
    """A run of any of the three."""

    def until_durable(self, path: Path) -> None:
        """In the remote, where it is in the mount; it was synced before it had its name."""
        if self.mounted is not None and self.mounted.inside(str(path)) is not None:
            self.tell("durable", 0, 0)
            self.mounted.wait(str(path))
        self.env.failpoint("compact.durable")


def run(session: SparkSession, arguments: Arguments, tell: Tell = silent, env: Env | None = None) -> Summary:
    """Everything there is now; what comes meanwhile is the next run's."""
    work = Compaction(session, arguments, tell, env or Env())
    source = Path(arguments.source)
    if not source.is_dir():
        raise PipelineError(f"{source}: no such directory; name a stream, or a directory of Parquet")
    return _summary(arguments, _kind(work, source)(work))


def _kind(work: Compaction, source: Path) -> Any:
    from aof2.engine.spark.pipelines import compact_files, compact_records, compact_stream
    from aof2.engine.spark.pipelines.records import is_stream

    asked = work.asked
    into_stream = bool(asked.target) and work.mounted is not None and work.mounted.holds_streams(asked.target)
    into = asked.into or ("records" if into_stream else "parquet")
    if not is_stream(source):
        if into == "records":
            raise PipelineError(f"{source}: files become records by `aof2 spark ingest`, not by compact")
        return compact_files.compact
    if not asked.target:
        raise PipelineError(f"{source}: a stream is not compacted in place, its offsets would change; name a TARGET")
    return compact_records.compact if into == "records" else compact_stream.compact


def _summary(asked: Arguments, done: Done) -> Summary:
    report: dict[str, object] = {
        "pipeline": NAME,
        "source": asked.source,
        "target": asked.target or asked.source,
        "result": done.result,
        "rows": done.tally.rows,
        "checksum": f"{done.tally.checksum:016x}",
        "files_before": done.files_before,
        "bytes_before": done.bytes_before,
        "files_after": done.files_after,
        "bytes_after": done.bytes_after,
        "removed": done.removed,
        "notes": list(done.notes),
    }
    facts = [
        ("source", asked.source),
        ("result", done.result or "nothing to do"),
        ("rows", str(done.tally.rows)),
        ("checksum", f"{done.tally.checksum:016x}, of what was read and of what is there"),
        ("before", f"{done.files_before} file(s), {done.bytes_before} bytes"),
        ("after", f"{done.files_after} file(s), {done.bytes_after} bytes"),
        ("removed", f"{done.removed} source(s)"),
    ]
    return Summary(report, facts, complaints=done.notes)
