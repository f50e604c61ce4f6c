"""Sealed segments of a stream into Parquet: each run brings what was sealed since the one before.

    <target>/run=<first offset>/[<partition>=<value>/…]part-….zstd.parquet, _aof2.json
    <target>/_compact.aof2/      the workspace

A run's directory begins at the offset at which the one before ended, and its marker says where it ends itself; so the
directories tell how far the stream was compacted, and no record is in two of them. Segments are taken whole.

Invariants
- Rows are counted three times: by the segments' own footers, while they are read, and in the files that were written.
- The stream is truncated only before the end of what is in place and in the remote.

Owner: the driver. Crash: `workspace.py` says. A run that was put into place and has not yet removed its sources does so
when it is run again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aof2.engine.spark.pipelines import tables
from aof2.engine.spark.pipelines.compact import Compaction, Done
from aof2.engine.spark.pipelines.reconcile import Tally
from aof2.engine.spark.pipelines.seam import PipelineError, watched
from aof2.engine.spark.pipelines.workspace import Workspace, marker_of
from aof2.engine.spark.streams import Segment, StreamDirectory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WORKSPACE: Final = "_compact.aof2"
_RUN: Final = re.compile(r"run=(0|[1-9][0-9]*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Span:
    """Segments that a run takes, one behind the other."""

    segments: tuple[Segment, ...]

    @property
    def first(self) -> int:
        return self.segments[0].base_offset

    @property
    def end(self) -> int:
        return self.segments[-1].end_offset

    @property
    def records(self) -> int:
        return sum(segment.record_count for segment in self.segments)

    @property
    def payload_bytes(self) -> int:
        return sum(segment.payload_bytes for segment in self.segments)


def compact(work: Compaction) -> Done:
    target = Path(work.asked.target)
    target.mkdir(parents=True, exist_ok=True)
    with Workspace.opened(target / WORKSPACE, work.env) as workspace:
        end = _end_of(target, work.asked.source)
        span, notes = _planned(work, end)
        done = Done(notes=notes)
        if span is not None:
            done, end = _run(work, workspace, span, target, notes)
        if work.asked.remove_sources and end is not None:
            done = _removed(work, target, end, done)
        workspace.end()
    return done


def _end_of(target: Path, source: str) -> int | None:
    """Where the last run in place ended; None before the first."""
    end: int | None = None
    for path in target.iterdir():
        found = _RUN.fullmatch(path.name)
        marker = marker_of(path) if found else None
        if marker is None:
            if path.name[0] not in "._":
                raise PipelineError(f"{path}: it is of no run of compact; name another TARGET")
            continue
        if marker.get("stream") != source:
            raise PipelineError(f"{target}: it is compacted from {marker.get('stream')}; name another TARGET")
        end = max(end or 0, marker["end"])
    return end


def _planned(work: Compaction, end: int | None) -> tuple[Span | None, tuple[str, ...]]:
    """What is sealed and not in place yet; None: nothing."""
    source = work.asked.source
    segments = StreamDirectory(source).segments()
    rest = tuple(segment for segment in segments if end is None or segment.base_offset >= end)
    if end is not None and segments and segments[-1].end_offset < end:
        last = segments[-1].end_offset
        raise PipelineError(
            f"{source}: it ends at offset {last}, and was compacted up to {end}: another stream has its name"
        )
    if not rest:
        return None, ()
    gap = f"{source}: records from offset {end} up to {rest[0].base_offset} went before they were compacted"
    if end is None or rest[0].base_offset == end:
        return Span(rest), ()
    if not work.asked.skip_gap:
        raise PipelineError(f"{gap}; --skip-gap goes on behind them")
    return Span(rest), (gap,)


def _run(work: Compaction, workspace: Workspace, span: Span, target: Path, notes: tuple[str, ...]) -> tuple[Done, int]:
    """What a run before this one checked is put into place as it is; else all of the span is read."""
    request = _request(work)
    place = target / f"run={span.first}"
    marker = workspace.checked()
    if marker is None or (marker["request"], marker["first"]) != (request, span.first):
        workspace.begin({"request": request, "first": span.first, "end": span.end})
        tally = _written(work, workspace, span)
        marker = {
            "pipeline": "compact",
            "stream": work.asked.source,
            "request": request,
            "first": span.first,
            "end": span.end,
            "rows": tally.rows,
            "checksum": f"{tally.checksum:016x}",
            "segments": len(span.segments),
            "payload_bytes": span.payload_bytes,
        }
        workspace.check(marker)
    workspace.publish(place)
    files = tables.files_of(place)
    done = Done(
        tally=Tally(marker["rows"], int(marker["checksum"], 16)),
        result=str(place),
        files_before=marker["segments"],
        bytes_before=marker["payload_bytes"],
        files_after=len(files),
        bytes_after=sum(path.stat().st_size for path in files),
        notes=notes,
    )
    return done, int(marker["end"])


def _request(work: Compaction) -> list[Any]:
    asked = work.asked
    return [asked.schema, list(asked.select), list(asked.layout.partition_by), asked.layout.file_bytes]


def _written(work: Compaction, workspace: Workspace, span: Span) -> Tally:
    layout = work.asked.layout
    plain = replace(layout, partition_by=tuple(tables.partition_names(layout)))
    frame = tables.laid_out(_rows(work, span), plain)
    tally = tables.write(work.session, frame, workspace.new, plain, work.tell)
    if tally.rows != span.records and not work.asked.select:  # an expression may make many rows of one
        raise PipelineError(
            f"{work.asked.source}: its segments have {span.records} records, {tally.rows} were read;"
            " --select 'record.*' takes each by itself"
        )
    return tally


def _rows(work: Compaction, span: Span) -> DataFrame:
    """Records as they are, or what their JSON says; and what the layout computes, of the record's own columns."""
    from pyspark.sql import functions as f

    asked = work.asked
    computed = tables.computed(asked.layout)
    lines = work.mounted is not None and work.mounted.holds_lines(asked.source)
    if asked.schema and not asked.select and not computed and lines:
        return _lines(work, span)
    frame: DataFrame = _records(work, span).load(asked.source)
    if asked.schema:
        text = frame["payload"].cast("string")
        frame = frame.withColumn("record", f.from_json(text, asked.schema, {"mode": "FAILFAST"}))
    return frame.selectExpr(*(asked.select or [("record.*" if asked.schema else "*")]), *computed)


