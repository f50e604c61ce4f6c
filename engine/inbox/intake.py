"""Intake: the writer looks for jobs that were delivered, publishes each of them once, and answers.

    every inbox_period, or when told: knocks (one LIST a tenant) → commit → checked → published, one commit of the log
    → the remote has the log → answer → knock gone → what was staged beside it gone

A knock is put before its commit, so that a look lists what waits and no more, however many blobs lie in the inbox. The
job's row is what makes it once: an answer is written from it, as often as it is asked for, and a job whose answer got
lost in a crash is answered at the next look.

Invariants
- `done` is said when the remote alone restores what the job brought, never before.
- Nothing is taken in by a writer that is fenced, read-only or without a claim.
- What may be well the next time (the remote is away) is left as it is; every other trouble is an answer.

Owner: one task of the daemon's nursery; blocking steps on worker threads. A crash leaves a job before or after its one
commit, its knock with it: the next look goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import trio

from aof2.engine.append.framing import record_max
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import DeliveryRow
from aof2.engine.errors import (
    Aof2Error,
    CorruptError,
    FatalIOError,
    LimitError,
    ReadOnlyError,
    TransientError,
    UnsupportedError,
)
from aof2.engine.inbox.check import check
from aof2.engine.inbox.format import (
    COMMIT_BYTES_MAX,
    Commit,
    Done,
    Door,
    Refused,
    RefusedError,
    decode,
    encode,
    problem_of,
)
from aof2.engine.inbox.sweep import Sweep
from aof2.engine.kinds import registry
from aof2.engine.kinds.kernel import KernelGoneError
from aof2.engine.namespace import root_ino
from aof2.engine.observe.logs import log_event
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.keys import (
    InboxCommitKey,
    InboxDoneKey,
    InboxDoorKey,
    InboxKnockKey,
    InboxRefusedKey,
    RemoteKey,
    name_of,
    parse_key,
)
from aof2.engine.settings.model import AppendTenant, FilesTenant

if TYPE_CHECKING:
    from aof2.engine.kinds.mounted import Kinds
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

AT_ONCE: Final = 32  # jobs that wait for the log together
LOOKS_MAX: Final = 30  # at a knock without a commit; after that, a sweep looks
AWAY_S: Final = 5.0
SWEEP_SHARE: Final = 24  # of inbox_keep
SWEEP_EVERY_S_MAX: Final = 3600.0
SWEEP_EVERY_S_MIN: Final = 60.0
CRASH_POINTS: Final = ("inbox.seen", "inbox.checked", "inbox.replicated", "inbox.answered", "inbox.ended")


class _Taken(NamedTuple):
    """What is to be said of a job: done, refused, or, with neither, nothing, for it was said before."""

    job_id: str
    row: DeliveryRow | None = None
    reason: str = ""
    commit: Commit | None = None


class Intake:
    """Of one mount."""

    def __init__(self, volume: Volume, kinds: Kinds) -> None:
        self._volume = volume
        self._kinds = kinds
        self._sweep = Sweep(volume)
        self._wake = trio.Event()
        self._looked = trio.Event()
        self._looks: dict[tuple[int, str], int] = {}  # at knocks without a commit
        self._open: set[int] = set()  # tenants whose door is in the remote as it should be
        self._sweep_at_s = float("-inf")
        self.jobs_done = 0
        self.jobs_refused = 0

    @property
    def is_on(self) -> bool:
        return self._volume.settings.follow.inbox_period_s is not None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        period_s = self._volume.settings.follow.inbox_period_s
        while True:
            self._wake = trio.Event()
            looked, self._looked = self._looked, trio.Event()
            wait_s = period_s if period_s is not None else SWEEP_EVERY_S_MAX
            try:
                await self.look()
            except TransientError as e:
                log.debug("the inbox is looked at later", extra={"error": str(e)})
                wait_s = max(wait_s, AWAY_S)
            except (ReadOnlyError, FatalIOError, KernelGoneError) as e:
                log.info("the inbox takes nothing in any more", extra={"error": str(e)})
            except (Aof2Error, OSError) as e:
                log.warning("the inbox could not be looked at", extra={"error": str(e)})
                wait_s = max(wait_s, AWAY_S)
            looked.set()
            with trio.move_on_after(wait_s):
                await self._wake.wait()

    async def look_now(self) -> None:
        """What was delivered before is published and answered when this returns, where `run` runs."""
        looked = self._looked
        self._wake.set()
        await looked.wait()

    # -- looking -----------------------------------------------------------------------------------------------

    async def look(self) -> int:
        """Once, at every tenant; how many jobs were answered."""
        volume, found = self._volume, 0
        if volume.read_only_reason or volume.replicator.fence is None:
            return 0
        for tenant_id, tenant in sorted(volume.writable_tenants().items()):
            if await self._keep_door(tenant_id, tenant):
                found += await self._look_at(tenant_id, tenant, await self._knocks(tenant_id, tenant))
        if self.is_on and trio.current_time() >= self._sweep_at_s:
            found += await self.sweep()
        return found

    async def sweep(self) -> int:
        """What no commit names goes, and what is old; jobs whose knock got lost are looked at."""
        keep_s, found = self._volume.settings.follow.inbox_keep_s, 0
        for tenant_id, tenant in sorted(self._volume.writable_tenants().items()):
            waiting = await trio.to_thread.run_sync(self._sweep.run, tenant_id, tenant)
            await self._sweep.forget(tenant_id)
            found += await self._look_at(tenant_id, tenant, waiting)
        self._looks.clear()
        self._sweep_at_s = trio.current_time() + min(max(keep_s / SWEEP_SHARE, SWEEP_EVERY_S_MIN), SWEEP_EVERY_S_MAX)
        return found

    async def _knocks(self, tenant_id: int, tenant: str) -> list[str]:
        """Jobs that are said to be there, those first that knocked first."""
        prefix = name_of(InboxKnockKey(tenant, "x")).removesuffix("x")
        found = await trio.to_thread.run_sync(lambda: list(self._volume.remote.list(prefix)))
        knocks = [(info.modified_ms, parse_key(info.key)) for info in found]
        jobs = [(ms, key.job_id) for ms, key in knocks if isinstance(key, InboxKnockKey)]
        return [job_id for _, job_id in sorted(jobs) if self._looks.get((tenant_id, job_id), 0) < LOOKS_MAX]

    async def _look_at(self, tenant_id: int, tenant: str, job_ids: list[str]) -> int:
        answered = 0
        for at in range(0, len(job_ids), AT_ONCE):
            taken: list[_Taken] = []
            for job_id in job_ids[at : at + AT_ONCE]:
                try:
                    one = await self._take(tenant_id, tenant, job_id)
                except (TransientError, ReadOnlyError, FatalIOError, KernelGoneError):
                    await self._answer(tenant_id, tenant, taken)
                    raise
                if one is not None:
                    taken.append(one)
            answered += await self._answer(tenant_id, tenant, taken)
        return answered

    # -- one job -----------------------------------------------------------------------------------------------

    async def _take(self, tenant_id: int, tenant: str, job_id: str) -> _Taken | None:
        """None: it is not committed yet."""
        key = name_of(InboxCommitKey(tenant, job_id))
        remote = self._volume.remote
        info = await trio.to_thread.run_sync(remote.head_blob, key)
        if info is None:
            self._looks[tenant_id, job_id] = self._looks.get((tenant_id, job_id), 0) + 1
            return None
        self._volume.env.failpoint("inbox.seen")
        row = self._volume.catalog.get(tenant_id, t.DELIVERIES, job_id)
        if row is not None:
            return _Taken(job_id, row)
        refused = name_of(InboxRefusedKey(tenant, job_id))
        if await trio.to_thread.run_sync(remote.head_blob, refused) is not None:
            return _Taken(job_id)
        return await self._published(tenant_id, tenant, job_id, key, info.size)

    async def _published(self, tenant_id: int, tenant: str, job_id: str, key: str, size: int) -> _Taken:
        volume, engine = self._volume, self._volume.settings.engine
        commit = None
        try:
            if size > COMMIT_BYTES_MAX:
                raise RefusedError(f"a commit of {size} bytes, {COMMIT_BYTES_MAX} at most")
            _, data = await trio.to_thread.run_sync(volume.remote.get_blob, key)
            commit = decode(data, Commit, key=key)
            self._check_door(tenant_id, tenant, commit, key)
            looked_at = partial(
                check, commit, volume.remote, chunk_bytes=engine.chunk_bytes, block_bytes=engine.block_bytes
            )
            job = await trio.to_thread.run_sync(looked_at)
            volume.env.failpoint("inbox.checked")
            await self._check_room(tenant)
            row = await self._kinds.of(root_ino(tenant_id)).take_in(tenant_id, job)
        except (RefusedError, CorruptError, UnsupportedError, LimitError, RemoteMissingError) as e:
            return self._refused(tenant, job_id, str(e), commit)
        except Aof2Error:
            raise
        except OSError as e:
            return self._refused(tenant, job_id, f"{e.strerror or e}".lower(), commit)
        except Exception as e:  # a commit that finds a bug of ours must not end the daemon, at each mount again
            log.exception("a delivered job failed", extra={"tenant": tenant, "job": job_id})
            return self._refused(tenant, job_id, f"internal error: {type(e).__name__}: {e}; see daemon.log", commit)
        log_event(log, "delivery_published", tenant=tenant, job=job_id, files=row.files, bytes=row.size_bytes)
        self.jobs_done += 1
        return _Taken(job_id, row, commit=commit)

    def _refused(self, tenant: str, job_id: str, reason: str, commit: Commit | None) -> _Taken:
        log_event(log, "delivery_refused", tenant=tenant, job=job_id, reason=reason)
        self.jobs_refused += 1
        return _Taken(job_id, reason=reason, commit=commit)

    def _check_door(self, tenant_id: int, tenant: str, commit: Commit, key: str) -> None:
        """Of this volume, this tenant and its kind."""
        door = self._door(tenant_id, tenant)
        if commit.volume_uuid != door.volume_uuid:
            raise RefusedError(f"it is for volume {commit.volume_uuid}, this is {door.volume_uuid}")
        if problem := problem_of(commit, key=key):
            raise RefusedError(problem)
        wanted = "records" if door.kind == "append" else "files"
        if commit.what != wanted:
            raise RefusedError(f"tenant {tenant} is of kind {door.kind}: it takes {wanted}, not {commit.what}")

    async def _check_room(self, tenant: str) -> None:
        """What comes is cold and takes no room here but for its names. A tenant whose quota is full of what cannot go
        (it is not uploaded, pinned or open) could not even read it."""
        volume, block_bytes = self._volume, self._volume.settings.engine.block_bytes
        volume.disk.admit_name()
        if volume.quota.shortage(tenant, block_bytes).tenants_bytes:
            await volume.evictor.make_room(block_bytes, tenant)
        if volume.quota.shortage(tenant, block_bytes).tenants_bytes:
            usage = volume.quota.tenant_usage(tenant)
            raise RefusedError(
                f"the quota of tenant {tenant} is full: {usage.used_bytes} of {usage.limit_bytes} bytes, and nothing "
                "of it can be evicted; wait until it is uploaded, unpin, or raise the quota"
            )

    # -- answers -----------------------------------------------------------------------------------------------

    async def _answer(self, tenant_id: int, tenant: str, taken: list[_Taken]) -> int:
        if not taken:
            return 0
        volume = self._volume
        ends = volume.log_ends([tenant_id])
        if any(one.row is not None for one in taken):
            await volume.replicated(ends)
            if not volume.replication.has(ends):
                return 0  # another machine is the writer now; the next one that is will answer
        volume.env.failpoint("inbox.replicated")
        say = partial(self._say, tenant_id, tenant, taken, ends[tenant_id])
        await trio.to_thread.run_sync(say)
        volume.env.failpoint("inbox.ended")
        return sum(bool(one.row is not None or one.reason) for one in taken)

    def _say(self, tenant_id: int, tenant: str, taken: list[_Taken], ordinal: int) -> None:
        """Answers, then knocks, then what was staged beside. Blocks."""
        volume = self._volume
        for one in taken:
            if one.row is not None:
                data = encode(_done(one.job_id, one.row, tenant_id, ordinal))
                _put(volume.remote.put_blob, InboxDoneKey(tenant, one.job_id), data)
            elif one.reason:
                said = Refused(job_id=one.job_id, time_ms=volume.env.now_ms(), reason=one.reason)
                _put(volume.remote.put_blob, InboxRefusedKey(tenant, one.job_id), encode(said))
        volume.env.failpoint("inbox.answered")
        for one in taken:
            if one.row is not None:
                self._sweep.job(tenant_id, tenant, one.job_id)
            elif one.commit is not None:
                self._sweep.unnamed(tenant_id, [staged.key for staged in one.commit.objects])
        volume.remote.delete([name_of(InboxKnockKey(tenant, one.job_id)) for one in taken])

    # -- the door ----------------------------------------------------------------------------------------------

    async def _keep_door(self, tenant_id: int, tenant: str) -> bool:
        """It is in the remote where jobs are taken in, and else it is not; whether they are."""
        settings = self._volume.settings.tenants.get(tenant)
        takes = self.is_on and isinstance(settings, FilesTenant | AppendTenant)
        if tenant_id not in self._open:
            await trio.to_thread.run_sync(self._put_door, tenant_id, tenant, takes)
            self._open.add(tenant_id)
        return takes

    def _put_door(self, tenant_id: int, tenant: str, takes: bool) -> None:
        key, remote = name_of(InboxDoorKey(tenant)), self._volume.remote
        there = remote.head_blob(key)
        if takes:
            data = encode(self._door(tenant_id, tenant))
            remote.put_blob(key, data, len(data))
        elif there is not None:
            remote.delete([key])

    def _door(self, tenant_id: int, tenant: str) -> Door:
        volume = self._volume
        settings, fence = volume.settings.tenants.get(tenant), volume.replicator.fence
        if fence is None:
            raise ReadOnlyError("the volume is not claimed")
        number = volume.tenants.rows[tenant_id].kind
        door = partial(
            Door,
            volume_uuid=fence.record.volume_uuid,
            tenant=tenant,
            kind=registry.by_number(number).name,
            chunk_bytes=volume.settings.engine.chunk_bytes,
            block_bytes=volume.settings.engine.block_bytes,
        )
        if not isinstance(settings, AppendTenant):
            return door()
        return door(
            framing=settings.framing, segment_bytes=settings.segment_bytes, record_max_bytes=record_max(settings)
        )


def _put(put: Callable[..., object], key: RemoteKey, data: bytes) -> None:
    put(name_of(key), data, len(data))


def _done(job_id: str, row: DeliveryRow, tenant_id: int, ordinal: int) -> Done:
    return Done(
        job_id=job_id,
        time_ms=row.time_ms,
        files=row.files,
        bytes=row.size_bytes,
        records=row.records,
        first_offset=row.first_offset,
        next_offset=row.next_offset,
        stream_id=tenant_id,
        ordinal=ordinal,
    )
