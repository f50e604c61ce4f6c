"""Frames as Parquet: zstd, partitioned, files of about a size; written and read back with count and checksum.

Owner: the driver; tasks write. Crash: part of a directory, which is its workspace's to remove.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aof2.engine.spark.pipelines.reconcile import Observed, Tally, counted
from aof2.engine.spark.pipelines.seam import PipelineError, Tell, watched

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FILE_BYTES: Final = 128 << 20
_COLUMN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_SETTINGS: Final = {"spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS"}


@dataclass(frozen=True, slots=True)
class Layout:
    """`partition_by`: columns, or `name=expression`. `rebalance`: rows of a partition come together in one task, unless
    they are more than `file_bytes`."""

    partition_by: tuple[str, ...] = ()
    file_bytes: int = FILE_BYTES
    rebalance: bool = True


def partition_names(layout: Layout) -> list[str]:
    return [text.partition("=")[0].strip() for text in layout.partition_by]


def computed(layout: Layout) -> list[str]:
    """The SQL of partition columns that are no columns yet."""
    found = []
    for text in layout.partition_by:
        name, equals, expression = (part.strip() for part in text.partition("="))
        if equals:
            if not _COLUMN.fullmatch(name):
                raise PipelineError(f"--partition-by {text}: {name!r} is no name for a column")
            found.append(f"{expression} as `{name}`")
    return found


def laid_out(frame: DataFrame, layout: Layout) -> DataFrame:
    """With its partition columns, the computed ones too, behind all others."""
    if expressions := computed(layout):
        frame = frame.selectExpr("*", *expressions)
    for name in partition_names(layout):
        if frame.columns.count(name) != 1:
            why = "there are two such columns" if name in frame.columns else "there is no such column"
            raise PipelineError(f"--partition-by {name}: {why} among {', '.join(frame.columns)}")
    names = partition_names(layout)
    rest = [name for name in frame.columns if name not in names]
    if not rest:
        raise PipelineError("--partition-by names every column; one at least must be left for the files")
    return frame.select(*(f"`{name}`" for name in [*rest, *names]))


def write(session: SparkSession, frame: DataFrame, folder: Path, layout: Layout, tell: Tell) -> Tally:
    """Rows of a frame that was `laid_out`, in a folder that is not there. What was read is what is there after it."""
    from pyspark.sql import functions as f

    names = partition_names(layout)
    _check_named(frame, names)
    observed = Observed(frame)
    out = observed.frame
    if names and layout.rebalance:
        out = out.hint("rebalance", *(f.col(f"`{name}`") for name in names))
    sizes = ("spark.sql.adaptive.advisoryPartitionSizeInBytes", "spark.sql.files.maxPartitionBytes")
    settings = _SETTINGS | dict.fromkeys(sizes, str(layout.file_bytes))
    with configured(session, settings):
        with watched(session, tell, "write"):
            out.write.partitionBy(*names).option("compression", "zstd").parquet(str(folder))
        with watched(session, tell, "check"):
            there = counted(read_back(session, frame, [str(folder)]))
            read = observed.agreed(there)
    if read != there:
        raise PipelineError(f"{folder}: {read} were read, {there} are there; {_hint(names)}")
    return there


def _hint(names: Sequence[str]) -> str:
    if not names:
        return "nothing was published"
    return f"nothing was published; directory names cannot tell an empty {' or '.join(names)} from none"


def _check_named(frame: DataFrame, names: Sequence[str]) -> None:
    """A partition's value is spelled in a directory's name and read back with the column's type."""
    plain = ("string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "boolean", "decimal")
    for name in names:
        kind = frame.schema[name].dataType.simpleString()
        if not kind.startswith(plain):
            raise PipelineError(f"--partition-by {name}: {kind} makes no directory names; cast it to another")


def read_back(session: SparkSession, like: DataFrame, paths: Sequence[str]) -> DataFrame:
    """Files as rows of the same columns."""
    return session.read.schema(like.schema).parquet(*paths).select(*(f"`{name}`" for name in like.columns))


class configured:  # noqa: N801  # a context manager, used as a function
    """Settings of a session while something runs; what they were comes back."""

    def __init__(self, session: SparkSession, settings: Mapping[str, str]) -> None:
        self._conf = session.conf
        self._settings = settings
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        for key, value in self._settings.items():
            self._before[key] = self._conf.get(key, None)
            self._conf.set(key, value)

    def __exit__(self, *exc: object) -> None:
        for key, value in self._before.items():
            if value is None:
                self._conf.unset(key)
            else:
                self._conf.set(key, value)


def files_of(folder: Path) -> list[Path]:
    """Data files below, as Spark sees them."""
    found = (path for path in sorted(folder.rglob("*")) if not _hidden(path.relative_to(folder)))
    return [path for path in found if path.is_file()]


def _hidden(path: Path) -> bool:
    return any(part[0] == "." or (part[0] == "_" and "=" not in part) for part in path.parts)
