"""`aof2 spark verify`: the verifier spread over executors, straight from the remote; no mount, no disk of the volume.

    driver: logs → rows → what should be there, listed ──► pieces ──► tasks: read and prove ──► findings

The driver makes the checks that need rows (`engine/verify/fromremote.py`), and hands out the blobs, packs and objects
of the logs in waves, so that its memory does not grow with the volume. Tasks check each piece by the same function as
`aof2 verify --remote` does on its threads, and answer with what is wrong and three sums; nothing else travels.

Owner: the driver's main thread. Crash: a temporary folder of the driver's; nothing is written, run it again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from aof2.engine.env import Env
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings import Settings
from aof2.engine.settings.remote import RemoteSettings
from aof2.engine.spark.pipelines.seam import Summary, Tell, watched
from aof2.engine.verify.fromremote import verify_remote
from aof2.engine.verify.pieces import BlobPiece, Checked, Piece, check_piece
from aof2.engine.verify.run import Told
from aof2.engine.verify.told import facts_of, lines_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME: Final = "verify"
WAVE_PIECES: Final = 50_000
TASK_BYTES: Final = 64 << 20
TASK_PIECES: Final = 2000
TASKS_A_CORE: Final = 4
THREADS_REMOTE: Final = 4  # of a task: while one waits for S3, others check


@dataclass(frozen=True, slots=True)
class Arguments:
    """Of `settings`, the remote's count, the retention's and the sizes of blocks."""

    settings: Settings


class _Wrong(NamedTuple):
    at: int  # of the wave
    checked: Checked


class _Answer(NamedTuple):
    """Of one task: what is wrong, and of the rest how much there was."""

    wrong: list[_Wrong]
    blobs: int
    bytes: int


def run(session: SparkSession, arguments: Arguments, tell: Tell) -> Summary:
    """Everything in the remote, proven by tasks."""
    settings = arguments.settings
    tell("logs", 0, 0)
    with watched(session, tell, "verify"):
        report = verify_remote(settings, _Spread(session, settings.remote))
    return Summary(
        report=msgspec.to_builtins(report),
        facts=facts_of(report),
        complaints=lines_of(report),
        exit_code=report.exit_code,
    )


class _Spread:
    """Pieces over the cluster, a wave at a time."""

    def __init__(self, session: SparkSession, remote: RemoteSettings) -> None:
        self._context = session.sparkContext
        self._remote = remote

    def __call__(self, _: RemoteStore, pieces: Iterator[Piece], told: Told) -> None:
        while wave := sorted(islice(pieces, WAVE_PIECES), key=_place):
            tasks = list(_tasks(wave, self._context.defaultParallelism * TASKS_A_CORE))
            work = self._context.parallelize(tasks, len(tasks)).mapPartitions(partial(check_task, self._remote))
            for answer in work.collect():
                for one in answer.wrong:
                    told(wave[one.at], one.checked)
                told(None, Checked(blobs=answer.blobs, bytes=answer.bytes))


def _place(piece: Piece) -> tuple[str, int]:
    """Members of a pack are neighbours, read one behind the other."""
    return piece.key, piece.blob.offset if isinstance(piece, BlobPiece) else 0


def _tasks(wave: list[Piece], wanted: int) -> Iterator[list[tuple[int, Piece]]]:
    """Of about as much work each: at least so many where there is enough to do."""
    total = sum(piece.work_bytes for piece in wave)
    limit = min(TASK_BYTES, total // wanted + 1)
    task: list[tuple[int, Piece]] = []
    size = 0
    for at, piece in enumerate(wave):
        task.append((at, piece))
        size += piece.work_bytes
        if size >= limit or len(task) >= TASK_PIECES:
            yield task
            task, size = [], 0
    if task:
        yield task


# -- on executors


def check_task(remote: RemoteSettings, tasks: Iterable[list[tuple[int, Piece]]]) -> Iterator[_Answer]:
    """Runs in a worker process, which keeps its connections from task to task."""
    store = _store(remote)
    threads = 1 if remote.directory is not None else THREADS_REMOTE
    for task in tasks:
        with ThreadPoolExecutor(threads, thread_name_prefix="aof2-verify") as pool:
            checked = list(pool.map(partial(check_piece, store), [piece for _, piece in task]))
        wrong, blobs, size = [], 0, 0
        for (at, _), one in zip(task, checked, strict=True):
            if one.wrong:
                wrong.append(_Wrong(at, one))
            blobs, size = blobs + one.blobs, size + one.bytes
        yield _Answer(wrong, blobs, size)


_lock: Final = threading.Lock()


def _store(remote: RemoteSettings) -> RemoteStore:
    with _lock:
        return _opened(msgspec.json.encode(remote))


@lru_cache(maxsize=4)
def _opened(remote: bytes) -> RemoteStore:
    return open_remote(Env(), msgspec.json.decode(remote, type=RemoteSettings))
