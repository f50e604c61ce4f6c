"""The loops over logs and remotes of `aof2 bench pipelines`: `logloops.py TASK …` prints one JSON object.

Owner: a process of its own. A crash leaves a folder of the run.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from aof2.engine.env import Env
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.writer import LogSettings, ManifestLogWriter
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings import load_settings
from aof2.engine.verify.fromremote import verify_remote
from aof2.engine.verify.pieces import Piece, check_piece
from aof2.engine.verify.run import Told
from aof2.fs.bench.work import main

FIRST_MS = 1_700_000_000_000
BATCH = 1000
SEGMENTS = 50_000


def write_log(folder: str, records: int) -> dict[str, float]:
    """A stream's log of so many records about segments: sealed, evicted, fetched, over and over."""
    env, written = Env(), 0
    with ManifestLogWriter.open(env, Path(folder) / "1", LogSettings(rotation_period_ms=3_600_000)) as writer:
        while written < records:
            writer.append_batch(_batch(written))
            writer.commit(sync=False)
            if writer.needs_rotation():
                writer.rotate()
            written += BATCH + 1  # the commit's marker is one, too
    return {"count": written}


def _batch(first: int) -> RecordBatch:
    """Four kinds of records, a column at a time."""
    batch = RecordBatch()
    quarter, when = BATCH // 4, FIRST_MS + first * 10
    segments = array("Q", ((first + n) * 7919 % SEGMENTS for n in range(quarter)))
    sizes = array("Q", (4096 + segment for segment in segments))
    batch.add_of_each(p.HydrationStarted(2), segments, timestamp_ms=when)
    batch.add_columns(p.HydrationDone, segments, sizes, timestamp_ms=when + 1)
    batch.add_columns(p.LocalEvicted, segments, sizes, timestamp_ms=when + 2)
    batch.add_of_each(p.CompressionStarted(first & 0xFFFF), segments, timestamp_ms=when + 3)
    return batch


def verify_on_threads(conf: str, jobs: int) -> dict[str, float]:
    """All that is in the remote, by as many threads: bytes proven, and the seconds."""
    settings = load_settings(Path(conf))

    def spread(store: RemoteStore, pieces: Iterator[Piece], told: Told) -> None:
        with ThreadPoolExecutor(jobs) as pool:
            found = list(pieces)
            for piece, checked in zip(found, pool.map(partial(check_piece, store), found), strict=True):
                told(piece, checked)

    start = time.perf_counter()
    report = verify_remote(settings, spread)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": report.remote_bytes, "wrong": report.errors + report.warnings}


TASKS = {f.__name__: f for f in (write_log, verify_on_threads)}

if __name__ == "__main__":
    main(TASKS, *sys.argv[1:])
