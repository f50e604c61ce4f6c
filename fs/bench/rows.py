"""The rows of `aof2 bench mount`: what is done, in which order, and the target of each ratio.

All rows but the small files use one file, written once through every contestant: it is resident first, and dropped from
everything local before each cold read. What a cold read brought is compared with what was written.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from typing import Final

import msgspec

from aof2.fs.bench import fio, subject
from aof2.fs.bench.contestants import Bare, Contestant
from aof2.fs.bench.field import Field
from aof2.fs.bench.measure import Measurement
from aof2.fs.bench.process import StepError
from aof2.fs.bench.race import drop_metadata
from aof2.fs.bench.verdict import BEST_PEER, Outcome, at_most

MIB: Final = 1 << 20
DATA: Final = "data"
DATA_SEED: Final = 7
RANGE_BYTES: Final = 64 << 10
QUIET_S: Final = 1.0
WAITS: Final = 50
# Creating small files: the least ratio against those that take part only where they are on PATH.
MAKER_TARGETS: Final = {"geesefs": 2.5, "passthrough_hp": 1.0}


class MountField(Field, frozen=True, kw_only=True):
    bare: Bare
    ranged: Contestant | None
    makers: list[Contestant]  # take part in making small files only

    @property
    def size_text(self) -> str:
        size = self.plan.size
        return f"{size >> 30} GiB" if size % (1 << 30) == 0 else f"{size // MIB} MiB"


def prepare(f: MountField) -> None:
    """The file, everywhere, and in the remote."""

    def make(c: Contestant) -> None:
        path = c.directory / DATA
        f.race.work("write", path, f.plan.size, DATA_SEED, 0)
        c.until_remote(path)

    f.race.each(make, [*f.everybody, *([f.ranged] if f.ranged else [])])
    server = f.bare.setup.server
    source = f.disk.directory / DATA
    f.race.each(
        lambda c: f.race.work("upload", server.endpoint_url, c.name, DATA, source, env=server.environ()), [f.bare]
    )
    os.sync()  # nothing of an earlier turn is left to be written during the next


def resident(f: MountField) -> list[Measurement]:
    """fio on a file that is all here and, as far as its filesystem allows, in the kernel's cache."""
    rows: list[Measurement] = []
    kinds = ((None, "sequential read", "B/s", 0.95), (f.plan.random_s, "4 KiB random reads", "reads/s", 0.85))
    for random_s, kind, unit, target in kinds:
        for threads in (1, 4):
            outcome = f.race.turns(_fio(f, threads, random_s), f.everybody)
            what = f"resident {kind}, {threads} thread{'s'[: threads - 1]}"
            rows += f.judge(what, unit, outcome, {f.disk.name: target})
    return rows


def daemon(f: MountField) -> list[Measurement]:
    """The same with passthrough off.

    A filesystem that leaves pages in the kernel's cache between opens is as fast as the disk there, and nothing beats
    that; so the target is where the pages were dropped and the daemons answer.
    """
    who = [*([f.ranged] if f.ranged else []), *f.peers]
    rows: list[Measurement] = []
    for drop, text in ((True, "answered by the daemon"), (False, "passthrough off")):
        outcome = f.race.turns(_fio(f, 1, None, drop=drop), who)
        targets = {BEST_PEER: 1.4} if drop else {}
        rows += f.judge(f"resident sequential read, {text}", "B/s", outcome, targets, subject.RANGED)
    return rows


def _fio(
    f: MountField, threads: int, random_s: float | None, *, drop: bool = False
) -> Callable[[Contestant, int], float]:
    def attempt(c: Contestant, _: int) -> float:
        path = c.directory / DATA
        f.race.work("read", path)
        job = fio.read_job(path, threads=threads, size=f.plan.size, random_s=random_s, drop=drop)
        with f.race.metering(c) as meter:
            rates = fio.parse_fio(f.race.processes.run(job, deadline_s=f.race.deadline_s))
            meter.units = rates.bytes_read / MIB if random_s is None else rates.reads
        return rates.bytes_per_s if random_s is None else rates.reads_per_s

    return attempt


