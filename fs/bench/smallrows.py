"""The rows of `aof2 bench small`: small files to S3 and back, and large ones beside them.

Time goes from the first create to where the contestant says that everything is in the remote, and of one that keeps an
object a file, the server, too. Requests and bytes are counted by the server. No two files have the same bytes.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from aof2.fs.bench import subject, tree
from aof2.fs.bench.contestants import Bare, Contestant, Plan
from aof2.fs.bench.field import Field
from aof2.fs.bench.measure import Measurement, compared
from aof2.fs.bench.peers import Geesefs, Rclone
from aof2.fs.bench.process import StepError, wait_until
from aof2.fs.bench.subject import Aof2
from aof2.fs.bench.verdict import BEST_PEER, Outcome, at_most

MIB: Final = 1 << 20
SMALL_BYTES: Final = 4096
MEDIUM_BYTES: Final = 512 << 10
MEDIUM_SHARE: Final = 25  # so many small files for each of 512 KiB
MANY: Final = 8  # threads, readers
LARGE_AT_ONCE: Final = (1, 4)
WAITS: Final = 20
BESIDE_MAX: Final = 500
COLD_SHARE: Final = 0.9  # of the bytes read, from the server: fewer, and it was not cold
LISTED_EVERY_S: Final = 0.2

TARGETS_MANY: Final = {BEST_PEER: 3.0}
TARGETS_MANY_WITHOUT_GEESEFS: Final = {Rclone.name: 8.0}  # stands for three times geesefs
TARGETS_ONE: Final = {BEST_PEER: 2.0}
OF_CREATION: Final = 0.5
COLD_TARGETS: Final = {"directory": 2.0, "random": 1.0}
REQUESTS_MAX: Final = 20.0
SMALL_MS_MAX: Final = 0.3
MEDIUM_MS_MAX: Final = 2.0
LARGE_TARGET: Final = 0.95
BESIDE_MAX_RATIO: Final = 3.0


class SmallPlan(Plan, frozen=True, kw_only=True):
    """`files` of 4 KiB, and large ones of `size`."""

    tree: Path | None = None
    tree_files: int = 1000


class SmallField(Field, frozen=True, kw_only=True):
    plan: SmallPlan
    bare: Bare
    tree: tree.Tree | None
    made: dict[str, int] = msgspec.field(default_factory=dict)  # of each contestant, in the folder that is read


class Sent(msgspec.Struct, frozen=True):
    """What was seen while small files were made, beside the time until they were durable: a figure a round."""

    created: dict[str, list[float]] = msgspec.field(default_factory=dict)
    requests: dict[str, list[float]] = msgspec.field(default_factory=dict)


def _folder(c: Contestant, threads: int, n: int) -> Path:
    return c.directory / f"made{threads}-{n}"


def _seed(threads: int, n: int) -> int:
    return 100 * threads + n


def made_by(threads: int) -> Callable[[SmallField], list[Measurement]]:
    def rows(f: SmallField) -> list[Measurement]:
        sent = Sent()
        outcome = f.race.turns(_made(f, threads, sent), f.everybody)
        return _judged(f, threads, outcome, sent)

    return rows


def _made(f: SmallField, threads: int, sent: Sent) -> Callable[[Contestant, int], float]:
    def attempt(c: Contestant, n: int) -> float:
        os.sync()
        before = c.requests()
        with f.race.metering(c) as meter:
            answer = _fill(f, c, threads, n)
            seconds = _until_durable(f, c, _folder(c, threads, n), answer)
            meter.units = count = answer["count"]
        after = c.requests()
        if before is not None and after is not None:
            sent.requests.setdefault(c.name, []).append(1000 * (after - before) / count)
        sent.created.setdefault(c.name, []).append(count / answer["seconds"])
        return count / seconds

    return attempt


def _fill(f: SmallField, c: Contestant, threads: int, n: int) -> dict[str, float]:
    plan, folder = f.plan, _folder(c, threads, n)
    answer = f.race.work("fill", folder, plan.files, threads, SMALL_BYTES, _seed(threads, n), plan.create_budget_s)
    if not answer["count"]:
        raise StepError(f"{c.name} made no file in {plan.create_budget_s:g} s")
    if (threads, n) == (MANY, 0):
        f.made[c.name] = int(answer["count"])
    return answer


def _until_durable(f: SmallField, c: Contestant, folder: Path, answer: dict[str, float]) -> float:
    """Seconds since the first create. Where the server has fewer objects than files, it goes on."""
    c.until_remote(folder)
    end = time.perf_counter()
    if c.object_a_file and "count" in answer:
        prefix = f"{folder.relative_to(c.directory)}/"
        server, bucket = c.setup.server, c.folder.name
        if server.object_count(bucket, prefix) < answer["count"]:
            what = f"the server has all files of {c.name}"
            wait_until(
                lambda: server.object_count(bucket, prefix) >= answer["count"], f.race.deadline_s, what, LISTED_EVERY_S
            )
            end = time.perf_counter()
    return end - answer["started"]


def _judged(f: SmallField, threads: int, outcome: Outcome, sent: Sent) -> list[Measurement]:
    what = f"{f.plan.files:,} files of 4 KiB, {threads} thread{'s'[: threads - 1]}"
    created = Outcome({name: statistics.median(rates) for name, rates in sent.created.items()})
    over_s3 = outcome.without(f.disk.name)
    rows = f.judge(f"{what}, to durable", "files/s", over_s3, _targets(f, threads))
    if subject.NAME in over_s3.rates and threads == MANY:
        rate, creation = over_s3.rates[subject.NAME], created.rates[subject.NAME]
        rows.append(compared(f"{what}, to durable", "files/s", rate, "their creation", creation, at_least=OF_CREATION))
    rows += f.judge(f"{what}, created", "files/s", created, {})
    if threads == MANY:
        requests = Outcome({name: statistics.median(counts) for name, counts in sent.requests.items()})
        rows += at_most(f"{what}, S3 requests", "a 1,000 files", requests, subject=subject.NAME, limit=REQUESTS_MAX)
        rows += _cost(what, over_s3, SMALL_MS_MAX)
    return rows


def _targets(f: SmallField, threads: int) -> dict[str, float]:
    if threads != MANY:
        return TARGETS_ONE
    return TARGETS_MANY if f.race.named(Geesefs.name) else TARGETS_MANY_WITHOUT_GEESEFS


def _cost(what: str, outcome: Outcome, limit_ms: float) -> list[Measurement]:
    """Processor time of the daemons for a file, from its create until it is durable."""
    costs = {name: cost_us / 1000 for name, cost_us in outcome.costs_us.items()}
    failures = {name: reason for name, reason in outcome.failures.items() if name == subject.NAME}
    seen = Outcome(costs, failures)
    return at_most(f"{what}, processor time", "ms/file", seen, subject=subject.NAME, limit=limit_ms)


def cold(f: SmallField) -> list[Measurement]:
    """All of them, after everything local was dropped, each opened once."""

    def make(c: Contestant) -> None:
        if c.name not in f.made:
            _until_durable(f, c, _folder(c, MANY, 0), _fill(f, c, MANY, 0))

    f.race.each(make, f.over_s3)
    rows: list[Measurement] = []
    for order, target in COLD_TARGETS.items():
        for readers in (1, MANY):
            what = (
                f"cold read of {f.plan.files:,} files of 4 KiB in {order} order, {readers} reader{'s'[: readers - 1]}"
            )
            outcome = f.race.turns(_cold(f, order, readers), f.over_s3)
            rows += f.judge(what, "files/s", outcome, {BEST_PEER: target})
    return rows


def _cold(f: SmallField, order: str, readers: int) -> Callable[[Contestant, int], float]:
    def attempt(c: Contestant, _: int) -> float:
        plan, folder = f.plan, _folder(c, MANY, 0)
        c.drop(folder)
        if isinstance(c, Aof2):  # packs that came with other files may be in its memory
            c.stop()
            c.start()
        os.sync()
        before = c.fetched_bytes() or 0
        with f.race.metering(c) as meter:
            answer = f.race.work(
                "drain", folder, plan.files, readers, SMALL_BYTES, _seed(MANY, 0), f.made[c.name],
                int(order == "random"), plan.create_budget_s,
            )  # fmt: skip
            meter.units = count = answer["count"]
        fetched = (c.fetched_bytes() or 0) - before
        if fetched < COLD_SHARE * count * SMALL_BYTES:
            raise StepError(f"{c.name} was not cold: {fetched:,} bytes came from the server")
        return count / answer["seconds"]

    return attempt


def medium(f: SmallField) -> list[Measurement]:
    """What a file of 512 KiB costs."""
    count = max(f.plan.files // MEDIUM_SHARE, 1)

    def attempt(c: Contestant, n: int) -> float:
        folder = c.directory / f"medium{n}"
        with f.race.metering(c) as meter:
            answer = f.race.work("fill", folder, count, MANY, MEDIUM_BYTES, n, f.plan.create_budget_s)
            seconds = _until_durable(f, c, folder, answer)
            meter.units = answer["count"]
        return answer["count"] / seconds

    outcome = f.race.turns(attempt, f.subjects)
    what = f"{count:,} files of 512 KiB, {MANY} threads"
    return f.judge(f"{what}, to durable", "files/s", outcome, {}) + _cost(what, outcome, MEDIUM_MS_MAX)


def large(f: SmallField) -> list[Measurement]:
    """From the first write to durable; boto3 uploads the same bytes out of files."""
    rows: list[Measurement] = []
    for count in LARGE_AT_ONCE:
        outcome = f.race.turns(_large(f, count), [*f.subjects, f.bare])
        one = f"{f.plan.size // MIB} MiB"
        what = f"{count} × {one} at once" if count > 1 else one
        rows += f.judge(f"{what}, to durable", "B/s", outcome, {f.bare.name: LARGE_TARGET})
    return rows


def _large(f: SmallField, count: int) -> Callable[[Contestant, int], float]:
    server, size = f.bare.setup.server, f.plan.size

    def attempt(c: Contestant, n: int) -> float:
        folder = c.directory / f"large{count}-{n}"
        os.sync()
        with f.race.metering(c) as meter:
            answer = f.race.work("writes", folder, count, size, 1000 * count + 10 * n)
            if isinstance(c, Bare):
                os.sync()
                prefix = f"{folder.name}/"
                answer = f.race.work("uploads", server.endpoint_url, c.name, prefix, folder, env=server.environ())
                seconds = answer["seconds"]
            else:
                seconds = _until_durable(f, c, folder, answer)
                meter.units = count * size / MIB
        f.race.processes.run(["rm", "-rf", folder], deadline_s=f.race.deadline_s)
        return count * size / seconds

    return attempt


def beside(f: SmallField) -> list[Measurement]:
    """A small file that is waited for while a large one is on its way, and alone."""

    def attempt(c: Contestant, n: int) -> float:
        if not isinstance(c, Aof2):
            raise StepError(f"{c.name} cannot be waited for")
        place = (c.directory, c.control, subject.TENANT)
        alone = f.race.work("durable", *place, WAITS, n)["seconds"]
        return f.race.work("beside", *place, BESIDE_MAX, n, f.plan.size)["seconds"] / alone

    outcome = f.race.turns(attempt, f.subjects)
    what = f"4 KiB file written and waited for beside {f.plan.size // MIB} MiB on their way"
    return at_most(what, "× alone", outcome, subject=subject.NAME, limit=BESIDE_MAX_RATIO)


def cloned(f: SmallField) -> list[Measurement]:
    """A source tree, from the start of its clone to durable."""
    if f.tree is None:
        return []
    made = f.tree

    def attempt(c: Contestant, n: int) -> float:
        folder = c.directory / f"tree{n}"
        with f.race.metering(c) as meter:
            answer = tree.run(f.race, tree.CHORES[0].lines(made, folder))
            seconds = _until_durable(f, c, folder, answer)
            meter.units = made.files
        return made.files / seconds

    outcome = f.race.turns(attempt, f.over_s3)
    return f.judge(f"git clone of {made.files:,} files, to durable", "files/s", outcome, _targets(f, MANY))


ROWS: Final[dict[str, Callable[[SmallField], list[Measurement]]]] = {
    "eight": made_by(MANY),
    "one": made_by(1),
    "cold": cold,
    "medium": medium,
    "large": large,
    "beside": beside,
    "tree": cloned,
}
