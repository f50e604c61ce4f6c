"""`snapshot create|list|delete` in the daemon.

Owner: the trio thread; a task a request. What a crash leaves is in `engine/snapshots.py`.
"""

from __future__ import annotations

import logging
import shutil
from functools import partial

import trio

from aof2.engine import snapshots
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import SnapshotRow
from aof2.engine.catalog.store import View
from aof2.engine.errors import Aof2Error
from aof2.engine.inspect.snapshots import SnapshotStatus, every_snapshot, snapshot_status
from aof2.engine.remote.keys import SnapshotMetaKey, name_of
from aof2.engine.remote.source import FileSource
from aof2.engine.volume import Volume
from aof2.fs.control import durable
from aof2.fs.control.durable import Tell
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import Args, ControlError
from aof2.fs.control.work import tenants_named

log = logging.getLogger(__name__)


class Snapshot(Args, kw_only=True):
    """`action`: create (of `tenant`, or of each), list, delete (`snapshot`: TENANT/NUMBER)."""

    action: str = "list"
    tenant: str | None = None
    name: str = ""
    snapshot: str = ""


async def snapshot(mounted: Mounted, args: Snapshot, tell: Tell) -> list[SnapshotStatus]:
    match args.action:
        case "list":
            with mounted.volume.catalog.view() as view:
                return list(every_snapshot(view))
        case "create":
            return await _create(mounted, args, tell)
        case "delete":
            return [await _delete(mounted.volume, args.snapshot)]
    raise ControlError(f"snapshot: there is no {args.action!r}", 2)


async def _create(mounted: Mounted, args: Snapshot, tell: Tell) -> list[SnapshotStatus]:
    """What is closed reaches the remote first: a snapshot is of what is there."""
    volume = mounted.volume
    tenants = tenants_named(volume, args.tenant)
    await durable.sealed(mounted, tell)
    await durable.upload(volume, set(tenants), tell, log=False)
    made = [await _take(volume, tenant_id, tenant, args.name) for tenant_id, tenant in tenants.items()]
    await durable.replicated(volume, volume.log_ends(set(tenants)), tell)
    return made


async def _take(volume: Volume, tenant_id: int, tenant: str, name: str) -> SnapshotStatus:
    views: list[View] = []

    def work(b: Batch) -> SnapshotRow:
        b.after_commit.append(lambda: views.append(volume.catalog.view()))  # of exactly this commit
        return snapshots.take(b, name)

    row = await result_of(volume.writer.submit(tenant_id, work, sync=True))
    folder = volume.state_dir / "checkpoint_scratch" / f"snapshot-{tenant_id}-{row.snapshot_id}"
    try:
        with views[0] as view:
            volume.env.make_dirs(folder)
            tree = await trio.to_thread.run_sync(
                snapshots.write_tree, view, tenant_id, tenant, row, folder / "meta.json"
            )
        key = name_of(SnapshotMetaKey(tenant, row.snapshot_id, tree.sha256))
        source = FileSource(folder / "meta.json")
        await trio.to_thread.run_sync(partial(volume.remote.put_blob, key, source, tree.length, sha256=tree.sha256))
    finally:
        await trio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))
    done = partial(
        snapshots.complete, snapshot_id=row.snapshot_id, key=key, files=tree.files, size_bytes=tree.size_bytes
    )
    row = await result_of(volume.writer.submit(tenant_id, done, sync=True))
    return snapshot_status(row, tenant)


async def _delete(volume: Volume, name: str) -> SnapshotStatus:
    tenant, _, number = name.rpartition("/")
    if not tenant or not number.isdecimal():
        raise ControlError(f"{name}: name it as TENANT/NUMBER; aof2 snapshot list shows those there are")
    [tenant_id] = tenants_named(volume, tenant)
    with volume.catalog.view() as view:
        if view.get(tenant_id, t.SNAPSHOTS, int(number)) is None:
            raise ControlError(f"{name}: there is no such snapshot; aof2 snapshot list shows those there are")
    work = partial(snapshots.delete, snapshot_id=int(number))
    row = await result_of(volume.writer.submit(tenant_id, work, sync=True))
    if row.key:
        try:
            await trio.to_thread.run_sync(volume.remote.delete, [row.key])
        except Aof2Error as e:
            log.info("a snapshot's listing stays in the remote", extra={"key": row.key, "error": str(e)})
    return snapshot_status(row, tenant)
