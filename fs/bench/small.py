"""One run of `aof2 bench small`: a server, all contestants mounted on it, and the rows.

Owner: the calling thread; `venue.py` says what is left of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from aof2.fs.bench import subject, tree, venue
from aof2.fs.bench.contestants import Bare, Contestant, Disk, Mounted, Setup
from aof2.fs.bench.juicefs import JuiceFs
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.peers import Geesefs, MountS3, Rclone, S3fs, Weed
from aof2.fs.bench.process import Processes
from aof2.fs.bench.race import Race
from aof2.fs.bench.smallrows import ROWS, SMALL_BYTES, SmallField, SmallPlan
from aof2.fs.bench.subject import Aof2
from aof2.fs.bench.venue import Progress, Say

PEERS: Final[dict[str, type[Mounted]]] = {"rclone": Rclone, "s3fs": S3fs, "weed": Weed}
# Take part where their programs are on PATH; they are not installed.
FOUND: Final[tuple[type[Mounted], ...]] = (JuiceFs, Geesefs, MountS3)
LARGE_COPIES: Final = 5  # of the large files of a round, each here and at the server, in a few rounds
SMALL_COPIES: Final = 8  # of all small files, for each contestant: blocks of its cache and of the server, rounds

FULL: Final = SmallPlan(size=512 << 20, rounds=2, peers=tuple(PEERS), only=tuple(ROWS))
QUICK: Final = msgspec.structs.replace(FULL, size=64 << 20, files=500, rounds=1, create_budget_s=10.0, tree_files=200)


def run(plan: SmallPlan, *, say: Say, on_progress: Progress | None = None) -> list[Measurement]:
    """Every measurement, in order. StepError when there is nothing to measure with."""
    processes = Processes()
    with venue.terminated_cleanly():
        peers = venue.installed(plan.peers, processes, say)
        buckets = [subject.NAME, Bare.name, *peers, *(found.name for found in FOUND)]
        needed = LARGE_COPIES * 4 * plan.size + SMALL_COPIES * SMALL_BYTES * plan.files * (len(peers) + 2)
        with venue.opened(plan, processes, buckets, needed_bytes=needed) as setup:
            f = _field(plan, setup, peers)
            with venue.mounted(f.race):
                for name, reason in f.race.out.items():
                    say(f"{name} sits out: {reason}")
                return venue.run_rows(f, ROWS, plan.only, on_progress)


def _field(plan: SmallPlan, setup: Setup, peers: Sequence[str]) -> SmallField:
    disk, bare = Disk(setup, venue.filesystem_of(setup.root)), Bare(setup)
    aof2 = Aof2(setup) if plan.with_aof2 else None
    others: list[Contestant] = [PEERS[name](setup) for name in peers]
    others += [found(setup) for found in FOUND if plan.peers and found.on_path()]
    made = None
    if "tree" in plan.only:
        made = tree.prepare(setup.root / "source", setup.processes, plan.tree, plan.tree_files)
    contestants = [disk, bare, *([aof2] if aof2 else []), *others]
    race = Race(setup.processes, contestants, rounds=plan.rounds, deadline_s=plan.deadline_s)
    return SmallField(plan=plan, race=race, disk=disk, bare=bare, aof2=aof2, peers=others, tree=made)
