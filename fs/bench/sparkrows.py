"""The rows of `aof2 bench spark`: Spark on the mount as on the disk, cold, and records by themselves.

The same session runs every job, in turns, on an idle machine unless a row says otherwise; what the mount has to upload
goes to the S3 server of the run meanwhile. Every scan is checked by what it found: wrong rows are a failure.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from aof2.fs.bench import appendloops, subject
from aof2.fs.bench.contestants import Bare, Contestant, Plan
from aof2.fs.bench.field import Field
from aof2.fs.bench.measure import Measurement, compared
from aof2.fs.bench.process import StepError
from aof2.fs.bench.race import QUIET_S_MAX
from aof2.fs.bench.sparkprocess import SparkProcess
from aof2.fs.bench.subject import Aof2
from aof2.fs.bench.verdict import BEST_PEER, Outcome, at_most

MIB: Final = 1 << 20
LINE_BYTES: Final = 272
SHORT_LINE_BYTES: Final = 256
ROW_BYTES: Final = 112  # of a row that Spark writes, before Parquet
SCANNED_FILES: Final = 4
PARTITIONED_FILES: Final = 400
WRITERS: Final = 4
COLD_SHARE: Final = 0.3  # of what is read, from the server, where it is compressed: less, and it was not cold
AGAIN_MAX: Final = 65_536.0  # the claim on the volume, 179 bytes, is looked up with each commit that goes to the remote
STREAMS: Final = "events"

HOT_TARGET: Final = 1 / 1.05
WRITE_TARGET: Final = 1 / 1.15
PARTITIONED_TARGET: Final = 1 / 1.3
DURABLE_MAX: Final = 1.0
COLD_TARGET: Final = 1 / 1.5
AGAINST_JSON: Final = 5.0
AGAINST_CEILING: Final = 0.9
APPEND_TARGET: Final = 0.4
LINES_MIN: Final = 50_000.0


class SparkPlan(Plan, frozen=True, kw_only=True):
    """`size` is what is scanned and appended, `rows` what is written."""

    rows: int = 1_000_000
    lines: int = 400_000


class SparkField(Field, frozen=True, kw_only=True):
    plan: SparkPlan
    bare: Bare
    spark: SparkProcess
    found: dict[str, Any] = msgspec.field(default_factory=dict)  # what a scan of some data gives, wherever it lies
    made: set[str] = msgspec.field(default_factory=set)


class StreamsAof2(Aof2):
    """The mount with a tenant of streams beside its files."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        kind = f'[tenants.{STREAMS}]\nkind = "append"\next = "jsonl"\nseal_after = "1h"\n'
        self.conf.write_text(self.conf.read_text() + kind)

    def stream(self, name: str) -> Path:
        path = self.mountpoint / STREAMS / name
        path.mkdir()
        return path

    def seal(self, stream: Path) -> None:
        self._aof2("seal", stream)


# -- scans


def _checked(f: SparkField, task: str, folder: Path, data: str) -> float:
    """Seconds of a scan that found what every other scan of the same data did."""
    answer = f.spark.ask(task, folder)
    expected = f.found.setdefault(f"{task} {data}", answer["found"])
    if answer["found"] != expected:
        raise StepError(f"{folder}: {task} found {answer['found']}, not {expected}")
    seconds: float = answer["seconds"]
    return seconds


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name[0] not in "._")


def _make(f: SparkField, c: Contestant, data: str) -> Path:
    """Lines, or Parquet files, in a folder of the contestant: the same for each. All of it in the remote."""
    folder = c.directory / data
    if f"{c.name} {data}" not in f.made:
        if data == "lines":
            arguments = (folder, f.plan.size, LINE_BYTES, SCANNED_FILES, 1)
            f.race.work("split_files", *arguments, script=appendloops.__file__)
        else:
            f.spark.ask("write_partitioned" if data == "partitioned" else "write", folder, f.plan.rows, 1)
        c.until_remote(folder)
        f.made.add(f"{c.name} {data}")
    return folder


SCANS: Final = (("json", "lines", "JSON"), ("text", "lines", "text"), ("parquet", "parquet", "Parquet"))


def hot(f: SparkField) -> list[Measurement]:
    """Scans of what is here, in the kernel's cache as far as that goes."""
    rows: list[Measurement] = []
    for task, data, name in SCANS:
        places = [f.disk, *f.subjects]

        def warm(c: Contestant, task: str = task, data: str = data) -> None:
            _checked(f, task, _make(f, c, data), data)

        f.race.each(warm, places)

        def attempt(c: Contestant, _: int, task: str = task, data: str = data) -> float:
            folder = c.directory / data
            with f.race.metering(c) as meter:
                seconds = _checked(f, task, folder, data)
                meter.units = _bytes_of(folder) / MIB
            return _bytes_of(folder) / seconds

        outcome = f.race.turns(attempt, places)
        rows += f.judge(f"{name} scan, hot", "B/s", outcome, {f.disk.name: HOT_TARGET})
    return rows


