"""One run of `aof2 bench pipelines`: the venue of `aof2 bench spark`, and a module of rows for each pipeline.

To add one: a function from a SparkField to rows in a module `…rows.py`, and its name here.

Owner: the calling thread; `venue.py` says what is left of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from aof2.fs.bench import compactrows, manifestrows, spark, verifyrows
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.sparkrows import SparkPlan
from aof2.fs.bench.venue import Progress, Say

ROWS: Final[Mapping[str, spark.Rows]] = {
    "compact": compactrows.compact,
    "manifest": manifestrows.manifest,
    "verify": verifyrows.verify,
}
FULL: Final = msgspec.structs.replace(spark.FULL, only=tuple(ROWS), peers=())
QUICK: Final = msgspec.structs.replace(spark.QUICK, only=tuple(ROWS), peers=())


def run(plan: SparkPlan, *, say: Say, on_progress: Progress | None = None) -> list[Measurement]:
    """Every measurement, in order. StepError when there is nothing to measure with."""
    return spark.run_with(plan, ROWS, say=say, on_progress=on_progress)