def writing(f: MountField) -> list[Measurement]:
    """A new file, open to close; deleted again before the next turn."""
    rows: list[Measurement] = []
    for fsync, text in ((0, ""), (1, ", with fsync")):

        def attempt(c: Contestant, n: int, fsync: int = fsync) -> float:
            path = c.directory / f"new{fsync}{n}"
            os.sync()
            with f.race.metering(c) as meter:
                seconds = f.race.work("write", path, f.plan.size, 100 + n, fsync)["seconds"]
                meter.units = f.plan.size / MIB
            f.race.processes.run(["rm", path], deadline_s=f.race.deadline_s)
            return f.plan.size / seconds

        targets = {} if fsync else {f.disk.name: 0.9}
        outcome = f.race.turns(attempt, f.everybody)
        rows += f.judge(f"write of a new {f.size_text} file{text}", "B/s", outcome, targets)
    return rows


def cold(f: MountField) -> list[Measurement]:
    """The first sequential read after everything local was dropped; boto3 downloads the same bytes."""
    server = f.bare.setup.server

    def attempt(c: Contestant, _: int) -> float:
        if isinstance(c, Bare):
            target = c.directory / "downloaded"
            answer = f.race.work("download", server.endpoint_url, c.name, DATA, target, env=server.environ())
            target.unlink()
            return f.plan.size / answer["seconds"]
        path = c.directory / DATA
        c.drop(path)
        os.sync()
        with f.race.metering(c) as meter:
            answer = f.race.work("read", path)
            meter.units = f.plan.size / MIB
        if answer["bytes"] != f.plan.size:
            raise StepError(f"{c.name} returned {answer['bytes']:.0f} bytes of {f.plan.size}")
        return f.plan.size / answer["seconds"]

    outcome = f.race.turns(attempt, [*f.over_s3, f.bare])
    wrong = _wrong_bytes(f)
    outcome = Outcome(
        {k: v for k, v in outcome.rates.items() if k not in wrong}, {**outcome.failures, **wrong}, outcome.costs_us
    )
    return f.judge(f"first read of {f.size_text} from S3", "B/s", outcome, {BEST_PEER: 1, f.bare.name: 0.8})


def _wrong_bytes(f: MountField) -> dict[str, str]:
    """Who returns other bytes than were written."""
    expected = f.race.work("checksum", f.disk.directory / DATA)

    def attempt(c: Contestant, _: int) -> float:
        if f.race.work("checksum", c.directory / DATA) != expected:
            raise StepError(f"{c.name} returned wrong bytes")
        return 1.0

    return f.race.turns(attempt, f.over_s3, rounds=1).failures


def ranges(f: MountField) -> list[Measurement]:
    """Few small reads of a cold file: how long, and how much was fetched for them."""
    asked = f.plan.ranges * RANGE_BYTES
    fetched: dict[str, list[float]] = {}

    def attempt(c: Contestant, n: int) -> float:
        path = c.directory / DATA
        c.drop(path)
        os.sync()
        before = c.fetched_bytes()
        with f.race.metering(c) as meter:
            answer = f.race.work("ranges", path, f.plan.ranges, RANGE_BYTES, n)
            time.sleep(QUIET_S)  # read-ahead counts, too: it goes on after the last read
            meter.units = f.plan.ranges
        after = c.fetched_bytes()
        if before is not None and after is not None:
            fetched.setdefault(c.name, []).append((after - before) / asked)
        if answer["bytes"] != asked:
            raise StepError(f"{c.name} returned {answer['bytes']:.0f} bytes of {asked}")
        return f.plan.ranges / answer["seconds"]

    outcome = f.race.turns(attempt, f.over_s3)
    what = f"{f.plan.ranges} random 64 KiB reads of a cold {f.size_text} file"
    speed = f.judge(what, "reads/s", outcome, {BEST_PEER: 1})
    factors = Outcome({name: max(values) for name, values in fetched.items()}, outcome.failures)
    return speed + at_most(f"{what}, fetched", "× asked", factors, subject=subject.NAME, limit=20)


