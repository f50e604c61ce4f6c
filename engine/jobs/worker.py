"""JobRunner: takes jobs that are due, runs them a few at a time, and writes down what came of them.

It does not poll: it sleeps until a job is enqueued, one ends, or the backoff of the next one is over.

Invariants
- A job runs once at a time: it is claimed in a commit, its lease is renewed while it runs, and its number is kept here.
- Whatever an executor does, its job ends up finished, queued again, failed or cancelled, and its quota is given back.
- Being shut down is not failing: the job is QUEUED, as it was, for the next start.
- Checkpoints may take every slot; the others leave some free, so that a long verification does not hold up uploads.

Owner: the trio thread that runs `run`. `wake` may be called from any thread. A crash leaves jobs RUNNING, which
`recover` puts back; the executors find out themselves how far they had come.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import trio

from aof2.engine.aio import open_nursery, result_of, soon
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import JobRow, JobState, JobType
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.tables import encode
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import FatalIOError, LimitError, ReadOnlyError
from aof2.engine.jobs import queue
from aof2.engine.jobs.errors import JobCancelledError, JobGoneError, JobRefusedError, judge
from aof2.engine.quota import StorageQuota

log = logging.getLogger(__name__)

PARALLEL: Final = 4
BACKGROUND_MAX: Final = 2
LEASE_S: Final = 60.0
REFUSED_S: Final = 5.0  # until the catalog is asked again after it took no writes
CRASH_POINTS: Final = ("job.enqueued", "job.claimed", "job.progressed", "job.executed", "job.finished")

# The catalog takes no writes: fenced, failed, full, its log's disk full, or this tenant's stream is quarantined.
REFUSALS: Final = (ReadOnlyError, FatalIOError, LimitError, OSError)

JobKey = tuple[int, int]  # tenant id, job id


class Changes:
    """Tells all waiters that something changed; they look for themselves whether it is what they wait for."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = trio.Event()

    def next(self) -> trio.Event:
        """Set at the next change. Take it before looking, then wait."""
        return self._event


class JobContext:
    """A job as its executor sees it."""

    def __init__(
        self,
        runner: JobRunner,
        row: JobRow,
        tenant: str,
        announced: frozenset[str] = frozenset(),
        begun_with: object = None,
        *,
        foretold: bool = False,
    ) -> None:
        """`announced`: keys of uploads that are in the log as started, by the commit that enqueued and claimed the job;
        `begun_with`: what that commit knew of it besides; `foretold`: that commit sealed the objects, and went up."""
        self.row = row
        self.announced = announced
        self.begun_with = begun_with
        self.foretold = foretold
        self.tenant = tenant
        self.tenant_id = row.tenant_id
        self.name = queue.job_name(row.tenant_id, row.job_id)
        self.body = queue.envelope(row).body
        self.cancel_requested = False
        self.finished = False  # its end is in the commit that did the last of its work
        self.scope = trio.CancelScope()  # of its executor
        self.stopped_by: Exception | None = None  # its lease could not be renewed
        self._runner = runner

    def check_cancelled(self) -> None:
        """Between two steps: JobCancelledError when the operator cancelled the job."""
        if self.cancel_requested:
            raise JobCancelledError(f"job {self.row.job_id} was cancelled")

    async def commit(self, work: Callable[[Batch], object], *, sync: bool = False) -> None:
        """A change of the tenant's rows."""
        await result_of(self._runner.writer.submit(self.tenant_id, work, sync=sync))

    async def progress(
        self,
        done: int,
        total: int,
        *,
        body: bytes | None = None,
        report: Mapping[str, object] | None = None,
        along: Callable[[Batch], object] | None = None,
        sync: bool = False,
    ) -> None:
        """Writes down how far it is; `along` changes rows in the same commit."""
        packed = None if report is None else encode(dict(report))

        def work(b: Batch) -> None:
            if along is not None:
                along(b)
            queue.progress(b, self.row.job_id, done, total, body=body, report=packed)
            b.foretold = along is None  # who goes on with the job finds out how far it is

        await self.commit(work, sync=sync)
        self._runner.env.failpoint("job.progressed")
        self._runner.changes.fire()

    def finish_along(self, b: Batch, done: int, total: int, on_finished: Callable[[], object]) -> None:
        """Ends the job in the commit that does the last of its work. On the writer thread, like `on_finished`: a caller
        may wait for what that thread does next."""

        def finished() -> None:
            self.finished = True
            self._runner.tell_soon()
            self._runner.env.failpoint("job.progressed")
            on_finished()
            self._runner.env.failpoint("job.finished")

        self._runner.env.failpoint("job.executed")
        if queue.finish_along(b, self.row.job_id, done, total):
            b.after_commit.append(finished)


