"""Frames as records of a stream: delivered as a job, read back from the stream with count and checksum.

A row becomes a record by its column `payload` (binary, as it is) or `value` (text, a newline behind it), with `ext_id`
and `flags` if they are there; a row of other columns becomes a line of JSON.

Invariants: a job's records are in the stream once, however often it is delivered (`engine/append/delivery.py`).

Owner: the driver; tasks stage. Crash: staged files, swept after a day; the job is in the stream whole, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aof2.engine.env import Env
from aof2.engine.spark.pipelines.mounted import Delivered, Mounted
from aof2.engine.spark.pipelines.reconcile import Observed, Tally, counted
from aof2.engine.spark.pipelines.seam import PipelineError, Tell, watched
from aof2.engine.spark.streams import StreamDirectory

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

CRASH_POINTS: Final = ("records.delivered",)
SCHEMA: Final = "payload binary, ext_id bigint, flags int"
GIVEN_BY_STREAM: Final = ("offset", "timestamp", "segment_id")


@dataclass(frozen=True, slots=True)
class Brought:
    """A job that is in the stream. `before`: it was, when this run came to it."""

    tally: Tally
    where: Delivered
    before: bool


@dataclass(frozen=True, slots=True)
class StreamTarget:
    """A stream, and the options that `format("aof2")` writes to it with."""

    session: SparkSession
    path: str
    mounted: Mounted | None
    options: Mapping[str, str]
    env: Env

    def put(self, frame: DataFrame, job: str, tell: Tell, *, overwrite: bool = False) -> Brought:
        """The frame's rows are in the stream, once, and were read back, when this returns."""
        records = as_records(frame)
        mounted = self._here()
        done = mounted.delivered(self.path, job)
        observed = None
        if done is None:
            observed = Observed(records)
            with watched(self.session, tell, "deliver"):
                writer = observed.frame.write.format("aof2").mode("overwrite" if overwrite else "append")
                writer.options(**self.options, job=job).save(self.path)
            self.env.failpoint("records.delivered")
            done = mounted.delivered(self.path, job) or Delivered(0, 0, 0)  # no rows are no job
        with watched(self.session, tell, "check"):
            there = self._there(done)
            read = there if there is None else observed.agreed(there) if observed else counted(records)
        if there is None:
            return Brought(Tally(done.records), done, before=True)
        if read != there or there.rows != done.records:
            raise PipelineError(
                f"{self.path}: {read} were read, {there} are there from offset {done.first_offset} up to"
                f" {done.next_offset}, as job {job}"
            )
        return Brought(there, done, before=observed is None)

    def _here(self) -> Mounted:
        if self.mounted is None:
            raise PipelineError(f"{self.path}: no mount.conf says which mount that is in; name it by --conf")
        return self.mounted

    def _there(self, done: Delivered) -> Tally | None:
        """None where the stream was truncated since."""
        if done.first_offset == done.next_offset:
            return Tally()
        segments = StreamDirectory(self.path).segments()
        if not segments or segments[0].base_offset > done.first_offset:
            return None
        reader = self.session.read.format("aof2").schema(SCHEMA)
        reader = reader.option("startingOffset", done.first_offset).option("endingOffset", done.next_offset)
        return counted(reader.load(self.path))


def as_records(frame: DataFrame) -> DataFrame:
    """Columns of `SCHEMA`."""
    from pyspark.sql import functions as f

    names = frame.columns
    if "payload" in names:
        payload = frame["payload"]
    elif "value" in names and frame.schema["value"].dataType.simpleString() == "string":
        payload = _line(frame["value"])
    elif "value" in names and frame.schema["value"].dataType.simpleString() == "binary":
        raise PipelineError("column value is binary: say how it becomes a record, as by --select 'value as payload'")
    else:
        payload = _line(f.to_json(f.struct(*(f"`{name}`" for name in names))))
    ext_id = frame["ext_id"].cast("bigint") if "ext_id" in names else f.lit(0).cast("bigint")
    flags = frame["flags"].cast("int") if "flags" in names else f.lit(0)
    return frame.select(
        payload.alias("payload"),
        f.coalesce(ext_id, f.lit(0)).alias("ext_id"),
        f.coalesce(flags, f.lit(0)).alias("flags"),
    )


def _line(text: Column) -> Column:
    from pyspark.sql import functions as f

    return f.concat(text, f.lit("\n")).cast("binary")


def is_stream(path: str | Path) -> bool:
    """Whether it is a directory that holds sealed segments."""
    return Path(path, ".segments").is_dir()
