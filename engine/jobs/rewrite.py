"""RewritePacks: packs of which too little is needed are written anew, when it is quiet and no faster than allowed.

    sparse packs → live members, split into new packs → each: quiet · read · announced · put · rows (`tiering.repack`)

Invariants
- One pack is in memory at a time. Before each the job lets requests and uploads pass, and waits as long as the rate
  asks for what the last one took. A caller that waits for the job (`gc`) hurries it past the first, not the second.
- The number that is in a new pack's key is in the job's body from its announcement to the commit that names it: an
  attempt that finds the same members puts the same pack under the same key, and no key is used again after that commit.
- A member that is damaged stays where it is, marked for repair; its pack is not looked at again until the next start.

Owner: the trio thread; finding, reading and putting on a worker thread. A crash leaves what `tiering.repack` says; the
job goes on with what is sparse then.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple

import msgspec
import trio

from aof2 import native
from aof2.engine import packrows, residency
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import PackRow
from aof2.engine.errors import UnsupportedError
from aof2.engine.foreground import Foreground
from aof2.engine.jobs import queue
from aof2.engine.jobs.errors import NeedsRepairError
from aof2.engine.jobs.worker import JobContext
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.tiering import repack
from aof2.engine.tiering.publish import Publisher

log = logging.getLogger(__name__)

QUIET_MAX_S: Final = 300.0  # how long a pack waits for a quiet moment
GAIN_BYTES_MIN: Final = 4 << 20  # less is not worth a look at every row, unless it is most of what there is
CRASH_POINTS: Final = ("rewrite.announced", "rewrite.put", "rewrite.recorded")


class Rules(NamedTuple):
    """Packs of which less than `live_share` is needed are rewritten (0: none), at so many bytes a second (0: any)."""

    live_share: float = 0.5
    bytes_per_s: int = 16 << 20


class Scope(msgspec.Struct, frozen=True, array_like=True):
    """Written to disk: append fields, with a default."""

    checkpoint_id: int = 0  # in the key of the pack that is on its way; 0: none is


_scopes: Final = msgspec.msgpack.Decoder(Scope)


class Report(msgspec.Struct):
    """`packs` and `bytes` that were written, `members` in them, `left` where they were because they changed meanwhile,
    `damaged` ones; `freed` is what the old packs take, which go after `purge_after`."""

    packs: int = 0
    members: int = 0
    bytes: int = 0
    left: int = 0
    damaged: int = 0
    freed: int = 0


class Forecast(NamedTuple):
    """How many packs are sparse, and what rewriting them would free in the end."""

    packs: int
    bytes: int


class RewritePacks:
    """The executor. `busy`: whether uploads are under way; `change` is set when that may have changed."""

    def __init__(
        self,
        publisher: Publisher,
        rules: Rules,
        foreground: Foreground,
        *,
        busy: Callable[[], bool],
        change: Callable[[], trio.Event],
    ) -> None:
        self._env, self._catalog = publisher.hot.env, publisher.catalog
        self._publisher = publisher
        self._rules = rules
        self._busy = busy
        self._change = change
        self._foreground = foreground
        self._hurried: set[int] = set()
        self._waiting: dict[int, trio.CancelScope] = {}
        self._next_s = -math.inf
        self._damaged: set[str] = set()  # packs with members that cannot be moved

    # -- what is due, on any thread ------------------------------------------------------------------------------

    def sparse(self, tenant_id: int) -> dict[str, PackRow]:
        """Blocks."""
        if not self._rules.live_share:
            return {}
        found = repack.find_sparse(self._catalog, tenant_id, self._rules.live_share)
        return {key: row for key, row in found.items() if key not in self._damaged}

    def forecast(self, tenant_id: int) -> Forecast:
        """Blocks."""
        found = self.sparse(tenant_id).values()
        return Forecast(len(found), sum(row.pack_bytes - packrows.live_bytes(row) for row in found))

    def is_due(self, tenant_id: int) -> bool:
        """Whether it is worth the while. Blocks."""
        packs, gain = self.forecast(tenant_id)
        if not packs or gain >= GAIN_BYTES_MIN:
            return bool(packs)
        with self._catalog.view() as view:
            stored, live = packrows.totals(view, tenant_id)
        return live < self._rules.live_share * stored

    # -- doing it ------------------------------------------------------------------------------------------------

    def hurry(self, tenant_id: int) -> None:
        """A caller waits for the tenant's job: it does not wait for a quiet moment."""
        self._hurried.add(tenant_id)
        if tenant_id in self._waiting:
            self._waiting[tenant_id].cancel()

    async def run(self, job: JobContext) -> None:
        try:
            await self._run(job)
        finally:
            self._hurried.discard(job.tenant_id)

    async def _run(self, job: JobContext) -> None:
        scope = _scopes.decode(job.body) if job.body else Scope()
        packs = await trio.to_thread.run_sync(self.sparse, job.tenant_id)
        if not packs:
            return
        await self._quiet(job)
        find = partial(repack.find_moving, self._catalog, job.tenant_id, packs)
        moving = await trio.to_thread.run_sync(find)
        report = Report()
        bad: list[repack.Bad] = []
        for batch in repack.split(moving):
            await self._quiet(job)
            job.check_cancelled()
            scope = await self._rewrite(job, scope, batch, len(moving), report, bad)
        report.freed = await trio.to_thread.run_sync(self._emptied, job.tenant_id, packs)
        await job.progress(len(moving), len(moving), report=msgspec.structs.asdict(report))
        if bad:
            names = ", ".join(sorted({one.moving.blob.key for one in bad})[:10])
            raise NeedsRepairError(f"{len(bad)} of {len(moving)} members are damaged and need repair: {names}")

    async def _rewrite(
        self,
        job: JobContext,
        scope: Scope,
        batch: list[repack.Moving],
        total: int,
        report: Report,
        bad: list[repack.Bad],
    ) -> Scope:
        """One new pack; the scope of the next one."""
        written = await trio.to_thread.run_sync(repack.read, self._publisher.remote, batch)
        if written.bad:
            bad += written.bad
            report.damaged += len(written.bad)
            await self._mark(job, written.bad)
        if not written.moving:
            return scope
        scope, key = await self._announce(job, scope, written)
        self._env.failpoint("rewrite.announced")
        size, etag = await trio.to_thread.run_sync(self._put, job.tenant, key, written)
        self._env.failpoint("rewrite.put")
        self._next_s = trio.current_time() + (size / self._rules.bytes_per_s if self._rules.bytes_per_s else 0)

        moved: list[int] = []
        done = report.members + report.left + report.damaged

        def named(b: Batch) -> None:
            moved.append(repack.moved(b, written, key, etag, size))

        progress = partial(job.progress, total=total, body=t.encode(Scope()))
        try:
            await progress(done + len(written.moving), along=named, sync=True)
        except repack.GivenUpError:
            await progress(done)  # another name next time
            raise
        self._env.failpoint("rewrite.recorded")
        report.packs += bool(moved[-1])
        report.bytes += size
        report.members += moved[-1]
        report.left += len(written.moving) - moved[-1]
        return Scope()

    async def _announce(self, job: JobContext, scope: Scope, written: repack.Written) -> tuple[Scope, str]:
        """In the log that this pack is on its way, and under which number."""
        made: list[tuple[Scope, str]] = []

        def work(b: Batch) -> None:
            one = scope if scope.checkpoint_id else Scope(b.next_id("checkpoint_id"))
            key = written.key(job.tenant, one.checkpoint_id)
            if repack.is_given_up(b.view, b.stream_id, written.moving, key):
                one = Scope(b.next_id("checkpoint_id"))
                key = written.key(job.tenant, one.checkpoint_id)
            repack.announce(b, written.moving, key)
            row = queue.get(b, job.row.job_id)
            queue.progress(b, row.job_id, row.done, row.total, body=t.encode(one))
            made.append((one, key))

        await job.commit(work, sync=True)
        return made[-1]

    def _put(self, tenant: str, key: str, written: repack.Written) -> tuple[int, str]:
        data = written.whole(tenant)
        return len(data), self._publisher.remote.put_blob(key, data, len(data), crc64=native.crc64(data))

    async def _mark(self, job: JobContext, bad: list[repack.Bad]) -> None:
        for moving, error in bad:
            self._damaged.add(moving.blob.key)
            extra = {"key": moving.blob.key, "offset": moving.blob.offset, "error": str(error), "tenant": job.tenant}
            log.warning("a member of a pack is not good", extra=extra)
        chunk_ids = [c for one, error in bad if not isinstance(error, UnsupportedError) for c in one.chunk_ids]

        def work(b: Batch) -> None:
            for chunk_id in chunk_ids:
                if b.get(t.CHUNKS, chunk_id) is not None:
                    residency.hydration_failed(b, chunk_id, int(ReasonCode.OBJECT_MISSING))

        await job.commit(work, sync=True)

    def _emptied(self, tenant_id: int, packs: dict[str, PackRow]) -> int:
        """What those of the old packs take in which nothing is left."""
        with self._catalog.view() as view:
            rows = [view.get(tenant_id, t.PACKS, key) for key in packs]
        return sum(row.pack_bytes for row in rows if row is not None and not row.members)

    # -- when ----------------------------------------------------------------------------------------------------

    async def _quiet(self, job: JobContext) -> None:
        """Until no request came for a moment and nothing is uploaded, and the rate allows another pack."""
        with self._hurriable(job.tenant_id):
            with trio.move_on_after(QUIET_MAX_S):
                while True:
                    await self._foreground.let_pass(QUIET_MAX_S)
                    change = self._change()
                    if not self._busy():
                        break
                    await change.wait()
        await trio.sleep(max(0.0, self._next_s - trio.current_time()))

    @contextlib.contextmanager
    def _hurriable(self, tenant_id: int) -> Iterator[None]:
        with trio.CancelScope() as scope:
            self._waiting[tenant_id] = scope
            if tenant_id in self._hurried:
                scope.cancel()
            try:
                yield
            finally:
                del self._waiting[tenant_id]
