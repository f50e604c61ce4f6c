"""The rows of `compact`: a stream on the mount into partitioned Parquet there, against JSON into Parquet on the disk.

Both sides have the same lines, and end with the same count and checksum: another is a failure.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Final

from aof2.fs.bench import appendloops
from aof2.fs.bench.measure import Measurement, compared
from aof2.fs.bench.process import StepError
from aof2.fs.bench.race import QUIET_S_MAX
from aof2.fs.bench.sparkrows import LINE_BYTES, SCANNED_FILES, SparkField, StreamsAof2

AGAINST_JSON: Final = 0.7
PIECE_BYTES: Final = 4000 * LINE_BYTES
WAYS: Final = ("compact_stream", "compact_json", "compact_unchecked")


def compact(f: SparkField) -> list[Measurement]:
    mount, records = f.aof2, f.plan.size // LINE_BYTES
    if not isinstance(mount, StreamsAof2):
        return []
    what, unit = f"compact of {records:,} records", "records/s"
    try:
        rates = _rates(f, mount)
    except (StepError, OSError) as e:
        return [Measurement(what=what, unit=unit, ok=False, note=str(e))]
    ours, as_json, unchecked = (statistics.median(rates[way]) for way in WAYS)
    return [
        compared(what, unit, ours, f"JSON on {f.disk.name}, compared as well", as_json, at_least=AGAINST_JSON),
        compared(what, unit, ours, f"JSON on {f.disk.name}, unchecked", unchecked),
    ]


def _rates(f: SparkField, mount: StreamsAof2) -> dict[str, list[float]]:
    """Records a second of each way, in turns."""
    lines, stream = f.disk.directory / "compacted-lines", mount.stream("compacted")
    made = f.race.work("split_files", lines, f.plan.size, LINE_BYTES, SCANNED_FILES, 1, script=appendloops.__file__)
    _append(sorted(lines.glob("*.jsonl")), stream / "_append")
    mount.seal(stream)
    records, found = int(made["count"]), set()
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for n in range(f.plan.rounds):
        for way in WAYS if n % 2 == 0 else reversed(WAYS):
            place = (mount if way == "compact_stream" else f.disk).directory / f"{way}{n}"
            arguments = (stream, place, mount.conf) if way == "compact_stream" else (lines, place)
            os.sync()
            f.race.processes.quiet(QUIET_S_MAX)
            answer = f.spark.ask(way, *arguments)
            rates[way].append(records / answer["seconds"])
            found |= {tuple(answer["found"])} if answer["found"] else set()
            f.race.processes.run(["rm", "-rf", place], deadline_s=f.race.deadline_s)
    if len(found) != 1 or next(iter(found))[0] != records:
        raise StepError(f"{records} records were appended; counts and checksums: {sorted(found)}")
    return rates


def _append(files: list[Path], to: Path) -> None:
    """Whole lines at a time."""
    with to.open("ab", buffering=0) as out:
        for path in files:
            with path.open("rb") as lines:
                while piece := lines.read(PIECE_BYTES):
                    out.write(piece)