def _records(work: Compaction, span: Span) -> Any:
    reader = work.session.read.format("aof2").option("partitionBytes", work.asked.layout.file_bytes)
    return reader.option("startingOffset", span.first).option("endingOffset", span.end)


def _lines(work: Compaction, span: Span) -> DataFrame:
    """Where only the JSON is wanted, Spark reads the payload files itself, which is twice as fast as record by record;
    every record's checksum is compared before, which is faster still. Sealed files do not change in between."""
    with watched(work.session, work.tell, "verify"):
        checked = _records(work, span).schema("offset bigint").option("verify", "true").load(work.asked.source).count()
    if checked != span.records:
        raise PipelineError(f"{work.asked.source}: its segments have {span.records} records, {checked} were checked")
    reader = work.session.read.schema(work.asked.schema).option("mode", "FAILFAST")
    reader = reader.option("lineSep", "\n").option("encoding", "UTF-8")
    return reader.json([segment.payload_path for segment in span.segments])


def _removed(work: Compaction, target: Path, end: int, done: Done) -> Done:
    """Segments that are in place and in the remote go."""
    if work.mounted is None:
        raise PipelineError("--remove-sources: no mount.conf says which mount the stream is in; name it by --conf")
    work.until_durable(target)
    gone = work.mounted.truncate(work.asked.source, end)
    work.env.failpoint("compact.removed")
    return replace(done, removed=gone["segments"])
