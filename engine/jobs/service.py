"""Jobs: what the volume opens, wakes and calls. The runner, its executors, and when checkpoints and prunes are made.

What is sealed for a waiter is planned in the commit of the seal (`beginning`). Any other seal is told by `sealed`; what
was sealed within `pack_after_s`, or COALESCE_BYTES of it, becomes one plan: what is removed so soon is not uploaded.
The commit of a plan also claims its first job and announces the first uploads of it, where a place for a job is free.
Planning goes on whenever a job is over, until everything sealed is published. Prunes are looked for every
`prune_every_s` and made only where there is something to prune, so an idle volume writes nothing; so are rewritings.

Owner: the trio thread. A crash forgets only when to plan next: at start everything unpublished is planned.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Final

import trio

from aof2.engine import objects
from aof2.engine.aio import open_nursery, result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import JobState, JobType, ObjectRow, ObjectState
from aof2.engine.foreground import Foreground
from aof2.engine.jobs import checkpoint, download, prune, rewrite, verify
from aof2.engine.jobs.errors import JobFailedError
from aof2.engine.jobs.worker import LEASE_S, REFUSALS, REFUSED_S, Executor, JobContext, JobRunner, RefuseTruncation
from aof2.engine.local.handles import Key
from aof2.engine.observe.metrics import StorageMetrics
from aof2.engine.tiering.evict import Evictor
from aof2.engine.tiering.hydrate import Hydrator
from aof2.engine.tiering.publish import Publisher

COALESCE_BYTES: Final = 256 << 20

Begin = Callable[[Batch, Sequence[ObjectRow]], checkpoint.Begun | None]


class Jobs:
    """The jobs of a volume. `run` is its task; the rest is for any task of the trio thread."""

    def __init__(
        self,
        publisher: Publisher,
        hydrator: Hydrator,
        evictor: Evictor,
        *,
        tenants: Callable[[], dict[int, str]],
        compression_of: Callable[[str], str],
        retention: prune.Retention,
        rewriting: rewrite.Rules,
        blocked: Callable[[str], bool],
        replicated: Callable[[int], Awaitable[None]] | None = None,
        metrics: StorageMetrics,
        foreground: Foreground,
        lease_s: float = LEASE_S,
        prune_every_s: float | None = None,
        pack_after_s: float = 0.2,
        plan_bytes_max: int = checkpoint.PLAN_BYTES_MAX,
        plan_objects_max: int = checkpoint.PLAN_OBJECTS_MAX,
    ) -> None:
        self.env, self.catalog, self.writer = publisher.hot.env, publisher.catalog, publisher.writer
        self.retention = retention
        self.rewriter = rewrite.RewritePacks(
            publisher,
            rewriting,
            foreground,
            busy=lambda: self.runner.is_running(JobType.CREATE_CHECKPOINT),
            change=lambda: self.runner.changes.next(),
        )
        executors: dict[JobType, Executor] = {
            JobType.CREATE_CHECKPOINT: checkpoint.CreateCheckpoint(
                publisher, compression_of, metrics, foreground, lambda: self.runner.changes.fire()
            ),
            JobType.VERIFY_MANIFEST: verify.VerifyManifest(publisher, hydrator, compression_of),
            JobType.DOWNLOAD_CHECKPOINT: download.DownloadCheckpoint(hydrator, publisher.quota),
            JobType.PRUNE_CHECKPOINT: prune.PruneCheckpoint(evictor, hydrator.fetcher, retention, blocked, replicated),
            JobType.REWRITE_PACKS: self.rewriter,
            JobType.TRUNCATE_APPEND_ONLY: RefuseTruncation(),
        }
        base = (self.env, self.catalog, self.writer, publisher.quota)
        self.runner = JobRunner(*base, tenants, executors, lease_s=lease_s, on_over=self._on_over)
        self._tenants = tenants
        self._metrics = metrics
        self._prune_every_s = prune_every_s
        self._pack_after_s = pack_after_s
        self._plan = partial(
            checkpoint.make_plans,
            bytes_max=plan_bytes_max,
            objects_max=plan_objects_max,
            unfinished=self.runner.unfinished,
        )
        self._sealed_bytes = 0
        self._to_plan: set[int] = set()
        self._plan_wanted = trio.Event()
        self._plan_now = trio.Event()

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def sealed(self, tenant_id: int, size_bytes: int) -> None:
        """An object was sealed: it is on its way to the remote soon."""
        self._to_plan.add(tenant_id)
        self._plan_wanted.set()
        self._sealed_bytes += size_bytes
        if self._sealed_bytes >= COALESCE_BYTES:
            self._plan_now.set()

    @contextlib.contextmanager
    def beginning(self, tenant_id: int, *, wanted: bool, lone: bool = False) -> Iterator[Begin]:
        """What a commit that seals does besides, where it is `wanted` that what it seals is on its way with it: it is
        planned, the job is claimed, its first uploads are announced. `lone`: no other caller waits, so that the log may
        go up beside them. The answer goes to `begun`."""
        tenant = self._tenants().get(tenant_id, "") if wanted else ""
        with self.runner.place() as lease_ms:
            if lease_ms and tenant:
                unfinished = self.runner.unfinished
                yield partial(checkpoint.begin, tenant=tenant, lease_ms=lease_ms, unfinished=unfinished, lone=lone)
            else:
                yield lambda _b, _sealed: None

    def begun(self, tenant_id: int, size_bytes: int, job: checkpoint.Begun | None) -> None:
        """Objects were sealed, and their job claimed with them; None: they are planned soon."""
        if job is None:
            self.sealed(tenant_id, size_bytes)
        else:
            self.env.failpoint("job.enqueued")
            self._start(job)

    def _start(self, job: checkpoint.Begun | None) -> None:
        if job is not None:
            self.env.failpoint("job.claimed")
            self.runner.start(job.row, job.announced, job.chosen, foretold=job.foretold)

    def pending_bytes(self) -> int:
        """What is sealed and not in the remote yet."""
        with self.catalog.view() as view:
            return sum(objects.pending_bytes(view, tenant_id) for tenant_id in self._tenants())

    async def checkpoint(self, tenant_id: int, *, wait: bool = True) -> int:
        """Publishes what is sealed so far, also what failed before; how many objects. JobFailedError if one cannot."""
        with self.catalog.view() as view:
            pending = [(tenant_id, *key) for key, _ in view.scan(tenant_id, t.UNPUBLISHED)]
        if not pending:
            return 0
        for row in self.runner.live(tenant_id):
            waits = row.state == JobState.FAILED or (row.state == JobState.QUEUED and row.not_before_ms > 0)
            if row.type == JobType.CREATE_CHECKPOINT and waits:
                await self.runner.retry(tenant_id, row.job_id)
        if self._is_plannable(tenant_id):
            await self.plan(tenant_id)
        if wait:
            await self.wait_published(pending)
        return len(pending)

    async def wait_published(self, keys: Collection[Key]) -> None:
        """Until these sealed objects are in the remote (or gone, or being written again). JobFailedError when the job
        of one failed."""
        left = list(keys)
        while True:
            change = self.runner.changes.next()
            while left and self._is_over(left[-1]):
                left.pop()
            if not left:
                return
            self._raise_failed(left)
            await change.wait()

    def is_under_way(self, keys: Collection[Key]) -> bool:
        """Whether jobs that run have all of these objects: there is nothing to plan."""
        left = set(keys)
        for row in self.runner.running_rows(JobType.CREATE_CHECKPOINT):
            left.difference_update((row.tenant_id, *key) for key in checkpoint.plan_of(row).objects)
        return not left

    def _is_over(self, key: Key) -> bool:
        row = self.catalog.get(key[0], t.OBJECTS, (key[1], key[2]))
        return row is None or row.state != ObjectState.SEALED

    def _raise_failed(self, keys: Collection[Key]) -> None:
        for tenant_id in {key[0] for key in keys}:
            for row in self.runner.live(tenant_id):
                if row.type != JobType.CREATE_CHECKPOINT or row.state != JobState.FAILED:
                    continue
                planned = set(checkpoint.plan_of(row).objects)
                if any((ino, generation) in planned for tenant, ino, generation in keys if tenant == tenant_id):
                    raise JobFailedError(f"job {row.job_id} ({row.type.name}) failed: {row.reason}")

    async def plan(self, tenant_id: int) -> list[int]:
        """Enqueues checkpoints for what is sealed and not yet planned; the jobs' numbers. After a power loss that takes
        a plan away, what it named is planned again: a blob's key holds its hash, so one left behind is harmless."""
        tenant = self._tenants().get(tenant_id, "")
        with self.runner.place() as lease_ms:

            def work(b: Batch) -> tuple[list[int], checkpoint.Begun | None]:
                made = self._plan(b)
                may_begin = made and lease_ms and tenant
                return made, checkpoint.begin_new(b, made[0], tenant, lease_ms=lease_ms) if may_begin else None

            # A caller that goes away leaves the job to the runner: claimed, it would wait for its lease to end.
            with trio.CancelScope(shield=True):
                made, job = await result_of(self.writer.submit(tenant_id, work))
        if made:
            self.env.failpoint("job.enqueued")
        self._start(job)
        if len(made) > (job is not None):
            self.runner.wake()
        return made

    # -- the other types -----------------------------------------------------------------------------------------

    async def verify(self, tenant_id: int, *, checkpoint_id: int = 0, token: str | None = None) -> int:
        """Fetches and proves every blob of the checkpoint (0: of the tenant); the job's number."""
        body = t.encode(verify.Scope(checkpoint_id))
        token = token or f"verify/{checkpoint_id}"
        return await self.runner.enqueue(tenant_id, JobType.VERIFY_MANIFEST, token, body)

    async def download(
        self, tenant_id: int, *, checkpoint_id: int = 0, objects: Collection[tuple[int, int]] = ()
    ) -> int:
        """Brings a checkpoint, these objects, or everything of the tenant onto the local disk; the job's number."""
        body = t.encode(download.Scope(checkpoint_id, tuple(sorted(objects))))
        token = f"download/{hashlib.sha256(body).hexdigest()[:16]}"
        return await self.runner.enqueue(tenant_id, JobType.DOWNLOAD_CHECKPOINT, token, body)

    async def prune(self, tenant_id: int) -> int:
        """Lets go of what retention does not keep; the job's number."""
        return await self.runner.enqueue(tenant_id, JobType.PRUNE_CHECKPOINT, "prune")

    async def rewrite(self, tenant_id: int, *, now: bool = False) -> int:
        """Writes packs anew of which too little is needed; the job's number. `now`: a caller waits for it."""
        if now:
            self.rewriter.hurry(tenant_id)
        return await self.runner.enqueue(tenant_id, JobType.REWRITE_PACKS, "rewrite")

    async def truncate(self, tenant_id: int) -> int:
        """Cuts an append stream; the job's number."""
        return await self.runner.enqueue(tenant_id, JobType.TRUNCATE_APPEND_ONLY, "truncate")

    # -- the task ------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_nursery() as nursery:
            await nursery.start(self.runner.run)
            nursery.start_soon(self._plan_forever)
            nursery.start_soon(self._measure)
            if self._prune_every_s is not None:
                nursery.start_soon(self._prune_forever, self._prune_every_s)
            self._to_plan.update(self._tenants())
            self._plan_now.set()
            self._plan_wanted.set()
            task_status.started()

    async def _plan_forever(self) -> None:
        while True:
            await self._plan_wanted.wait()
            with trio.move_on_after(self._pack_after_s):
                await self._plan_now.wait()
            self._plan_wanted, self._plan_now = trio.Event(), trio.Event()
            self._sealed_bytes = 0
            wanted, self._to_plan = self._to_plan, set()
            refused = False
            for tenant_id in wanted:
                try:
                    if self._is_plannable(tenant_id):
                        await self.plan(tenant_id)
                except OSError:  # the log has no room: what is sealed is planned when it has
                    self.sealed(tenant_id, 0)
                    refused = True
                except REFUSALS:
                    continue  # the volume says so itself
            if refused:
                await trio.sleep(REFUSED_S)

    def _is_plannable(self, tenant_id: int) -> bool:
        """A look before a commit."""
        with self.catalog.view() as view:
            return checkpoint.is_plannable(view, tenant_id, unfinished=self.runner.unfinished)

    async def _measure(self) -> None:
        """Keeps the number that a scrape reads."""
        while True:
            change = self.runner.changes.next()
            rows = [row for tenant_id in self._tenants() for row in self.runner.live(tenant_id)]
            waiting = [r for r in rows if r.type == JobType.CREATE_CHECKPOINT and r.state == JobState.QUEUED]
            self._metrics.checkpoint_queue_depth.set(len(waiting))
            await change.wait()

    async def _prune_forever(self, every_s: float) -> None:
        while True:
            await trio.sleep(every_s)
            for tenant_id in self._tenants():
                now_ms = self.env.now_ms()
                due = await trio.to_thread.run_sync(prune.is_due, self.catalog, tenant_id, now_ms, self.retention)
                if due:
                    with contextlib.suppress(*REFUSALS):
                        await self.prune(tenant_id)
                if await trio.to_thread.run_sync(self.rewriter.is_due, tenant_id):
                    with contextlib.suppress(*REFUSALS):
                        await self.rewrite(tenant_id)

    def _on_over(self, job: JobContext) -> None:
        """A job is over: what found no place in a plan before may find one now. After a cancellation that is not meant:
        what was cancelled is planned again with the next seal, or when a caller asks for a checkpoint."""
        if job.row.type == JobType.CREATE_CHECKPOINT and not job.cancel_requested:
            self._to_plan.add(job.tenant_id)
            self._plan_wanted.set()
            self._plan_now.set()
