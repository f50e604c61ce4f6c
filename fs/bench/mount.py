"""One run of `aof2 bench mount`: a server, all contestants mounted on it, and the rows.

Owner: the calling thread; `venue.py` says what is left of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from aof2.fs.bench import rows, venue
from aof2.fs.bench.contestants import Bare, Contestant, Disk, Mounted, Plan, Setup
from aof2.fs.bench.install import FIO, ensure
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.peers import Geesefs, PassthroughHp, Rclone, S3fs, Weed
from aof2.fs.bench.process import Processes
from aof2.fs.bench.race import Race
from aof2.fs.bench.subject import Aof2, RangedAof2
from aof2.fs.bench.venue import Progress, Say

PEERS: Final[dict[str, type[Contestant]]] = {"rclone": Rclone, "s3fs": S3fs, "weed": Weed}
# Take part in making small files, where their program is on PATH; they are not installed.
MAKERS: Final[tuple[type[Mounted], ...]] = (Geesefs, PassthroughHp)
ROOM_FACTOR: Final = 4  # of the file's size, for each contestant: its cache, the server's copy, a new file, slack

FULL: Final = Plan(peers=tuple(PEERS), only=tuple(rows.ROWS))
QUICK: Final = msgspec.structs.replace(
    FULL, size=64 << 20, files=500, rounds=1, random_s=0.5, create_budget_s=10.0, later_s=2.0
)


def run(plan: Plan, *, say: Say, on_progress: Progress | None = None) -> list[Measurement]:
    """Every measurement, in order. StepError when there is nothing to measure with."""
    processes = Processes()
    with venue.terminated_cleanly():
        if {"resident", "daemon"} & set(plan.only):
            ensure(FIO, processes)
        peers = venue.installed(plan.peers, processes, say)
        buckets = [*peers, "aof2", "aof2-nopassthrough", Bare.name, *(maker.name for maker in MAKERS if maker.bucket)]
        needed = ROOM_FACTOR * plan.size * (len(peers) + 4)
        with venue.opened(plan, processes, buckets, needed_bytes=needed) as setup:
            f = _field(plan, setup, peers)
            with venue.mounted(f.race):
                rows.prepare(f)
                for name, reason in f.race.out.items():
                    say(f"{name} sits out: {reason}")
                return venue.run_rows(f, rows.ROWS, plan.only, on_progress)


def _field(plan: Plan, setup: Setup, peers: Sequence[str]) -> rows.MountField:
    disk, bare = Disk(setup, venue.filesystem_of(setup.root)), Bare(setup)
    aof2 = Aof2(setup) if plan.with_aof2 else None
    ranged = RangedAof2(setup) if plan.with_aof2 and "daemon" in plan.only else None
    others = [PEERS[name](setup) for name in peers]
    makers: list[Contestant] = [
        maker(setup) for maker in MAKERS if "files" in plan.only and plan.peers and maker.on_path()
    ]
    contestants = [disk, bare, *(c for c in (aof2, ranged) if c), *others, *makers]
    race = Race(setup.processes, contestants, rounds=plan.rounds, deadline_s=plan.deadline_s)
    return rows.MountField(
        plan=plan, race=race, disk=disk, bare=bare, aof2=aof2, ranged=ranged, peers=others, makers=makers
    )
