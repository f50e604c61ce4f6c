"""`jobs` and `gc` in the daemon: the queue looked at, its jobs started, retried, cancelled and waited for.

Owner: the trio thread; a task a request. A crash leaves the queue as it was: jobs go on at the next start.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import msgspec
import trio

from aof2.engine.catalog.rows import JobRow, JobState, JobType
from aof2.engine.inspect.jobs import SHORT, TYPES, JobStatus, every_job, find_job, job_status
from aof2.engine.jobs import prune, queue
from aof2.engine.objects import ObjectGoneError
from aof2.engine.volume import Volume
from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import Args, ControlError, Progress

LOOK_AT_LEAST_S: Final = 1.0


class Jobs(Args, kw_only=True):
    """`action`: list, show, retry, cancel, start. `job` is TENANT/NUMBER, "" where all are retried; of a start, `type`
    and the tenants."""

    action: str = "list"
    job: str = ""
    type: str = ""
    tenant: str | None = None
    checkpoint_id: int = 0
    wait: bool = False


class Gc(Args, kw_only=True):
    tenant: str | None = None
    dry_run: bool = False


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What `gc` did in a tenant, or would do. `sparse_packs` are written anew, which frees `sparse_bytes` later."""

    tenant: str
    generations: int
    blobs: int
    bytes: int
    later_blobs: int
    later_bytes: int
    in_use: int = 0
    uploads_aborted: int = 0
    sparse_packs: int = 0
    sparse_bytes: int = 0


async def jobs(mounted: Mounted, args: Jobs, tell: Tell) -> list[JobStatus]:
    volume = mounted.volume
    match args.action:
        case "list":
            with volume.catalog.view() as view:
                return list(every_job(view))
        case "show":
            with volume.catalog.view() as view:
                _, row, tenant = find_job(view, args.job)
            return [job_status(row, tenant)]
        case "retry" if not args.job:
            names, kicked = volume.tenant_names(), await volume.jobs.runner.kick()
            return await _told(volume, [(tenant, names[tenant], job_id) for tenant, job_id in kicked], args, tell)
        case "retry" | "cancel":
            return await _change(volume, args, tell)
        case "start":
            return await _start(volume, args, tell)
    raise ControlError(f"jobs: there is no {args.action!r}", 2)


async def _change(volume: Volume, args: Jobs, tell: Tell) -> list[JobStatus]:
    with volume.catalog.view() as view:
        tenant_id, row, tenant = find_job(view, args.job)
    if args.action == "cancel":
        if row.state not in queue.LIVE and row.state != JobState.FAILED:
            raise ControlError(f"{args.job}: it is {row.state.name.lower()}; there is nothing to cancel")
        await volume.jobs.runner.cancel(tenant_id, row.job_id)
    elif not await volume.jobs.runner.retry(tenant_id, row.job_id):
        raise ControlError(f"{args.job}: it is {row.state.name.lower()}; there is nothing to retry")
    return await _told(volume, [(tenant_id, tenant, row.job_id)], args, tell) or [job_status(row, tenant)]


async def _start(volume: Volume, args: Jobs, tell: Tell) -> list[JobStatus]:
    if args.type not in SHORT:
        raise ControlError(f"jobs: there is no type {args.type!r}; there are {', '.join(SHORT)}", 2)
    started = [
        (tenant_id, tenant, job_id)
        for tenant_id, tenant in tenants_named(volume, args.tenant).items()
        for job_id in await _enqueue(volume, SHORT[args.type], tenant_id, args.checkpoint_id)
    ]
    return await _told(volume, started, args, tell)


async def _told(volume: Volume, jobs: list[tuple[int, str, int]], args: Jobs, tell: Tell) -> list[JobStatus]:
    """What they are now, or, where that is waited for, what became of them."""
    rows = []
    for tenant_id, tenant, job_id in jobs:
        if args.wait:
            rows.append(job_status(await finished(volume, tenant_id, job_id, tenant, tell), tenant))
        elif (row := volume.jobs.runner.job(tenant_id, job_id)) is not None:
            rows.append(job_status(row, tenant))
    return rows


