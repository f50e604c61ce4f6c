"""The row of `verify`: executors of local[2] against two threads, over the same blobs in the run's server.

Both bring the logs here first, which is in the time of both.
"""

from __future__ import annotations

import statistics
from typing import Final

from aof2.fs.bench import appendloops, logloops
from aof2.fs.bench.measure import Measurement, compared
from aof2.fs.bench.process import StepError
from aof2.fs.bench.race import QUIET_S_MAX
from aof2.fs.bench.sparkrows import SparkField

AGAINST_THREADS: Final = 0.9
THREADS: Final = 2
FILES: Final = 4


def verify(f: SparkField) -> list[Measurement]:
    what, unit = "verify of the remote, local[2]", "bytes/s"
    if f.aof2 is None:
        return []
    try:
        ours, threads = _rates(f)
    except (StepError, OSError) as e:
        return [Measurement(what=what, unit=unit, ok=False, note=str(e))]
    return [compared(what, unit, ours, f"{THREADS} threads", threads, at_least=AGAINST_THREADS)]


def _rates(f: SparkField) -> tuple[float, float]:
    """Bytes a second by Spark and by threads, in turns."""
    mount = f.aof2
    if mount is None:
        raise StepError("there is no mount")
    folder = mount.directory / "verified"
    f.race.work("split_files", folder, f.plan.size, 272, FILES, 1, script=appendloops.__file__)
    mount.until_remote(folder)
    rates: dict[str, list[float]] = {"spark": [], "threads": []}
    for n in range(f.plan.rounds):
        for way in sorted(rates, reverse=bool(n % 2)):
            f.race.processes.quiet(QUIET_S_MAX)
            if way == "spark":
                answer = f.spark.ask("verify_remote", mount.conf)
                size, wrong = answer["found"]
                seconds = answer["seconds"]
            else:
                told = f.race.work("verify_on_threads", mount.conf, THREADS, script=logloops.__file__)
                size, wrong, seconds = told["bytes"], told["wrong"], told["seconds"]
            if wrong or not size:
                raise StepError(f"{way}: {size} bytes proven, {wrong} finding(s)")
            rates[way].append(size / seconds)
    return statistics.median(rates["spark"]), statistics.median(rates["threads"])