def cold(f: SparkField) -> list[Measurement]:
    """Scans after everything local was dropped, against a download and a scan of what came; then the same once more."""
    rows: list[Measurement] = []
    for task, data, name in (SCANS[0], SCANS[2], ("parquet", "partitioned", f"Parquet in {PARTITIONED_FILES} files")):

        def make(c: Contestant, data: str = data) -> None:
            _make(f, c, data)

        f.race.each(make, [*f.subjects, *f.peers, f.disk])
        _upload(f, data)
        again: list[float] = []
        outcome = f.race.turns(_cold(f, task, data, again), [*f.over_s3, f.bare])
        targets = {f.bare.name: COLD_TARGET} | ({BEST_PEER: 1.0} if data == "partitioned" else {})
        rows += f.judge(f"{name} scan, cold", "B/s", outcome, targets)
        if again:
            seen = Outcome({subject.NAME: max(again)})
            rows += at_most(
                f"{name} scan, once more: from the server", "B", seen, subject=subject.NAME, limit=AGAIN_MAX
            )
    return rows


def _upload(f: SparkField, data: str) -> None:
    """What the disk has, for boto3 to download."""
    server = f.bare.setup.server
    if f"{f.bare.name} {data}" not in f.made:
        where = (server.endpoint_url, f.bare.name, f"{data}/", f.disk.directory / data)
        f.race.work("uploads", *where, env=server.environ())
        f.made.add(f"{f.bare.name} {data}")


def _cold(f: SparkField, task: str, data: str, again: list[float]) -> Callable[[Contestant, int], float]:
    def attempt(c: Contestant, n: int) -> float:
        if isinstance(c, Bare):
            return _downloaded(f, c, task, data, n)
        folder = c.directory / data
        size = _bytes_of(folder)
        c.drop(folder)
        if isinstance(c, Aof2):  # what came with other files may be in its memory
            c.stop()
            c.start()
        os.sync()
        before = c.fetched_bytes() or 0
        with f.race.metering(c) as meter:
            seconds = _checked(f, task, folder, data)
            meter.units = size / MIB
        fetched = (c.fetched_bytes() or 0) - before
        if fetched < COLD_SHARE * size:
            raise StepError(f"{c.name} was not cold: {fetched:,} bytes came from the server")
        if isinstance(c, Aof2):
            _checked(f, task, folder, data)
            again.append((c.fetched_bytes() or 0) - before - fetched)
        return size / seconds

    return attempt


def _downloaded(f: SparkField, c: Bare, task: str, data: str, n: int) -> float:
    server, folder = c.setup.server, c.directory / f"{data}{n}"
    answer = f.race.work("downloads", server.endpoint_url, c.name, f"{data}/", folder, env=server.environ())
    seconds = answer["seconds"] + _checked(f, task, folder, data)
    size = _bytes_of(folder)
    f.race.processes.run(["rm", "-rf", folder], deadline_s=f.race.deadline_s)
    return size / seconds


# -- writes


def written(f: SparkField) -> list[Measurement]:
    """Parquet, plain and partitioned, on an idle mount and right after other output; and how soon it is durable."""
    rows: list[Measurement] = []
    plain, parts = "Parquet write", f"Parquet write, {PARTITIONED_FILES} files"
    kinds = (
        (plain, "write", False, WRITE_TARGET),
        (parts, "write_partitioned", False, PARTITIONED_TARGET),
        (f"{parts}, right after other output", "write_partitioned", True, PARTITIONED_TARGET),
    )
    for what, task, after_other, target in kinds:
        later: list[float] = []
        outcome = f.race.turns(_written(f, task, later, after_other=after_other), [f.disk, *f.subjects])
        rows += f.judge(what, "rows/s", outcome, {f.disk.name: target})
        if later:
            seen = Outcome({subject.NAME: statistics.median(later)})
            rows += at_most(f"{what}: durable", "× its time later", seen, subject=subject.NAME, limit=DURABLE_MAX)
    return rows