async def _enqueue(volume: Volume, job_type: JobType, tenant_id: int, checkpoint_id: int) -> list[int]:
    if job_type == JobType.CREATE_CHECKPOINT:
        return await volume.jobs.plan(tenant_id)
    if job_type == JobType.VERIFY_MANIFEST:
        return [await volume.jobs.verify(tenant_id, checkpoint_id=checkpoint_id)]
    if job_type == JobType.DOWNLOAD_CHECKPOINT:
        return [await volume.jobs.download(tenant_id, checkpoint_id=checkpoint_id)]
    if job_type == JobType.PRUNE_CHECKPOINT:
        return [await volume.jobs.prune(tenant_id)]
    if job_type == JobType.REWRITE_PACKS:
        return [await volume.jobs.rewrite(tenant_id, now=True)]
    return [await volume.jobs.truncate(tenant_id)]


def tenants_named(volume: Volume, name: str | None) -> dict[int, str]:
    """The tenant of that name, or all."""
    if name is None:
        return volume.tenant_names()
    try:
        return {volume.tenants.named(name).tenant_id: name}
    except ObjectGoneError as e:
        raise ControlError(str(e)) from None


async def finished(volume: Volume, tenant_id: int, job_id: int, tenant: str, tell: Tell) -> JobRow:
    """The job once it is over, however that went. One that has to wait for the remote is an error: it goes on by
    itself, and the command does not wait for that."""
    runner = volume.jobs.runner
    before = runner.job(tenant_id, job_id)
    attempts = before.attempts if before is not None else 0
    while True:
        change = runner.changes.next()
        row = runner.job(tenant_id, job_id)
        if row is None:
            raise ControlError(f"{tenant}/{job_id}: the job is gone")
        if row.state not in queue.LIVE:
            return row
        if row.state == JobState.QUEUED and row.attempts > attempts:
            raise ControlError(f"{tenant}/{job_id}: {row.reason}; it is tried again by itself, see aof2 jobs")
        await tell(Progress(f"{TYPES[row.type]} of {tenant}", row.done, row.total, "blobs"))
        with trio.move_on_after(LOOK_AT_LEAST_S):
            await change.wait()


# -- gc --------------------------------------------------------------------------------------------------------------


async def gc(mounted: Mounted, args: Gc, tell: Tell) -> list[Collected]:
    """What retention no longer keeps goes, now; or only how much that would be."""
    volume = mounted.volume
    out = []
    for tenant_id, tenant in tenants_named(volume, args.tenant).items():
        look = partial(prune.forecast, volume.catalog, tenant_id, volume.env.now_ms(), volume.jobs.retention)
        if args.dry_run:
            found = await trio.to_thread.run_sync(look)
            sparse = await trio.to_thread.run_sync(volume.jobs.rewriter.forecast, tenant_id)
            facts = msgspec.structs.asdict(found) | {"sparse_packs": sparse.packs, "sparse_bytes": sparse.bytes}
            out.append(Collected(tenant=tenant, **facts))
            continue
        row = await _done(volume, tenant_id, await volume.jobs.prune(tenant_id), tenant, tell)
        done = msgspec.convert(queue.report(row), prune.Report)
        sparse = await trio.to_thread.run_sync(volume.jobs.rewriter.forecast, tenant_id)
        if sparse.packs:
            await _done(volume, tenant_id, await volume.jobs.rewrite(tenant_id, now=True), tenant, tell)
        left = await trio.to_thread.run_sync(look)
        out.append(
            Collected(
                tenant=tenant,
                generations=done.objects_released,
                blobs=done.blobs_deleted,
                bytes=done.bytes_freed,
                later_blobs=left.later_blobs,
                later_bytes=left.later_bytes,
                in_use=done.objects_in_use,
                uploads_aborted=await volume.janitor.abort_stale_uploads() if not out else 0,
                sparse_packs=sparse.packs,
                sparse_bytes=sparse.bytes,
            )
        )
    return out


async def _done(volume: Volume, tenant_id: int, job_id: int, tenant: str, tell: Tell) -> JobRow:
    """The job, which must go well."""
    row = await finished(volume, tenant_id, job_id, tenant, tell)
    if row.state != JobState.DONE:
        raise ControlError(f"{tenant}/{row.job_id}: {row.state.name.lower()}: {row.reason or 'by request'}")
    return row