class Executor(Protocol):
    """Does the jobs of one type. Called again for a job it had begun, it goes on: it does not start over."""

    async def run(self, job: JobContext) -> None: ...


class RefuseTruncation:
    """TruncateAppendOnly has nothing to work on before there are append tenants: refused, never half done."""

    async def run(self, job: JobContext) -> None:
        raise JobRefusedError(
            f"TruncateAppendOnly of tenant {job.tenant} is refused: append streams cannot be truncated yet; "
            "nothing was changed"
        )


@dataclass(eq=False)
class JobRunner:
    """Runs the jobs of every tenant of a volume."""

    env: Env
    catalog: Catalog
    writer: CatalogWriter
    quota: StorageQuota
    tenants: Callable[[], dict[int, str]]
    executors: Mapping[JobType, Executor]
    lease_s: float
    on_over: Callable[[JobContext], object]

    def __post_init__(self) -> None:
        self.executors = dict(self.executors)
        self.changes = Changes()
        self._running: dict[JobKey, JobContext] = {}
        self.unfinished = queue.Unfinished()
        self._kept = 0  # places for jobs whose claim is on its way to the log
        self._nursery: trio.Nursery | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._woken = trio.Event()
        self._refused = False

    # -- for callers ---------------------------------------------------------------------------------------------

    async def enqueue(self, tenant_id: int, job_type: JobType, token: str, body: bytes = b"", *, total: int = 0) -> int:
        """The job with this token: a new one, or the one that is not over yet. Durable when this returns."""
        work = partial(queue.enqueue, job_type=job_type, token=token, body=body, total=total)
        job_id, _ = await result_of(self.writer.submit(tenant_id, work, sync=True))
        self.env.failpoint("job.enqueued")
        self._wake()
        return job_id

    async def cancel(self, tenant_id: int, job_id: int) -> JobState:
        """Stops the job, at once or between two steps; the state it is in now."""
        state = await result_of(self.writer.submit(tenant_id, partial(queue.cancel, job_id=job_id), sync=True))
        running = self._running.get((tenant_id, job_id))
        if running is not None:
            running.cancel_requested = True
        self.changes.fire()
        return state

    async def retry(self, tenant_id: int, job_id: int) -> bool:
        """A failed job, or one in its backoff, is tried again now; False when there is nothing to retry."""
        done = await result_of(self.writer.submit(tenant_id, partial(queue.retry, job_id=job_id)))
        self._wake()
        return done

    async def kick(self) -> list[JobKey]:
        """An operator acted: every failed job and every one in its backoff is tried again now; which."""
        kicked = []
        for tenant in sorted(self.tenants()):
            for row in self.live(tenant):
                waits = row.state == JobState.QUEUED and row.not_before_ms > 0
                if (row.state == JobState.FAILED or waits) and await self.retry(tenant, row.job_id):
                    kicked.append((tenant, row.job_id))
        return kicked

    def jobs(self, tenant_id: int) -> list[JobRow]:
        with self.catalog.view() as view:
            return list(queue.jobs(view, tenant_id))

    @property
    def running(self) -> int:
        """How many jobs have an executor; a moment longer than their rows say."""
        return len(self._running)

    def is_running(self, job_type: JobType) -> bool:
        """Whether any job of that type has an executor."""
        return any(job.row.type == job_type for job in self._running.values())

    def running_rows(self, job_type: JobType) -> list[JobRow]:
        """Those of the type that have one, as they were when it began."""
        return [job.row for job in self._running.values() if job.row.type == job_type]

    def live(self, tenant_id: int) -> list[JobRow]:
        """Those that are not over; failed ones, too."""
        with self.catalog.view() as view:
            return self.unfinished.of(view, tenant_id)

    def job(self, tenant_id: int, job_id: int) -> JobRow | None:
        return next((row for row in self.jobs(tenant_id) if row.job_id == job_id), None)

    def wake(self) -> None:
        """Jobs may be due. From any thread."""
        if self._token is not None:
            soon(self._token, self._wake)

    def tell_soon(self) -> None:
        """Something changed: who waits for that looks. From any thread."""
        if self._token is not None:
            soon(self._token, self.changes.fire)

    def _wake(self) -> None:
        self._woken.set()
        self.changes.fire()

    # -- the loop ------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        self._token = trio.lowlevel.current_trio_token()
        await self.recover()
        async with open_nursery() as self._nursery:
            try:
                self._nursery.start_soon(self._keep_leases)
                task_status.started()
                await self._start_forever()
            finally:
                self._nursery = None  # closed to what is claimed from here on: the next start finds it

    async def _start_forever(self) -> None:
        while True:
            self._woken = trio.Event()
            with contextlib.suppress(ReadOnlyError, FatalIOError):  # said already; the next wake-up may find it well
                await self._start_due()
            with trio.move_on_after(self._idle_s()):
                await self._woken.wait()

    async def recover(self) -> None:
        """Puts back what an earlier process was running. Before anything is claimed."""
        for tenant_id in self.tenants():
            with contextlib.suppress(*REFUSALS):
                if any(row.state not in (JobState.DONE, JobState.CANCELLED) for row in self.jobs(tenant_id)):
                    await result_of(self.writer.submit(tenant_id, queue.recover))

    @contextlib.contextmanager
    def place(self) -> Iterator[int]:
        """Keeps a place for a checkpoint that the caller's commit enqueues and claims, to be handed to `start`; the
        milliseconds of its lease, 0 where no place is free."""
        free = self._nursery is not None and JobType.CREATE_CHECKPOINT in self._free_types()
        self._kept += free
        try:
            yield int(self.lease_s * 1000) if free else 0
        finally:
            self._kept -= free

    def start(
        self,
        row: JobRow,
        announced: frozenset[str] = frozenset(),
        begun_with: object = None,
        *,
        foretold: bool = False,
    ) -> None:
        """Runs a job that was claimed. Without a nursery its lease runs out, and it is claimed again."""
        if self._nursery is not None:
            tenant = self.tenants()[row.tenant_id]
            job = JobContext(self, row, tenant, announced, begun_with, foretold=foretold)
            self._running[row.tenant_id, row.job_id] = job
            self._nursery.start_soon(self._run_one, job)

    def _free_types(self) -> set[JobType]:
        """What may be started now."""
        if len(self._running) + self._kept >= PARALLEL:
            return set()
        background = sum(job.row.type != JobType.CREATE_CHECKPOINT for job in self._running.values())
        return set(JobType) if background < BACKGROUND_MAX else {JobType.CREATE_CHECKPOINT}

    async def _start_due(self) -> None:
        """Claims in turns, one job a tenant and round, until nothing is due or no slot is free."""
        claimed = True
        while claimed:
            claimed = False
            for tenant_id in sorted(self.tenants()):
                row = await self._claim(tenant_id)
                if row is not None:
                    claimed = True
                    self.start(row)

    async def _claim(self, tenant_id: int) -> JobRow | None:
        types = self._free_types()
        mine = {job_id for tenant, job_id in self._running if tenant == tenant_id}
        now_ms = self.env.now_ms()
        # Looking costs nothing; a claim is a commit.
        if not any(
            row.type in types and row.job_id not in mine and queue.is_due(row, now_ms) for row in self.live(tenant_id)
        ):
            return None
        work = partial(queue.claim, lease_ms=int(self.lease_s * 1000), types=types, skip=mine)
        try:
            row = await result_of(self.writer.submit(tenant_id, work))
        except REFUSALS:  # said already, and not by us
            self._refused = True
            return None
        self.env.failpoint("job.claimed")
        self.changes.fire()
        return row

    def _idle_s(self) -> float:
        """How long there is nothing to start, unless `_wake` comes first."""
        types, now_ms = self._free_types(), self.env.now_ms()
        waits = [
            wait_ms
            for tenant_id in (self.tenants() if types else ())
            for row in self.live(tenant_id)
            if row.type in types and (tenant_id, row.job_id) not in self._running
            if (wait_ms := queue.due_in_ms(row, now_ms)) is not None
        ]
        return min(waits) / 1000 if waits else math.inf

    # -- one job -------------------------------------------------------------------------------------------------

    async def _run_one(self, job: JobContext) -> None:
        try:
            await self._execute(job)
            if not job.finished:
                self.env.failpoint("job.executed")
                await self._record(job, queue.finish)
                self.env.failpoint("job.finished")
        except JobCancelledError:
            await self._record(job, queue.cancelled)
        except JobGoneError:
            log.info("job was taken away while it ran", extra={"job_id": job.row.job_id, "tenant": job.tenant})
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await self._record(job, queue.release)
            raise
        except Exception as e:  # noqa: BLE001 (whatever it was, the job must not be lost)
            await self._failed(job, e)
        finally:
            del self._running[job.tenant_id, job.row.job_id]
            with self.catalog.view() as view:
                self.unfinished.learn(view, job.tenant_id)
            self.quota.release_job(job.name)
            self.on_over(job)
            self._wake()

    async def _execute(self, job: JobContext) -> None:
        executor = self.executors.get(job.row.type)
        if executor is None:
            raise JobRefusedError(f"no worker here does jobs of type {job.row.type.name}")
        with job.scope:
            await executor.run(job)
        if job.scope.cancelled_caught and job.stopped_by is not None:
            raise job.stopped_by

    async def _keep_leases(self) -> None:
        """Of all that run: a task a job would cost a short one as much as its work. An executor whose job is not its
        own any more is stopped."""
        while True:
            await trio.sleep(self.lease_s / 3)
            for job in list(self._running.values()):
                work = partial(queue.renew, job_id=job.row.job_id, lease_ms=int(self.lease_s * 1000))
                try:
                    if not job.finished:
                        await job.commit(work)
                except Exception as e:  # noqa: BLE001 (the job's own, raised where it runs)
                    if not job.finished:
                        job.stopped_by = e
                        job.scope.cancel()

    async def _failed(self, job: JobContext, error: Exception) -> None:
        verdict = judge(error, job.row.type)
        if not verdict.expected:
            log.error("job failed in an unexpected way", exc_info=error, extra={"job_id": job.row.job_id})
        work = partial(
            queue.fail,
            reason=verdict.reason,
            reason_code=verdict.reason_code,
            retryable=verdict.retryable,
            attempts_max=verdict.attempts_max,
            jitter=self.env.rng.random(),
        )
        await self._record(job, work)

    async def _record(self, job: JobContext, work: Callable[..., Any]) -> None:
        """The job's new state. If it cannot be written, recovery finds the job RUNNING and puts it back."""
        try:
            await job.commit(partial(work, job_id=job.row.job_id), sync=True)
        except JobGoneError:
            log.info("job was over before it ended", extra={"job_id": job.row.job_id, "tenant": job.tenant})
        except REFUSALS as e:
            log.info("job's end could not be recorded", extra={"job_id": job.row.job_id, "error": str(e)})
