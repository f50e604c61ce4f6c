"""CreateCheckpoint: sealed objects go to the remote, some at a time, under one checkpoint id.

    plan → (quota → stage → validate → upload → publish) → clean up

Small objects go in bulk, as packs (`tiering.packs`), the others one by one (`tiering.publish`).

Invariants
- The job is over with the commit that publishes the last of its objects; where that cannot be said there, in one of
  its own.
- The plan, with the id that the blobs' keys are made of, is in the commit that enqueues the job: every attempt of the
  job puts the same bytes under the same keys, in the order of the plan.
- An object is in at most one plan that is not over. A failed job keeps its objects: they are tried again with it.
- Published objects are passed over by the next attempt, and so is what was unlinked or opened for writing meanwhile.
- One damaged object does not keep the others of its plan from being published; the job fails when they are.

Owner: planning runs on the writer thread, the rest on the trio thread. A crash leaves a job that goes on where it was.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

import msgspec
import trio

from aof2.engine import objects
from aof2.engine.aio import open_nursery
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import JobRow, JobType, ObjectRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.errors import CorruptError
from aof2.engine.foreground import Foreground
from aof2.engine.jobs import queue
from aof2.engine.jobs.errors import JobCancelledError, judge
from aof2.engine.jobs.worker import JobContext
from aof2.engine.objects import CHECKPOINT, ObjectGoneError
from aof2.engine.observe.logs import log_event
from aof2.engine.observe.metrics import StorageMetrics
from aof2.engine.remote import keys
from aof2.engine.tiering import packs
from aof2.engine.tiering.publish import Publisher, Target
from aof2.engine.tiering.tally import Tally

log = logging.getLogger(__name__)

PLAN_BYTES_MAX: Final = 1 << 30
PLAN_OBJECTS_MAX: Final = 2048
PLANS_LIVE_MAX: Final = 4
OBJECTS_PARALLEL: Final = 8
PACKS_PARALLEL: Final = 2
LET_PASS_S: Final = 0.1  # what an object waits for requests to be answered first
SAVES_PER_JOB: Final = 16  # of progress; a save is a row in the log
CRASH_POINTS: Final = ("checkpoint.object_published", "checkpoint.cleaned_up")


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """What one job publishes. Written to disk: append fields, with a default."""

    checkpoint_id: int
    objects: tuple[tuple[int, int], ...]
    size_bytes: int


_plans: Final = msgspec.msgpack.Decoder(Plan)


def plan_of(row: JobRow) -> Plan:
    return _plans.decode(queue.envelope(row).body)


def make_plans(b: Batch, *, bytes_max: int, objects_max: int, unfinished: queue.Unfinished) -> list[int]:
    """Enqueues jobs for sealed objects that no job has yet; their numbers. With PLANS_LIVE_MAX jobs on their way it
    waits: planning goes on when one of them is over."""
    taken, live = _taken(b.view, b.stream_id, unfinished)
    made: list[int] = []
    plan: list[ObjectRow] = []
    size_bytes = 0
    for row in _plannable(b, taken):
        if plan and (len(plan) == objects_max or size_bytes + row.size > bytes_max):
            made.append(_enqueue(b, plan))
            plan, size_bytes = [], 0
        if live + len(made) >= PLANS_LIVE_MAX:
            return made
        plan.append(row)
        size_bytes += row.size
    if plan:
        made.append(_enqueue(b, plan))
    return made


class Chosen(NamedTuple):
    """What goes up as packs, and what by itself."""

    bulks: list[packs.Bulk]
    rest: list[ObjectRow]


class Begun(NamedTuple):
    """A job that is RUNNING as soon as it is in the log, the keys of the uploads that its commit announced, and what
    that commit found to be done. `foretold`: that commit is the one of the seal, and the log goes up with it."""

    row: JobRow
    announced: frozenset[str]
    chosen: Chosen
    foretold: bool = False


def begin(
    b: Batch, sealed: Sequence[ObjectRow], tenant: str, *, lease_ms: int, unfinished: queue.Unfinished, lone: bool
) -> Begun | None:
    """Plans what this batch seals and claims the plan, in the same commit; None where the planner has to look. Where
    a caller waits alone for one file or a few, all of them foretold, the log goes up beside them."""
    taken, live = _taken(b.view, b.stream_id, unfinished)
    plan = [row for row in sealed if (row.ino, row.generation) not in taken]
    if not plan or live >= PLANS_LIVE_MAX or len(plan) > PLAN_OBJECTS_MAX or _size(plan) > PLAN_BYTES_MAX:
        return None
    begun = begin_new(b, _enqueue(b, plan), tenant, lease_ms=lease_ms)
    blobs = sum(len(row.data_chunks) for row in plan)
    b.awaited = lone and not begun.chosen.bulks and blobs == len(begun.announced)
    return begun._replace(foretold=b.awaited)


def begin_new(b: Batch, job_id: int, tenant: str, *, lease_ms: int) -> Begun:
    """Claims a job that this batch enqueued."""
    row = queue.claim_new(b, job_id, lease_ms=lease_ms)
    plan = plan_of(row)
    planned = [one for key in plan.objects if (one := b.get(t.OBJECTS, key)) is not None]
    b.read_ahead(t.CHUNKS, [one.chunks[0] for one in planned if len(one.data_chunks) == 1])
    b.read_ahead(t.BLOBS, [one.sha256 for one in planned if len(one.data_chunks) == 1])
    chosen = Chosen(*packs.choose(planned, partial(b.get, t.CHUNKS), partial(b.get, t.BLOBS)))
    announced = packs.announce(b, tenant, plan.checkpoint_id, chosen.bulks)
    alone = _announce(b, chosen.rest[:OBJECTS_PARALLEL], tenant, plan.checkpoint_id)
    return Begun(row, alone | announced, chosen)


def _announce(b: Batch, first: Sequence[ObjectRow], tenant: str, checkpoint_id: int) -> frozenset[str]:
    """UploadStarted of the blobs that are uploaded first: of small objects whose content no other upload brings."""
    if not first:
        return frozenset()
    prefix = t.STREAM.pack(b.stream_id) + t.SEGMENT_PENDING_UPLOAD
    known = {keys.content_of(name) for name, _ in b.view.raw_scan("segments", prefix)}
    announced: list[tuple[int, str]] = []
    for row in first:
        chunk = b.get(t.CHUNKS, row.data_chunks[0]) if len(row.data_chunks) == 1 else None
        content = chunk.sha256.hex().encode() if chunk is not None else b""
        if chunk is None or chunk.key or content in known or b.get(t.BLOBS, chunk.sha256) is not None:
            continue
        known.add(content)
        key = keys.chunk_blob_key(tenant, checkpoint_id, chunk.chunk_id, chunk.generation, chunk.sha256)
        announced.append((chunk.chunk_id, key))
    objects.upload_started(b, announced)
    return frozenset(key for _, key in announced)


def _size(plan: Sequence[ObjectRow]) -> int:
    return sum(row.size for row in plan)


def is_plannable(view: View, tenant_id: int, *, unfinished: queue.Unfinished) -> bool:
    """Whether `make_plans` would make any."""
    if next(view.scan(tenant_id, t.UNPUBLISHED), None) is None:
        return False
    taken, live = _taken(view, tenant_id, unfinished)
    return live < PLANS_LIVE_MAX and any(key not in taken for key, _ in view.scan(tenant_id, t.UNPUBLISHED))


def _taken(view: View, tenant_id: int, unfinished: queue.Unfinished) -> tuple[set[tuple[int, int]], int]:
    """The objects that some job has, and how many of those jobs are on their way."""
    taken: set[tuple[int, int]] = set()
    live = 0
    for job in unfinished.of(view, tenant_id):
        if job.type == JobType.CREATE_CHECKPOINT:
            taken.update(plan_of(job).objects)
            live += job.state in queue.LIVE
    return taken, live


def _plannable(b: Batch, taken: set[tuple[int, int]]) -> Iterator[ObjectRow]:
    waiting = (key for key, _ in b.scan(t.UNPUBLISHED))
    while some := list(islice(waiting, PLAN_OBJECTS_MAX)):
        b.read_ahead(t.OBJECTS, some)
        for key in some:
            row = b.get(t.OBJECTS, key)
            if row is None:
                objects.unqueue_upload(b, *key)  # unlinked before it was published
            elif row.state == ObjectState.SEALED and key not in taken:
                yield row


def _enqueue(b: Batch, plan: list[ObjectRow]) -> int:
    checkpoint_id = b.next_id("checkpoint_id")
    objects = tuple((row.ino, row.generation) for row in plan)
    body = t.encode(Plan(checkpoint_id, objects, _size(plan)))
    blobs = sum(len(row.data_chunks) for row in plan)
    return queue.enqueue(b, JobType.CREATE_CHECKPOINT, f"checkpoint/{checkpoint_id}", body, total=blobs)[0]


class _Work:
    """One attempt: what is left to do, and what came of it so far."""

    def __init__(
        self, bulks: Sequence[packs.Bulk], rest: Sequence[ObjectRow], done: int, total: int, saved: int
    ) -> None:
        self.bulks = iter(bulks)
        self.todo = deque(rest)
        self.bulk_count = len(bulks)
        # Of them, whose publication was not submitted to the log yet.
        self.unrecorded = len(rest) + sum(len(bulk.items) for bulk in bulks)
        self.done = done
        self.total = total
        self.saved = saved
        self.save_due = trio.Event()
        self.tally = Tally(self._blob_done, self.total - self.done)
        self.error: Exception | None = None
        self.damaged: list[str] = []
        self.ending = False  # the last publication is on its way to the log, and the job's end with it
        self.released_bytes: int | None = None  # of quota, once it is cleaned up

    def _blob_done(self, count: int) -> None:
        self.done += count
        # The last one is in the commit that ends the job.
        if self.done < self.total and self.done - self.saved >= max(1, self.total // SAVES_PER_JOB):
            self.save_due.set()


class CreateCheckpoint:
    """The executor."""

    def __init__(
        self,
        publisher: Publisher,
        compression_of: Callable[[str], str],
        metrics: StorageMetrics,
        foreground: Foreground,
        on_published: Callable[[], object],
    ) -> None:
        self._env = publisher.hot.env
        self._publisher = publisher
        self._packer = packs.Packer(publisher)
        self._compression_of = compression_of
        self._metrics = metrics
        self._foreground = foreground
        self._on_published = on_published

    async def run(self, job: JobContext) -> None:
        plan = plan_of(job.row)
        work = self._look(job, plan)
        _tell(job, "started", tenant=job.tenant, plan_size_bytes=plan.size_bytes, wal_range=None)
        through = False
        try:
            work.tally.on_staged = partial(_tell_staged, job)
            work.tally.on_uploaded = partial(_tell_uploaded, job)
            await self._publish_all(job, plan, work)
            through = True
        except JobCancelledError:
            raise
        except Exception as e:
            verdict = judge(e, job.row.type)
            stage = "validate" if isinstance(e, CorruptError) else work.tally.failed_stage or "plan"
            _tell(job, "failed", error=verdict.reason, stage=stage, retryable=verdict.retryable)
            raise
        finally:
            through = through or job.finished  # also where the runner is stopped right after the commit that ended it
            if through:
                self._tell_through(job, plan, work)
            self._clean_up(job, work)
            _tell(job, "cleaned_up", quota_released_bytes=work.released_bytes or 0)
            if through and not job.finished:
                self._measure(job)

    async def _publish_all(self, job: JobContext, plan: Plan, work: _Work) -> None:
        # A small file, or one pack of them, which a caller may wait for: tasks would take longer than it.
        if work.unrecorded <= 1 and work.total - work.done <= 1:
            await self._publish_some(job, plan, work)
        elif work.bulk_count == 1 and not work.todo:
            await self._publish_bulks(job, plan, work)
            await self._publish_some(job, plan, work)
        else:
            await self._publish_in_parallel(job, plan, work)
        if not job.finished:
            await self._save(job, work)
        if work.error is not None:
            raise work.error
        if work.damaged:
            raise CorruptError(f"{len(work.damaged)} objects cannot be published: {'; '.join(work.damaged[:10])}")
        job.check_cancelled()

    async def _publish_in_parallel(self, job: JobContext, plan: Plan, work: _Work) -> None:
        async with open_nursery() as saver:
            saver.start_soon(self._save_often, job, work)
            async with open_nursery() as nursery:
                for _ in range(min(PACKS_PARALLEL, work.bulk_count)):
                    nursery.start_soon(self._publish_bulks, job, plan, work)
                for _ in range(min(OBJECTS_PARALLEL, len(work.todo))):
                    nursery.start_soon(self._publish_some, job, plan, work)
            await self._publish_some(job, plan, work)  # what was left over by its bulk
            saver.cancel_scope.cancel()

    def _look(self, job: JobContext, plan: Plan) -> _Work:
        """What an earlier attempt left to do, or the commit that began the job found. Blobs of objects that are gone
        leave the total, not the count."""
        if isinstance(job.begun_with, Chosen):
            bulks, rest = job.begun_with
            return _Work(bulks, rest, 0, job.row.total, job.row.done)
        todo: list[ObjectRow] = []
        done = 0
        with self._publisher.catalog.view() as view:
            for row in view.get_many(job.tenant_id, t.OBJECTS, plan.objects):
                if row is not None and row.state == ObjectState.SEALED:
                    todo.append(row)
                elif row is not None and row.state == ObjectState.PUBLISHED:
                    done += len(row.data_chunks)
            chunk_of, blob_of = partial(view.get, job.tenant_id, t.CHUNKS), partial(view.get, job.tenant_id, t.BLOBS)
            bulks, rest = packs.choose(todo, chunk_of, blob_of)
        return _Work(bulks, rest, done, done + sum(len(row.data_chunks) for row in todo), job.row.done)

    async def _publish_bulks(self, job: JobContext, plan: Plan, work: _Work) -> None:
        """One of several tasks that take the next bulk until there is none; errors as in `_publish_some`."""
        for bulk in work.bulks:
            if work.error is not None or job.cancel_requested:
                return
            await self._foreground.let_pass(LET_PASS_S)
            try:
                await self._publish_bulk(job, plan, work, bulk)
            except Exception as e:  # noqa: BLE001 (kept for the job's end)
                work.error = work.error or e

    async def _publish_bulk(self, job: JobContext, plan: Plan, work: _Work, bulk: packs.Bulk) -> None:
        done, bad = await self._packer.publish(
            job.tenant_id,
            job.tenant,
            bulk,
            plan.checkpoint_id,
            self._compression_of(job.tenant),
            work.tally,
            announced=job.announced,
            along=partial(self._with_last, job, plan, work, len(bulk.items)),
        )
        self._env.failpoint("checkpoint.object_published")
        self._on_published()
        over = {*done, *bad}
        for item in bulk.items if len(over) < len(bulk.items) else ():
            row = item.row
            if (row.ino, row.generation) not in over and self._is_still(job.tenant_id, row):
                work.todo.append(row)
                work.unrecorded += 1
        for item in bulk.items if bad else ():
            error = bad.get((item.row.ino, item.row.generation))
            if error is not None and self._is_still(job.tenant_id, item.row):
                work.damaged.append(f"object {item.row.ino}.{item.row.generation}: {error}")

    async def _publish_some(self, job: JobContext, plan: Plan, work: _Work) -> None:
        """One of several tasks that take the next object until there is none. An error stops them all, each after the
        object in hand, which is then not done in vain."""
        while work.todo:
            if work.error is not None or job.cancel_requested:
                return
            row = work.todo.popleft()
            await self._foreground.let_pass(LET_PASS_S)
            try:
                await self._publish_one(job, plan, work, row)
            except CorruptError as e:
                if self._is_still(job.tenant_id, row):
                    work.damaged.append(f"object {row.ino}.{row.generation}: {e}")
            except ObjectGoneError:
                continue  # unlinked meanwhile
            except Exception as e:  # noqa: BLE001 (kept for the job's end)
                if self._is_still(job.tenant_id, row):
                    work.error = work.error or e

    async def _publish_one(self, job: JobContext, plan: Plan, work: _Work, row: ObjectRow) -> None:
        is_wanted = partial(self._is_still, job.tenant_id, row)
        target = Target(
            job.tenant_id,
            job.tenant,
            row,
            self._compression_of(job.tenant),
            is_wanted=is_wanted,
            announced=job.announced,
            foretold=job.foretold,
        )
        if not is_wanted():
            await trio.lowlevel.checkpoint()
            return
        along = partial(self._with_last, job, plan, work)
        await self._publisher.publish(target, plan.checkpoint_id, job.name, work.tally, along)
        self._env.failpoint("checkpoint.object_published")
        self._on_published()

    def _with_last(self, job: JobContext, plan: Plan, work: _Work, count: int = 1) -> Callable[[Batch], None] | None:
        """What the publication of so many that is about to be recorded holds besides: the last one, the end of its
        job."""
        work.unrecorded -= count
        if work.unrecorded or work.error is not None or work.damaged or job.cancel_requested:
            return None

        work.ending = True
        self._clean_up(job, work)  # a job that is over holds nothing

        def end(b: Batch) -> None:
            # Others may have failed, or be sealed anew: the rows tell. What is sealed waits for its upload.
            b.read_ahead(t.UNPUBLISHED, plan.objects)
            rows = (b.get(t.OBJECTS, key) for key in plan.objects if b.get(t.UNPUBLISHED, key) is not None)
            if not any(row is not None and row.state == ObjectState.SEALED for row in rows):
                job.finish_along(b, work.done, work.total, partial(self._measure, job))

        return end

    def _clean_up(self, job: JobContext, work: _Work) -> None:
        """Once: scratch and quota are given back, what was moved is counted."""
        if work.released_bytes is None:
            self._count(work.tally)
            self._publisher.clean_up(job.name)
            work.released_bytes = work.tally.released_bytes + self._publisher.quota.release_job(job.name)
            self._env.failpoint("checkpoint.cleaned_up")

    async def _save_often(self, job: JobContext, work: _Work) -> None:
        while True:
            await work.save_due.wait()
            work.save_due = trio.Event()
            if not work.ending:
                await self._save(job, work)

    async def _save(self, job: JobContext, work: _Work) -> None:
        if work.done != work.saved or work.total != job.row.total:
            work.saved = work.done
            await job.progress(work.done, work.total)

    def _is_still(self, tenant_id: int, row: ObjectRow) -> bool:
        """Whether the object is what it was when the attempt began: not unlinked, not opened for writing."""
        now = self._publisher.catalog.get(tenant_id, t.OBJECTS, (row.ino, row.generation))
        return now is not None and now.state == ObjectState.SEALED and now.sha256 == row.sha256

    # -- telling -------------------------------------------------------------------------------------------------

    def _tell_through(self, job: JobContext, plan: Plan, work: _Work) -> None:
        work.tally.finish()
        generation = self._publisher.catalog.get(job.tenant_id, t.WATERMARKS, CHECKPOINT) or 0
        _tell(job, "published", manifest_generation=generation, checkpoint_id=plan.checkpoint_id)

    def _measure(self, job: JobContext) -> None:
        took_ms = max(0, self._env.now_ms() - job.row.created_ms)
        self._metrics.checkpoint_duration_seconds.observe(took_ms / 1000)

    def _count(self, tally: Tally) -> None:
        self._metrics.checkpoint_bytes_written_local.inc(tally.staged_bytes)
        self._metrics.checkpoint_bytes_written_remote.inc(tally.uploaded_bytes)


def _tell(job: JobContext, event: str, **fields: Any) -> None:
    log_event(log, f"checkpoint.{event}", job_id=job.name, **fields)


def _tell_staged(job: JobContext, tally: Tally) -> None:
    took_ms = int(tally.staged_s * 1000)
    _tell(job, "staged", staged_chunks=tally.staged_blobs, staged_bytes=tally.staged_bytes, duration_ms=took_ms)


def _tell_uploaded(job: JobContext, tally: Tally) -> None:
    took_ms, blobs = int(tally.uploaded_s * 1000), tally.uploaded_blobs
    _tell(job, "uploaded", uploaded_blobs=blobs, uploaded_bytes=tally.uploaded_bytes, duration_ms=took_ms)