def _written(f: SparkField, task: str, later: list[float], *, after_other: bool) -> Callable[[Contestant, int], float]:
    def attempt(c: Contestant, n: int) -> float:
        folder = c.directory / f"{task}{int(after_other)}-{n}"
        seed = 1000 + 10 * n + after_other
        os.sync()
        if after_other:
            f.spark.ask("write", f"{folder}-other", f.plan.rows, seed + 5)
        with f.race.metering(c) as meter:
            answer = f.spark.ask(task, folder, f.plan.rows, seed)
            end = time.perf_counter()
            c.until_remote(folder)
            meter.units = f.plan.rows
        if isinstance(c, Aof2):
            later.append((time.perf_counter() - end) / answer["seconds"])
        f.race.processes.run(["rm", "-rf", folder, f"{folder}-other"], deadline_s=f.race.deadline_s)
        seconds: float = answer["seconds"]
        return f.plan.rows / seconds

    return attempt


# -- records


COUNTS: Final = ("count_aof2", "count_json", "count_prepared", "count_offsets")


def source(f: SparkField) -> list[Measurement]:
    """Records counted by `format("aof2")`, as JSON, and out of batches that were ready before."""
    mount, records = f.aof2, f.plan.size // LINE_BYTES
    if not isinstance(mount, StreamsAof2):
        return []
    what, unit = f'format("aof2") count of {records:,} records', "records/s"
    try:
        rates = _counted(f, mount, records)
    except (StepError, OSError) as e:
        return [Measurement(what=what, unit=unit, ok=False, note=str(e))]
    ours, as_json, ready, offsets = (statistics.median(rates[task]) for task in COUNTS)
    return [
        compared(what, unit, ours, "spark.read.json", as_json, at_least=AGAINST_JSON),
        compared(what, unit, ours, "ready batches", ready, at_least=AGAINST_CEILING),
        compared(f'{what}, .schema("offset bigint")', unit, offsets, "spark.read.json", as_json),
    ]


def _counted(f: SparkField, mount: StreamsAof2, records: int) -> dict[str, list[float]]:
    """Rates of each way to count, in turns."""
    stream = mount.stream("counted")
    appended = ("lines", stream / "_append", records * LINE_BYTES, LINE_BYTES, MIB, 0, 1)
    f.race.work(*appended, script=appendloops.__file__)
    mount.seal(stream)
    partitions = f.spark.ask("partitions_aof2", stream)["found"]
    arguments: dict[str, tuple[object, ...]] = dict.fromkeys(COUNTS, (stream,))
    arguments["count_prepared"] = (records, LINE_BYTES, partitions)
    rates: dict[str, list[float]] = {task: [] for task in COUNTS}
    for n in range(f.plan.rounds):
        for task in COUNTS if n % 2 == 0 else reversed(COUNTS):
            f.race.processes.quiet(QUIET_S_MAX)
            answer = f.spark.ask(task, *arguments[task])
            if answer["found"] != records:
                raise StepError(f"{task} counted {answer['found']} of {records} records")
            rates[task].append(records / answer["seconds"])
    return rates


def ingest(f: SparkField) -> list[Measurement]:
    """`_append` against a file opened with O_APPEND."""
    script = appendloops.__file__

    def place(c: Contestant, name: str) -> Path:
        return c.stream(name) / "_append" if isinstance(c, StreamsAof2) else c.directory / name

    def large(c: Contestant, n: int) -> float:
        path = place(c, f"large{n}")
        os.sync()
        with f.race.metering(c) as meter:
            answer = f.race.work("lines", path, f.plan.size, LINE_BYTES, MIB, n, 0, script=script)
            meter.units = answer["bytes"] / MIB
        return answer["bytes"] / answer["seconds"]

    def short(c: Contestant, n: int) -> float:
        path = place(c, f"short{n}")
        os.sync()
        with f.race.metering(c) as meter:
            answer = f.race.work("by_processes", path, WRITERS, f.plan.lines, SHORT_LINE_BYTES, script=script)
            meter.units = answer["count"]
        return answer["count"] / answer["seconds"]

    who = [f.disk, *f.subjects]
    rows = f.judge("append by 1 MiB", "B/s", f.race.turns(large, who), {f.disk.name: APPEND_TARGET})
    what = f"append by lines of {SHORT_LINE_BYTES} bytes, {WRITERS} processes"
    outcome = f.race.turns(short, who)
    rows += f.judge(what, "lines/s", outcome, {})
    if subject.NAME in outcome.rates or subject.NAME in outcome.failures:
        rate = outcome.rates.get(subject.NAME)
        ok = rate is not None and rate >= LINES_MIN
        text = f"at least {LINES_MIN:,.0f}"
        note = outcome.failures.get(subject.NAME, "")
        rows.append(
            Measurement(what=what, unit="lines/s", value=rate, target=LINES_MIN, target_text=text, ok=ok, note=note)
        )
    return rows


ROWS: Final[dict[str, Callable[[SparkField], list[Measurement]]]] = {
    "hot": hot,
    "written": written,
    "cold": cold,
    "source": source,
    "ingest": ingest,
}
