"""One run of `aof2 bench spark`: a server, a Spark session, the mount beside the disk, and the rows.

Owner: the calling thread; `venue.py` says what is left of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from aof2.fs.bench import subject, venue
from aof2.fs.bench.contestants import Bare, Contestant, Disk, Setup
from aof2.fs.bench.juicefs import JuiceFs
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.process import Processes
from aof2.fs.bench.race import Race
from aof2.fs.bench.sparkprocess import SparkProcess, check_installed
from aof2.fs.bench.sparkrows import ROW_BYTES, ROWS, SparkField, SparkPlan, StreamsAof2
from aof2.fs.bench.venue import Progress, Say

Rows = Callable[[SparkField], list[Measurement]]

COPIES: Final = 12  # of what is scanned and written, here and at the server, in a few rounds

FULL: Final = SparkPlan(size=256 << 20, rounds=3, only=tuple(ROWS), peers=(JuiceFs.name,))
QUICK: Final = msgspec.structs.replace(FULL, size=16 << 20, rows=50_000, lines=20_000, rounds=1)


def run(plan: SparkPlan, *, say: Say, on_progress: Progress | None = None) -> list[Measurement]:
    """Every measurement, in order. StepError when there is nothing to measure with."""
    return run_with(plan, ROWS, say=say, on_progress=on_progress)


def run_with(
    plan: SparkPlan, rows: Mapping[str, Rows], *, say: Say, on_progress: Progress | None = None
) -> list[Measurement]:
    """The same of other rows."""
    check_installed()
    processes = Processes()
    with venue.terminated_cleanly():
        buckets = [subject.NAME, Bare.name, JuiceFs.name]
        needed = COPIES * (plan.size + plan.rows * ROW_BYTES)
        with venue.opened(plan, processes, buckets, needed_bytes=needed) as setup:
            f = _field(plan, setup)
            with venue.mounted(f.race):
                for name, reason in f.race.out.items():
                    say(f"{name} sits out: {reason}")
                f.spark.start()
                return venue.run_rows(f, rows, plan.only, on_progress)


def _field(plan: SparkPlan, setup: Setup) -> SparkField:
    disk, bare = Disk(setup, venue.filesystem_of(setup.root)), Bare(setup)
    aof2 = StreamsAof2(setup) if plan.with_aof2 else None
    others: list[Contestant] = [JuiceFs(setup)] if plan.peers and JuiceFs.on_path() else []
    folder = setup.root / "session"
    folder.mkdir()
    spark = SparkProcess(setup.processes, folder, plan.deadline_s)
    contestants = [disk, bare, *([aof2] if aof2 else []), *others]
    race = Race(setup.processes, contestants, rounds=plan.rounds, deadline_s=plan.deadline_s)
    return SparkField(plan=plan, race=race, disk=disk, bare=bare, aof2=aof2, peers=others, spark=spark)
