"""`aof2 spark manifest`: the manifest log as DataFrames, and what operators ask of it.

    driver: which chunks and bundles ──► tasks: records, names ──► by segment: fold ──► tables, as Parquet with `out`

    records    a row a record of every stream              segments   what became of each segment
    tiers      by hour: bytes per tier, movements, uses    heat       by directory and hour
    returns    evicted and fetched again, by segment       requests   what the remote was asked, and what it costs

A task reads its part of the log from the remote, or from a folder that it sees, and folds by the code that
`aof2 report` uses (`engine/history`); so both have the same numbers.

Owner: the driver's main thread. Crash: tables of `out` that are half written; run it again, it writes them anew.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from aof2.engine.env import Env
from aof2.engine.history import parts, units
from aof2.engine.history.cost import Prices, cost_of
from aof2.engine.history.fold import QUICK_MS, TIERS
from aof2.engine.history.heat import GONE
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.spark.pipelines.seam import PipelineError, Summary, Tell, watched
from aof2.engine.units import format_size

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

NAME: Final = "manifest"
TASK_BYTES: Final = 8 << 20
TASKS_A_CORE: Final = 3
HOTTEST: Final = 10
TABLES: Final = ("records", "segments", "tiers", "heat", "returns", "requests")
# What the fold looks at: all but openings, and commits of rows.
_FOLDED: Final = "type_id between 1 and 13 or type_id >= 1000 or schema_id in (2, 3) or sample is not null"


@dataclass(frozen=True, slots=True)
class Arguments:
    """The log: of a remote, or of a folder that every worker sees. `out`: where tables go, "" for nowhere."""

    remote: RemoteSettings | None
    folder: str = ""
    out: str = ""
    prices: Prices = field(default_factory=Prices)


def run(session: SparkSession, arguments: Arguments, tell: Tell) -> Summary:
    """The tables, and a summary of them."""
    tell("logs", 0, 0)
    log = LogFrames(session, arguments)
    with watched(session, tell, "manifest"):
        facts = log.facts().cache()
        try:
            records = log.records().where("type_id < 1000")
            asked = _ask(records, facts, arguments.prices)
            tables = _tables(session, log, records, facts, asked)
            for name in TABLES if arguments.out else ():
                tables[name].write.mode("overwrite").parquet(f"{arguments.out.rstrip('/')}/{name}")
            report = _report(asked, tables["heat"], arguments.out)
        finally:
            facts.unpersist()
    return Summary(report=report, facts=_facts(report))


# -- the log as frames


class LogFrames:
    """The log's units over the cluster, and what is read of them."""

    def __init__(self, session: SparkSession, arguments: Arguments) -> None:
        self._session = session
        self._remote = arguments.remote
        self._units = list(_units(arguments))
        if not self._units:
            raise PipelineError("there is no log there; is it the right url, or folder?")

    def _cut(self) -> DataFrame:
        """Units, about as many bytes a task; a stream's neighbours stay together."""
        total = sum(unit.size for unit in self._units)
        cores = self._session.sparkContext.defaultParallelism
        limit = min(TASK_BYTES, total // (cores * TASKS_A_CORE) + 1)
        tasks: list[list[units.Unit]] = [[]]
        size = 0
        for unit in self._units:
            if size >= limit:
                tasks.append([])
                size = 0
            tasks[-1].append(unit)
            size += unit.size
        rows = self._session.sparkContext.parallelize([(pickle.dumps(task),) for task in tasks], len(tasks))
        return self._session.createDataFrame(rows, "units binary")

    def records(self) -> DataFrame:
        """A row a record, and what a snapshot says there was before the first."""
        return self._cut().mapInArrow(partial(_read, self._remote, units.records_of), units.RECORDS_SCHEMA)

    def names(self) -> DataFrame:
        """The newest of what commits say of each segment, inode and tenant."""
        from pyspark.sql import functions as f

        rows = self._cut().mapInArrow(partial(_read, self._remote, units.names_of), units.NAMES_SCHEMA)
        newest = f.max_by(f.struct("parent", "name", "is_directory"), "ordinal").alias("it")
        return rows.groupBy("stream_id", "kind", "id").agg(newest).select("stream_id", "kind", "id", "it.*")

    def facts(self) -> DataFrame:
        """What came of the records: all of a segment's come to one task, in their order."""
        columns = ("stream_id", "ordinal", "chunk_offset", "type_id", "segment_id", "logical_offset", "timestamp_ms")
        rows = self.records().where(_FOLDED).select(*columns, "schema_id", "value", "key", "sample")
        ordered = rows.repartition("stream_id", "segment_id").sortWithinPartitions("stream_id", "ordinal", "type_id")
        return ordered.mapInArrow(parts.fold_part, parts.FACTS_SCHEMA)


def _units(arguments: Arguments) -> Iterator[units.Unit]:
    if arguments.folder:
        folder = Path(arguments.folder)
        if not folder.is_dir():
            raise PipelineError(f"{folder}: no such folder; name the one that holds a folder for each stream")
        yield from units.local_units(folder)
        return
    if arguments.remote is None:
        raise PipelineError("name the remote, or a folder")
    directory = arguments.remote.directory
    if directory is not None and not directory.is_dir():
        raise PipelineError(f"{directory}: no such folder; is it the right url, and its disk mounted?")
    with contextlib.closing(open_remote(Env(), arguments.remote)) as store:
        yield from units.remote_units(store)


def _read(remote: RemoteSettings | None, of: Any, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a task: its units, one after the other."""
    store = _store(msgspec.json.encode(remote)) if remote is not None else None
    for batch in batches:
        for packed in batch.column(0).to_pylist():
            for unit in pickle.loads(packed):  # noqa: S301 (made by this driver)
                yield from of(unit, store)


@lru_cache(maxsize=4)
def _store(remote: bytes) -> RemoteStore:
    return open_remote(Env(), msgspec.json.decode(remote, type=RemoteSettings))


# -- tables


def _tables(
    session: SparkSession, log: LogFrames, records: DataFrame, facts: DataFrame, asked: _Asked
) -> dict[str, DataFrame]:
    from pyspark.sql import functions as f

    hour = f.timestamp_millis("hour_ms").alias("hour")
    named = f.sum("amount").alias("amount")
    tiers = facts.where("what = 'tier'").groupBy(hour, "name").agg(named)
    returns = facts.where("what = 'returns'").select("stream_id", f.col("id").alias("segment_id"), "amount")
    return {
        "records": records.drop("sample").withColumn("time", f.timestamp_millis("timestamp_ms")),
        "segments": _segments(records),
        "tiers": tiers,
        "heat": _heat(session, log.names(), facts),
        "returns": returns.withColumnRenamed("amount", "returns"),
        "requests": session.createDataFrame(
            [(name, float(amount)) for name, amount in asked.requests.items()], "name string, amount double"
        ),
    }


def _segments(records: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    def count(label: str) -> Any:
        return f.count_if(f.col("type") == label)

    def last(label: str, of: str) -> Any:
        return f.max_by(f.when(f.col("type") == label, f.col(of)), f.when(f.col("type") == label, f.col("ordinal")))

    about = records.where("segment_id <> -1 and (type_id <> 15 or schema_id in (2, 3))")
    return about.groupBy("stream_id", "segment_id").agg(
        f.timestamp_millis(f.min("timestamp_ms")).alias("first"),
        f.timestamp_millis(f.max("timestamp_ms")).alias("last"),
        last("SealSegment", "value").alias("sealed_bytes"),
        last("UploadDone", "key").alias("key"),
        count("UploadDone").alias("uploads"),
        count("HydrationStarted").alias("misses"),
        count("HydrationDone").alias("hydrations"),
        count("LocalEvicted").alias("evictions"),
        (f.count_if(f.col("schema_id") == 3) > 0).alias("retired"),
    )


def _heat(session: SparkSession, names: DataFrame, facts: DataFrame) -> DataFrame:
    """By directory and hour."""
    from pyspark.sql import functions as f

    names = names.cache()
    directories = session.createDataFrame(_directories(names), "stream_id int, parent bigint, directory string")
    inodes = names.where("kind = 'inode'").select("stream_id", f.col("id").alias("ino"), "parent")
    segments = names.where("kind = 'segment'").select("stream_id", f.col("id"), f.col("parent").alias("ino"))
    tenants = names.where("kind = 'tenant'").select(
        f.col("id").cast("int").alias("stream_id"), f.col("name").alias("tenant")
    )
    moved = facts.where("what = 'heat'").join(segments, ["stream_id", "id"], "left")
    opened = facts.where("what = 'opens'").withColumn("ino", f.col("id"))
    placed = moved.unionByName(opened).join(inodes, ["stream_id", "ino"], "left")
    placed = placed.join(f.broadcast(directories), ["stream_id", "parent"], "left")
    placed = placed.join(f.broadcast(tenants), "stream_id", "left")
    tenant = f.coalesce("tenant", f.col("stream_id").cast("string"))
    path = f.coalesce("directory", f.concat(tenant, f.lit(f"/{GONE}"))).alias("directory")

    def sums(name: str) -> Any:
        return f.sum(f.when(f.col("fact") == name, f.col("amount")).otherwise(0)).alias(name)

    rows = placed.select(path, f.timestamp_millis("hour_ms").alias("hour"), f.col("name").alias("fact"), "amount")
    return rows.groupBy("directory", "hour").agg(*(sums(n) for n in ("opens", "misses", "fetched_bytes", "evictions")))


def _directories(names: DataFrame) -> list[tuple[int, int, str]]:
    """The path of each directory, in the driver: there are far fewer of them than files."""
    rows = names.where("kind = 'tenant' or (kind = 'inode' and is_directory)").collect()
    tenants = {row["id"]: row["name"] for row in rows if row["kind"] == "tenant"}
    known = {(row["stream_id"], row["id"]): (row["parent"], row["name"]) for row in rows if row["kind"] == "inode"}

    def path(stream_id: int, ino: int) -> str:
        found: list[str] = []
        met: set[int] = set()
        while (slot := known.get((stream_id, ino))) is not None and slot[1] and ino not in met:
            met.add(ino)
            found.append(slot[1])
            ino = slot[0]
        return "/".join([tenants.get(stream_id, str(stream_id)), *reversed(found)])

    return [(stream_id, ino, path(stream_id, ino)) for stream_id, ino in known]


class _Asked(NamedTuple):
    """What a query of each frame said: the sums of the facts, the counts of the records."""

    sums: dict[str, dict[str, int]]  # of what → by name
    records: int
    from_ms: int
    to_ms: int
    requests: dict[str, float]


def _ask(records: DataFrame, facts: DataFrame, prices: Prices) -> _Asked:
    """Two jobs: one over the facts, one over the records. An object that was put is one request, however many segments
    it was of."""
    from pyspark.sql import functions as f

    sums: dict[str, dict[str, int]] = {}
    grouped = facts.where("what not in ('heat', 'opens')").groupBy("what", "name")
    for row in grouped.agg(f.sum("amount").alias("amount")).collect():
        sums.setdefault(row["what"], {})[row["name"]] = row["amount"]
    kinds = records.groupBy("type", "key_kind").agg(
        f.count("*").alias("records"),
        f.count_distinct("stream_id", "key").alias("keys"),
        f.min("timestamp_ms").alias("first_ms"),
        f.max("timestamp_ms").alias("last_ms"),
    )
    rows = kinds.collect()
    requests = {f"put_{row['key_kind']}": row["keys"] for row in rows if row["type"] == "UploadDone"}
    requests["delete"] = sum(row["keys"] for row in rows if row["type"] == "Tier2Deleted")
    requests["put_failed"] = sum(row["records"] for row in rows if row["type"] == "UploadFailed")
    moved = sums.get("tier", {})
    requests["get"] = moved.get("misses", 0)
    cost = cost_of(requests, moved.get("hydrated_bytes", 0), moved.get("remote_bytes", 0), prices)
    dollars = {name: value for name, value in msgspec.structs.asdict(cost).items() if "dollars" in name}
    return _Asked(
        sums,
        sum(row["records"] for row in rows),
        min((row["first_ms"] for row in rows), default=0),
        max((row["last_ms"] for row in rows), default=0),
        {**dict(sorted(requests.items())), **dollars},
    )


# -- the summary


def _report(asked: _Asked, heat: DataFrame, out: str) -> dict[str, Any]:
    from pyspark.sql import functions as f

    moved, uses = asked.sums.get("tier", {}), asked.sums.get("uses", {})
    sums = (f.sum(name).alias(name) for name in ("opens", "misses", "fetched_bytes", "evictions"))
    warmest = (f.col("opens") + f.col("misses")).desc()
    hottest = heat.groupBy("directory").agg(*sums).orderBy(warmest, "directory").limit(HOTTEST).collect()
    return {
        "records": asked.records,
        "from_ms": asked.from_ms,
        "to_ms": asked.to_ms,
        "tiers": {name: moved.get(f"{name}_bytes", 0) for name in TIERS},
        "totals": {n: v for n, v in sorted(moved.items()) if n.removesuffix("_bytes") not in TIERS},
        "returned": asked.sums.get("returned", {}),
        "uses": uses.get("uses", 0),
        "missed": uses.get("missed", 0),
        "hit_rate": 1 - uses["missed"] / uses["uses"] if uses.get("uses") else None,
        "requests": asked.requests,
        "hottest": [row.asDict() for row in hottest],
        "out": out,
    }


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    totals, rate = report["totals"], report["hit_rate"]
    minutes = QUICK_MS // 60_000
    facts = [
        ("records", f"{report['records']}"),
        *((f"{tier} bytes", format_size(size)) for tier, size in report["tiers"].items()),
        ("misses", f"{totals.get('misses', 0)}, {format_size(totals.get('hydrated_bytes', 0))} fetched"),
        ("evictions", f"{totals.get('evictions', 0)}, {format_size(totals.get('evicted_bytes', 0))}"),
        ("thrash", f"{totals.get('quick_returns', 0)} fetched again within {minutes} minutes"),
        ("hit rate", f"{100 * rate:.1f} % of {report['uses']} open(s)" if rate is not None else "no open noted"),
        *(
            ("hot", f"{one['directory']}: {one['opens']} open(s), {one['misses']} miss(es)")
            for one in report["hottest"]
        ),
    ]
    return [*facts, ("tables", report["out"])] if report["out"] else facts
