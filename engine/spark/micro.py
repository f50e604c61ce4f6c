"""Aof2StreamReader: `spark.readStream.format("aof2")`.

An offset of Spark's is, for each stream, the logical offset before which everything was read: `{"<path>": 4096}`. It is
always the beginning of a record, or the end of the last one that is sealed. The same two offsets name the same records
for ever, since segments are sealed: with a checkpoint each record is in exactly one micro-batch, whatever is killed.

Invariants
- latestOffset never goes backwards, and never past what is sealed (with availableNow: what was sealed at the start).
- Records that a truncation took before they were read are an error, unless failOnDataLoss is false.

Owner: Spark's runner of the query calls everything but `read` in one process. Crash: it writes nothing; Spark's
checkpoint knows where to go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from aof2.engine.errors import Aof2Error
from aof2.engine.spark.batch import Aof2Partition, read_partition
from aof2.engine.spark.columns import check_schema
from aof2.engine.spark.filters import Bounds, Span
from aof2.engine.spark.options import ReadOptions
from aof2.engine.spark.plan import partitions, ranges
from aof2.engine.spark.streams import IndexFile, Segment, StreamDirectory

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class DataLossError(Aof2Error):
    """Records are gone that were not read yet. Start with a new checkpoint, or with failOnDataLoss=false."""


class Aof2StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        check_schema(schema, options)
        self._schema = schema
        self._options = options
        self._streams = {path: StreamDirectory(path) for path in options.paths}
        self._target: dict[str, int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get it too, and need none of what was listed."""
        return self.__dict__ | {"_streams": {path: StreamDirectory(path) for path in self._options.paths}}

    # -- offsets

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {path: self._initial(stream) for path, stream in self._streams.items()}

    def _initial(self, stream: StreamDirectory) -> int:
        start = self._options.starting_offsets
        if start.isdecimal():
            return int(start)
        segments = stream.segments()
        if not segments:
            return 0
        return segments[0].base_offset if start == "earliest" else segments[-1].end_offset

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_records:
            return ReadMaxRows(self._options.max_records)
        if self._options.max_bytes:
            return ReadMaxBytes(self._options.max_bytes)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._ends()

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802
        return self._ends()

    def _ends(self) -> dict[str, int]:
        return {path: _end_of(stream.segments()) for path, stream in self._streams.items()}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        """A limit is shared out evenly among the streams; each goes on by a record at least."""
        share = len(self._streams)
        rows = max(1, limit.max_rows // share) if isinstance(limit, ReadMaxRows) else None
        size = max(1, limit.max_bytes // share) if isinstance(limit, ReadMaxBytes) else None
        found = {}
        for path, stream in self._streams.items():
            segments = stream.segments()
            at = self._resumed(path, start, segments)
            end = max(at, min(_end_of(segments), self._target[path] if self._target else _end_of(segments)))
            if rows is not None:
                end = min(end, _rows_on(segments, at, rows))
            if size is not None:
                end = min(end, _bytes_on(segments, at, size))
            found[path] = end
        return found

    def _resumed(self, path: str, start: dict[str, int], segments: list[Segment]) -> int:
        """Where to go on: as the checkpoint has it, past what is gone if that is allowed."""
        if path not in start:
            return self._initial(self._streams[path])
        at = start[path]
        following = next((s for s in segments if s.end_offset > at), None)
        if following is None or following.base_offset <= at:
            return at
        if self._options.fail_on_data_loss:
            what = f"records from offset {at} up to {following.base_offset} are gone"
            raise DataLossError(f"{path}: {what}; with failOnDataLoss=false they are passed over")
        return following.base_offset

    # -- micro-batches

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        found: list[InputPartition] = []
        for path, stop in end.items():
            if path not in self._streams:
                raise ValueError(f"the checkpoint is of another query: it has read {path}")
            segments = self._streams[path].segments()
            at = self._resumed(path, start, segments)
            if at < stop and _end_of(segments) < stop:
                raise DataLossError(f"{path}: it was read up to offset {stop}, and ends at {_end_of(segments)} now")
            pieces = ranges(segments, Bounds(Span(at, stop)), self._options.partition_bytes)
            found += map(Aof2Partition, partitions(pieces, self._options.partition_bytes))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._schema, self._options)

    def commit(self, end: dict[str, int]) -> None:
        """Nothing to do: the stream keeps what it has."""

    def stop(self) -> None:
        """Nothing is held open."""


def _end_of(segments: list[Segment]) -> int:
    return segments[-1].end_offset if segments else 0


def _rows_on(segments: list[Segment], at: int, rows: int) -> int:
    """Where the record begins that comes `rows` records behind the one at `at`, or the first that is not at `at`."""
    for segment in segments:
        if segment.end_offset <= at:
            continue
        with IndexFile(segment) as index:
            first = index.find(at)
            stop = max(first + rows, index.find(at + 1))  # empty records share an offset with what follows them
            if stop < segment.record_count:
                return index.logical_offset(stop)
        rows -= segment.record_count - first
        if rows <= 0:
            return segment.end_offset
    return _end_of(segments)


def _bytes_on(segments: list[Segment], at: int, size: int) -> int:
    """The last beginning of a record at most `size` behind `at`; where none is, the end of the record there."""
    limit = at + size
    inside = next((s for s in segments if s.end_offset > limit), None)
    if inside is None:
        return _end_of(segments)
    with IndexFile(inside) as index:
        begin = index.logical_offset(max(0, index.find(limit + 1) - 1))
    return begin if at < begin <= limit else _rows_on(segments, at, 1)
