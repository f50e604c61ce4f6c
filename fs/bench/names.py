"""`aof2 bench names`: names made, changed and looked at, by the mount, the local disk, bindfs and JuiceFS.

Each contestant is alone while it is measured. A row is measured on idle mounts, and once more while files of the mount
are on their way to S3; the others have nothing on its way, so their idle rates, taken just before, stand beside both.
What a change costs counts until it is where its contestant keeps it: of the mount, until it is folded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from aof2.fs.bench import nameloops, subject, tree, venue
from aof2.fs.bench.contestants import Contestant, Disk, Mounted, Plan, Setup
from aof2.fs.bench.field import Field
from aof2.fs.bench.juicefs import JuiceFs
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.peers import Bindfs
from aof2.fs.bench.process import Processes, StepError
from aof2.fs.bench.race import Race, drop_metadata
from aof2.fs.bench.subject import Aof2
from aof2.fs.bench.venue import Progress, Say
from aof2.fs.bench.verdict import Outcome, at_most

PEERS: Final[dict[str, type[Mounted]]] = {"bindfs": Bindfs}
# The least ratios, and where the filesystem is asked for names that the kernel dropped.
TARGETS: Final = {"bindfs": 1.0, "juicefs": 4.0}
ASKED_TARGETS: Final = {"bindfs": 2.0, "juicefs": 4.0}
TREE_TARGETS: Final = {"bindfs": 1.0}
COST_US_MAX: Final = 100.0
WAY_THREADS: Final = 8
WAY_BYTES: Final = 4096
ROOM_BYTES: Final = 4 << 30


class NamesPlan(Plan, frozen=True, kw_only=True):
    """`files` are those on their way to S3."""

    changes: int = 2000  # of each kind, shared by the processes
    tree: Path | None = None
    tree_files: int = 1000  # of a tree that is made up


class NamesField(Field, frozen=True, kw_only=True):
    plan: NamesPlan
    tree: tree.Tree | None
    bursts: list[Path] = msgspec.field(default_factory=list)  # folders whose files are, or were, on their way


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """One row: a task of the loops over names that begin with `first`, and what makes them as they were before."""

    what: str
    task: str
    first: str = "f"
    second: str = "-"
    undo: Sequence[str] = ()
    asks: bool = False  # it changes nothing, and the kernel's names go first: the filesystem answers


OPS: Final = (
    Op(what="create", task="create"),
    Op(what="stat, names dropped", task="stat", asks=True),
    Op(what="list, names dropped", task="list", asks=True),
    Op(what="chmod", task="chmod"),
    Op(what="utimens", task="utimens"),
    Op(what="setxattr", task="setxattr"),
    Op(what="rename of a file", task="rename", second="r", undo=("rename", "r", "f")),
    Op(what="link", task="link", second="l", undo=("unlink", "l", "-")),
    Op(what="symlink", task="symlink", second="s", undo=("unlink", "s", "-")),
    Op(what="unlink", task="unlink"),
    Op(what="mkdir", task="mkdir", first="d"),
    Op(what="rename of a directory", task="rename", first="d", second="e"),
    Op(what="rmdir", task="rmdir", first="e"),
)

FULL: Final = NamesPlan(rounds=2, peers=tuple(PEERS), only=("one", "four", "tree"))
QUICK: Final = msgspec.structs.replace(FULL, rounds=1, changes=400, files=1000, tree_files=200)


def run(plan: NamesPlan, *, say: Say, on_progress: Progress | None = None) -> list[Measurement]:
    """Every measurement, in order. StepError when there is nothing to measure with."""
    processes = Processes()
    with venue.terminated_cleanly():
        peers = venue.installed(plan.peers, processes, say)
        with venue.opened(plan, processes, [subject.NAME, JuiceFs.name], needed_bytes=ROOM_BYTES) as setup:
            f = _field(plan, setup, peers)
            with venue.mounted(f.race):
                for name, reason in f.race.out.items():
                    say(f"{name} sits out: {reason}")
                return venue.run_rows(f, ROWS, plan.only, on_progress)


def _field(plan: NamesPlan, setup: Setup, peers: Sequence[str]) -> NamesField:
    disk = Disk(setup, venue.filesystem_of(setup.root))
    aof2 = Aof2(setup) if plan.with_aof2 else None
    others: list[Contestant] = [PEERS[name](setup) for name in peers]
    if plan.peers and JuiceFs.on_path():
        others.append(JuiceFs(setup))
    made = None
    if "tree" in plan.only:
        made = tree.prepare(setup.root / "source", setup.processes, plan.tree, plan.tree_files)
    contestants = [disk, *([aof2] if aof2 else []), *others]
    race = Race(setup.processes, contestants, rounds=plan.rounds, deadline_s=plan.deadline_s)
    return NamesField(plan=plan, race=race, disk=disk, aof2=aof2, peers=others, tree=made)


def by_processes(processes: int) -> Callable[[NamesField], list[Measurement]]:
    """All operations by so many processes at once, idle and then busy."""
    text = f"{processes} process{'es' if processes > 1 else ''}"

    def rows(f: NamesField) -> list[Measurement]:
        can_drop = drop_metadata()
        ops = [op for op in OPS if can_drop or not op.asks]
        idle = {op: f.race.turns(_attempt(f, op, processes), f.everybody) for op in ops}
        found = [m for op, seen in idle.items() for m in _judged(f, op, text, seen)]
        found += [m for op, seen in idle.items() for m in _cost(op, text, seen)]
        for op, seen in idle.items() if f.aof2 else ():
            busy = f.race.turns(_attempt(f, op, processes, busy=True), f.subjects, quiet=False)
            found += _judged(f, op, f"{text}, files on their way to S3", _beside(busy, seen))
        return found

    return rows


def _attempt(f: NamesField, op: Op, processes: int, *, busy: bool = False) -> Callable[[Contestant, int], float]:
    def loop(c: Contestant, n: int, *words: str) -> dict[str, float]:
        task, first, second = words
        folder = c.directory / f"{'busy' if busy else 'idle'}{processes}-{n}"
        return f.race.work(task, folder, processes, f.plan.changes, first, second, script=nameloops.__file__)

    def attempt(c: Contestant, n: int) -> float:
        if busy:
            _see_some_off(f)
        if op.asks:
            drop_metadata()
        with f.race.metering(c) as meter:
            answer = loop(c, n, op.task, op.first, op.second)
            c.settle()
            meter.units = 0 if busy else answer["count"]
        wanted = f.plan.changes // processes * processes
        if answer["count"] != wanted:
            raise StepError(f"{c.name} shows {answer['count']:.0f} names of {wanted}")
        if op.undo:
            loop(c, n, *op.undo)
        return answer["count"] / answer["seconds"]

    return attempt


def _see_some_off(f: NamesField) -> None:
    """At least half of `files` are on their way when this returns."""
    if f.aof2 is None or (f.bursts and f.aof2.on_their_way(f.bursts[-1]) >= f.plan.files // 2):
        return
    number = len(f.bursts)
    folder = f.aof2.directory / f"way{number}"
    f.race.work("fill", folder, f.plan.files, WAY_THREADS, WAY_BYTES, number, f.plan.create_budget_s)
    f.bursts.append(folder)


def _judged(f: NamesField, op: Op, text: str, outcome: Outcome) -> list[Measurement]:
    return f.judge(f"{op.what}, {text}", "names/s", outcome, ASKED_TARGETS if op.asks else TARGETS)


def _cost(op: Op, text: str, outcome: Outcome) -> list[Measurement]:
    """A target of its own for what a change costs, whatever its rate."""
    cost = outcome.costs_us.get(subject.NAME)
    if op.asks or cost is None:
        return []
    seen = Outcome({subject.NAME: cost})
    return at_most(f"{op.what}, {text}, processor time", "µs/name", seen, subject=subject.NAME, limit=COST_US_MAX)


def _beside(busy: Outcome, idle: Outcome) -> Outcome:
    """The mount while it is busy, and the others, which never are."""
    others = idle.without(subject.NAME)
    return Outcome({**others.rates, **busy.rates}, {**others.failures, **busy.failures})


def trees(f: NamesField) -> list[Measurement]:
    if f.tree is None:
        return []
    rows: list[Measurement] = []
    for chore in tree.CHORES:
        outcome = tree.do(f.race, chore, f.tree, f.everybody)
        rows += f.judge(f"{chore.what}, {f.tree.files:,} files", "files/s", outcome, TREE_TARGETS)
    return rows


ROWS: Final[dict[str, Callable[[NamesField], list[Measurement]]]] = {
    "one": by_processes(1),
    "four": by_processes(4),
    "tree": trees,
}