class Seen(enum.Enum):
    """What the kernel knows of the names that are asked for."""

    JUST = ""
    LATER = ", seen a while ago"
    DROPPED = ", the kernel's names dropped"


def small_files(f: MountField) -> list[Measurement]:
    """Files of 4 KiB in one directory: created, asked for one by one, and listed.

    Besides the peers, `makers` create them, too: geesefs, and libfuse's passthrough_hp, which records nothing.

    For names it has just seen the kernel answers by itself, whatever filesystem they are of, and nothing is twice as
    fast as that; so the target is where an application comes back after `later_s`.
    """
    made: dict[str, int] = {}

    def create(c: Contestant, n: int) -> float:
        folder = c.directory / f"many{n}"
        os.sync()
        with f.race.metering(c) as meter:
            answer = f.race.work("create", folder, f.plan.files, f.plan.create_budget_s)
            meter.units = answer["count"]
        if n == 0:
            made[c.name] = int(answer["count"])
        c.until_remote(folder)
        return answer["count"] / answer["seconds"]

    def asked(task: str, seen: Seen) -> Callable[[Contestant, int], float]:
        def attempt(c: Contestant, _: int) -> float:
            folder, count = c.directory / "many0", made[c.name]
            arguments = [folder, *([count] if task == "stat" else [])]
            if seen is Seen.DROPPED:
                drop_metadata()
            elif seen is Seen.LATER:
                f.race.work(task, *arguments)
                time.sleep(f.plan.later_s)
            with f.race.metering(c) as meter:
                answer = f.race.work(task, *arguments)
                meter.units = count
            if answer["count"] != count:
                raise StepError(f"{c.name} shows {answer['count']:.0f} files of {count}")
            return count / answer["seconds"]

        return attempt

    outcome = f.race.turns(create, [*f.everybody, *f.makers])
    rows = f.judge(f"creating {f.plan.files:,} files of 4 KiB", "files/s", outcome, {BEST_PEER: 5, **MAKER_TARGETS})
    who = [c for c in f.everybody if made.get(c.name)]
    for seen in Seen:
        if seen is Seen.DROPPED and not drop_metadata():
            continue
        for task, verb in (("stat", "stat of each"), ("listing", "listing with attributes")):
            outcome = f.race.turns(asked(task, seen), who)
            targets = {BEST_PEER: 2} if seen is Seen.LATER else {}
            rows += f.judge(f"{verb}{seen.value}", "files/s", outcome, targets)
    return [_with_counts(row, made, f.plan.files) for row in rows]


def _with_counts(row: Measurement, made: dict[str, int], wanted: int) -> Measurement:
    """Who ran out of time has fewer files than the others, and its rows say so."""
    what, baseline = row.what, row.baseline
    if (count := made.get(subject.NAME, wanted)) < wanted:
        what += f" ({count:,} files)"
    if (count := made.get(baseline.split(",")[0], wanted)) < wanted:
        baseline += f" ({count:,} files)"
    return msgspec.structs.replace(row, what=what, baseline=baseline)


def durable(f: MountField) -> list[Measurement]:
    """A small file, and the wait until the remote alone restores it: blob and log, against one put of its bytes."""
    server = f.bare.setup.server

    def attempt(c: Contestant, n: int) -> float:
        if isinstance(c, subject.Aof2):
            answer = f.race.work("durable", c.directory, c.control, subject.TENANT, WAITS, n)
        else:
            answer = f.race.work("puts", server.endpoint_url, c.name, WAITS, n, env=server.environ())
        return 1 / answer["seconds"]

    outcome = f.race.turns(attempt, [*f.subjects, f.bare])
    return f.judge("4 KiB file written and waited for", "files/s", outcome, {})


ROWS: Final[dict[str, Callable[[MountField], list[Measurement]]]] = {
    "resident": resident,
    "daemon": daemon,
    "write": writing,
    "cold": cold,
    "ranges": ranges,
    "files": small_files,
    "durable": durable,
}
