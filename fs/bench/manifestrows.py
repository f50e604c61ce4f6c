"""The row of `manifest`: records of a log, grouped and added up by Spark, against the same rows in Parquet.

The log lies in a folder of the disk, as the Parquet does; both give the same sums, or the row fails.
"""

from __future__ import annotations

import statistics
from typing import Final

from aof2.fs.bench import logloops
from aof2.fs.bench.measure import Measurement, compared
from aof2.fs.bench.process import StepError
from aof2.fs.bench.race import QUIET_S_MAX
from aof2.fs.bench.sparkrows import SparkField

AGAINST_PARQUET: Final = 1 / 5


def manifest(f: SparkField) -> list[Measurement]:
    what, unit = f"manifest: a scan of {f.plan.rows:,} records", "records/s"
    try:
        records, log, parquet = _rates(f)
    except (StepError, OSError) as e:
        return [Measurement(what=what, unit=unit, ok=False, note=str(e))]
    return [compared(what, unit, records / log, "Parquet of them", records / parquet, at_least=AGAINST_PARQUET)]


def _rates(f: SparkField) -> tuple[int, float, float]:
    """Records, and the seconds of each way, in turns."""
    folder, rows = f.disk.directory / "manifest", f.disk.directory / "manifest-parquet"
    f.race.work("write_log", folder, f.plan.rows, script=logloops.__file__)
    f.spark.ask("manifest_to_parquet", folder, rows)
    seconds: dict[str, list[float]] = {"manifest_log": [], "manifest_parquet": []}
    found = set()
    for n in range(f.plan.rounds):
        for way in sorted(seconds, reverse=bool(n % 2)):
            f.race.processes.quiet(QUIET_S_MAX)
            answer = f.spark.ask(way, folder if way == "manifest_log" else rows)
            seconds[way].append(answer["seconds"])
            found.add(tuple(answer["found"]))
    if len(found) != 1:
        raise StepError(f"the log and its Parquet differ: {sorted(found)}")
    records = next(iter(found))[0]
    return records, *(statistics.median(seconds[way]) for way in ("manifest_log", "manifest_parquet"))
