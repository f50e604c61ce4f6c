"""The loops of `aof2 bench names`: `nameloops.py TASK FOLDER PROCESSES COUNT FIRST SECOND` prints one JSON object.

Each of the processes has a folder of its own below FOLDER, and in it as many of the COUNT names as the others; names
begin with FIRST, new ones that are made of them with SECOND. Time goes from when the first process starts to when the
last is done. In a process of its own so that a filesystem that hangs can be given up on.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple

from aof2.fs.bench.work import main

Step = Callable[[str, str], object]
START_S = 60.0


def _create(first: str, _: str) -> None:
    os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))


STEPS: dict[str, Step] = {
    "create": _create,
    "stat": lambda first, _: os.stat(first),
    "chmod": lambda first, _: os.chmod(first, 0o600),  # noqa: PTH101
    "utimens": lambda first, _: os.utime(first, ns=(10**18, 10**18)),
    "setxattr": lambda first, _: os.setxattr(first, "user.bench", b"a value"),
    "rename": os.rename,
    "link": os.link,
    "symlink": lambda first, second: os.symlink(os.path.basename(first), second),  # noqa: PTH119, PTH211
    "unlink": lambda first, _: os.unlink(first),  # noqa: PTH108
    "mkdir": lambda first, _: os.mkdir(first),  # noqa: PTH102
    "rmdir": lambda first, _: os.rmdir(first),  # noqa: PTH106
}


class Share(NamedTuple):
    """What one of the processes does."""

    task: str
    folder: str
    names: int
    first: str
    second: str


class Span(NamedTuple):
    start_s: float
    end_s: float
    done: int


_barrier: Barrier | None = None


def _meet(barrier: Barrier) -> None:
    global _barrier
    _barrier = barrier


def _do(share: Share) -> Span:
    names = [f"{n:06d}" for n in range(share.names)]
    pairs = [(f"{share.folder}/{share.first}{name}", f"{share.folder}/{share.second}{name}") for name in names]
    if _barrier is not None:
        _barrier.wait(START_S)
    start = time.perf_counter()
    if share.task == "list":
        done = _listed(share.folder)
    else:
        step = STEPS[share.task]
        for first, second in pairs:
            step(first, second)
        done = len(pairs)
    return Span(start, time.perf_counter(), done)


def _listed(folder: str) -> int:
    """As `ls -l` sees a directory: every name with its attributes."""
    with os.scandir(folder) as entries:
        return sum(entry.stat(follow_symlinks=False).st_nlink > 0 for entry in entries)


def changed(task: str, folder: str, processes: int, count: int, first: str, second: str) -> dict[str, float]:
    shares = [Share(task, f"{folder}/{n}", count // processes, first, second) for n in range(processes)]
    for share in shares:
        Path(share.folder).mkdir(parents=True, exist_ok=True)
    spans = [_do(shares[0])] if processes == 1 else _together(shares)
    seconds = max(span.end_s for span in spans) - min(span.start_s for span in spans)
    return {"seconds": seconds, "count": sum(span.done for span in spans)}


def _together(shares: list[Share]) -> list[Span]:
    """A process each; none starts before all can."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(len(shares))
    with ProcessPoolExecutor(len(shares), context, initializer=_meet, initargs=(barrier,)) as pool:
        return list(pool.map(_do, shares))


if __name__ == "__main__":
    main({task: partial(changed, task) for task in (*STEPS, "list")}, *sys.argv[1:])
