"""Aof2Reader: `spark.read.format("aof2")`.

Spark refuses a reader that defines pushFilters in a session without `spark.sql.python.filterPushdown.enabled`, and does
not tell a source which it is. It pushes filters in a process of its own, whose module tells.

And it keeps the plan that it got there with the frame (seen with 4.3): `f.where("offset < 9").count()`, and after it
`f.count()`, give the same number where a source prunes. So filters prune only where the option `pushdown` asks for it,
and a frame that was loaded so is for one query. The options startingOffset, endingOffset, startingTimestamp and
endingTimestamp prune as well, and have no such edge.

Owner: made in Spark's planner, sent to its tasks: what it keeps can be pickled. Crash: it writes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from aof2.engine.spark.columns import arrow_schema, check_schema
from aof2.engine.spark.filters import Bounds
from aof2.engine.spark.options import ReadOptions
from aof2.engine.spark.plan import Range, partitions, ranges
from aof2.engine.spark.streams import StreamDirectory

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

PUSHING: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class Aof2Partition(InputPartition):
    """Ranges that one task reads, in order."""

    def __init__(self, found: tuple[Range, ...]) -> None:
        super().__init__(found)


def filters_are_pushed() -> bool:
    """Whether this process is the one in which Spark pushes filters down."""
    main = sys.modules.get("__main__")
    return PUSHING in sys.modules or getattr(getattr(main, "__spec__", None), "name", "") == PUSHING


def read_partition(partition: InputPartition, schema: StructType, options: ReadOptions) -> Iterator[pa.RecordBatch]:
    """What a task does, of a batch or of a micro-batch. An empty plan is one partition without a value."""
    from aof2.engine.spark.read import Request, read_range

    request = Request(arrow_schema(schema), options.mode, options.corrupt_column, verify=options.verify)
    for piece in partition.value or ():
        yield from read_range(piece, request)


class Aof2Reader(DataSourceReader):
    """Sealed records of one stream or several, those of a stream in order of their offsets within a partition."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        check_schema(schema, options)
        self._schema = schema
        self._options = options
        self._bounds = Bounds.of(options)

    def partitions(self) -> list[InputPartition]:
        found: list[InputPartition] = []
        for path in self._options.paths:
            pieces = ranges(StreamDirectory(path).segments(), self._bounds, self._options.partition_bytes)
            found += map(Aof2Partition, partitions(pieces, self._options.partition_bytes))
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._schema, self._options)


class Aof2PushingReader(Aof2Reader):
    """The same where filters narrow what is planned; Spark evaluates them again."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802
        self._bounds = self._bounds.narrowed(filters)
        return filters


def reader_of(schema: StructType, options: ReadOptions) -> Aof2Reader:
    return (Aof2PushingReader if options.pushdown and filters_are_pushed() else Aof2Reader)(schema, options)
