"""One run of `aof2 bench mount`: a server, all contestants mounted on it, the rows, and everything gone again.

Owner: the calling thread. Everything is in one temporary folder; on the way out, whatever happened, each contestant is
stopped, what is still mounted is unmounted lazily, what still runs is ended, and the folder is removed.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec

from aof2.fs.bench import rows
from aof2.fs.bench.contestants import Bare, Contestant, Disk, Plan, Setup
from aof2.fs.bench.install import FIO, OF_PEER, ensure
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.peers import Geesefs, PassthroughHp, Rclone, S3fs, Weed
from aof2.fs.bench.process import Processes, StepError, remove_folder
from aof2.fs.bench.race import Race
from aof2.fs.bench.seaweed import running_seaweed
from aof2.fs.bench.subject import Aof2, RangedAof2

PEERS: Final[dict[str, type[Contestant]]] = {"rclone": Rclone, "s3fs": S3fs, "weed": Weed}
# Take part in making small files, where their program is on PATH; they are not installed.
MAKERS: Final[tuple[type[Contestant], ...]] = (Geesefs, PassthroughHp)
ROOM_FACTOR: Final = 4  # of the file's size, for each contestant: its cache, the server's copy, a new file, slack

Progress = Callable[[int, int], None]
Say = Callable[[str], None]


FULL: Final = Plan(peers=tuple(PEERS), only=tuple(rows.ROWS))
QUICK: Final = msgspec.structs.replace(
    FULL, size=64 << 20, files=500, rounds=1, random_s=0.5, create_budget_s=10.0, later_s=2.0
)


def run(plan: Plan, *, say: Say, on_progress: Progress | None = None) -> list[Measurement]:
    """Every measurement, in order. StepError when there is nothing to measure with."""
    processes = Processes()
    results: list[Measurement] = []
    with _terminated_cleanly(), ExitStack() as stack:
        peers = _installed(plan, processes, say)
        folder = Path(tempfile.mkdtemp(prefix="aof2-bench-mount-"))
        stack.callback(remove_folder, processes, folder)
        stack.callback(processes.end_all)
        _check_room(folder, plan, len(peers) + 4)
        buckets = [*peers, "aof2", "aof2-nopassthrough", Bare.name, *(maker.name for maker in MAKERS if maker.bucket)]
        (folder / "server").mkdir()
        server = stack.enter_context(running_seaweed(folder / "server", buckets))
        f = _field(plan, Setup(folder, server, processes, plan), peers)
        for contestant in f.race.contestants:
            stack.callback(_stop, contestant)
        f.race.each(lambda c: c.start())
        rows.prepare(f)
        for name, reason in f.race.out.items():
            say(f"{name} sits out: {reason}")
        for i, name in enumerate(plan.only):
            if on_progress is not None:
                on_progress(i, len(plan.only))
            results += rows.ROWS[name](f)
    return results


def _installed(plan: Plan, processes: Processes, say: Say) -> list[str]:
    """fio and the server are needed; a peer that is missing is named and left out."""
    ensure(OF_PEER["weed"], processes)
    if {"resident", "daemon"} & set(plan.only):
        ensure(FIO, processes)
    found = []
    for name in plan.peers:
        try:
            ensure(OF_PEER[name], processes)
            found.append(name)
        except StepError as e:
            say(f"{name} sits out: {e}")
    return found


def _field(plan: Plan, setup: Setup, peers: Sequence[str]) -> rows.Field:
    disk, bare = Disk(setup, filesystem_of(setup.root)), Bare(setup)
    aof2 = Aof2(setup) if plan.with_aof2 else None
    ranged = RangedAof2(setup) if plan.with_aof2 and "daemon" in plan.only else None
    others = [PEERS[name](setup) for name in peers]
    makers = [maker(setup) for maker in MAKERS if "files" in plan.only and plan.peers and shutil.which(maker.name)]
    contestants = [disk, bare, *(c for c in (aof2, ranged) if c), *others, *makers]
    race = Race(setup.processes, contestants, rounds=plan.rounds, deadline_s=plan.deadline_s)
    return rows.Field(plan, race, disk, bare, aof2, ranged, others, makers)


def filesystem_of(folder: Path) -> str:
    """`ext4`, `xfs` …: of the disk that holds a folder."""
    answer = subprocess.run(
        ["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {"ext2/ext3": "ext4", "": "disk"}.get(answer, answer)


def _check_room(folder: Path, plan: Plan, contestants: int) -> None:
    needed = ROOM_FACTOR * plan.size * contestants
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StepError(
            f"{folder.parent}: {free >> 20:,} MiB free, {needed >> 20:,} needed; set TMPDIR or pass a smaller --size"
        )


def _stop(contestant: Contestant) -> None:
    """What does not stop by itself is ended and unmounted with the rest."""
    with suppress(StepError, OSError):
        contestant.stop()


@contextmanager
def _terminated_cleanly() -> Iterator[None]:
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
