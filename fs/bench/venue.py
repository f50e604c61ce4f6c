"""Where a race takes place: a folder and a server for the run, the contestants mounted on it, and all of it gone again.

Owner: the calling thread. Everything is in one temporary folder; on the way out, whatever happened, each contestant is
stopped, what is still mounted is unmounted lazily, what still runs is ended, and the folder is removed.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TypeVar

from aof2.fs.bench.contestants import Contestant, Plan, Setup
from aof2.fs.bench.install import OF_PEER, ensure
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.process import Processes, StepError, remove_folder
from aof2.fs.bench.race import Race
from aof2.fs.bench.seaweed import running_seaweed

Progress = Callable[[int, int], None]
Say = Callable[[str], None]
F = TypeVar("F")


def installed(names: Sequence[str], processes: Processes, say: Say) -> list[str]:
    """The peers that are here, or can be; one that is missing is named and left out."""
    found = []
    for name in names:
        try:
            ensure(OF_PEER[name], processes)
            found.append(name)
        except StepError as e:
            say(f"{name} sits out: {e}")
    return found


@contextmanager
def opened(plan: Plan, processes: Processes, buckets: Collection[str], *, needed_bytes: int) -> Iterator[Setup]:
    """A folder of the run, with room for it, and a server that has these buckets."""
    ensure(OF_PEER["weed"], processes)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="aof2-bench-"))
        stack.callback(remove_folder, processes, folder)
        stack.callback(processes.end_all)
        _check_room(folder, needed_bytes)
        (folder / "server").mkdir()
        server = stack.enter_context(running_seaweed(folder / "server", buckets))
        yield Setup(folder, server, processes, plan)


@contextmanager
def mounted(race: Race) -> Iterator[None]:
    """The contestants, started; who does not start is out."""
    with ExitStack() as stack:
        for contestant in race.contestants:
            stack.callback(_stop, contestant)
        race.each(lambda c: c.start())
        yield


def run_rows(
    field: F,
    rows: Mapping[str, Callable[[F], Iterable[Measurement]]],
    only: Sequence[str],
    on_progress: Progress | None,
) -> list[Measurement]:
    results: list[Measurement] = []
    for i, name in enumerate(only):
        if on_progress is not None:
            on_progress(i, len(only))
        results += rows[name](field)
    return results


def filesystem_of(folder: Path) -> str:
    """`ext4`, `xfs` …: of the disk that holds a folder."""
    answer = subprocess.run(
        ["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"ext2/ext3": "ext4", "": "disk"}.get(answer, answer)


def _check_room(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StepError(
            f"{folder.parent}: {free >> 20:,} MiB free, {needed_bytes >> 20:,} needed; "
            "set TMPDIR or ask for less (--size, --files)"
        )


def _stop(contestant: Contestant) -> None:
    """What does not stop by itself is ended and unmounted with the rest."""
    with suppress(StepError, OSError):
        contestant.stop()


@contextmanager
def terminated_cleanly() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that mounts do not stay behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)
