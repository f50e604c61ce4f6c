"""What a volume, and one file of it, is like now: facts from the rows, the logs' folders and nothing else.

Works on any view: the daemon's own catalog or one opened read-only. Nothing is asked of the remote: "in the remote"
means that the log says so, durably.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Final

import msgspec

from aof2.engine import packrows, segments
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import entries_of
from aof2.engine.catalog.rows import HashKind, JobState, ObjectRow, ObjectState, ResidencyRow
from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.inspect.paths import Place, files_below
from aof2.engine.inspect.rows import MANIFEST_DIR, VOLUME_STREAM
from aof2.engine.kinds import registry
from aof2.engine.manifest.quarantine import read_quarantine
from aof2.engine.manifest.snapshot import local_snapshots
from aof2.engine.objects import HOT_BYTES, WARM_BYTES, chunk_bytes_here, full_mask
from aof2.engine.replicate.position import Replication, StreamReplication
from aof2.engine.replicate.tail import positions_of
from aof2.engine.settings import Settings

NOT_RUNNING: Final = "no daemon runs: it goes on at the next mount"


class TenantStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`remote_bytes` is what the blobs take, and the dead of their packs; `dirty_bytes` is what is not all in the
    remote yet. `packed_bytes` of `pack_bytes` in packs are blobs that rows name; with those alone packs would
    take `pack_live_bytes`, and `pack_amplification` is what they take for each of these."""

    tenant: str
    tenant_id: int
    kind: str
    objects: int
    bytes: int
    hot_bytes: int
    warm_bytes: int
    remote_bytes: int
    dirty_objects: int
    dirty_bytes: int
    needs_repair: int
    log_bytes: int
    snapshot_age_s: float | None
    damage: str = ""
    """What is wrong with its log: the tenant is read-only."""
    packs: int = 0
    pack_bytes: int = 0
    packed_bytes: int = 0
    pack_live_bytes: int = 0
    pack_amplification: float = 1.0


class VolumeStatus(msgspec.Struct, frozen=True, kw_only=True):
    state_dir: str
    remote: str
    live: bool
    tenants: list[TenantStatus]
    hot_bytes: int
    hot_limit_bytes: int
    warm_bytes: int
    warm_limit_bytes: int
    dirty_bytes: int
    jobs: dict[str, int]
    log_bytes: int
    snapshot_age_s: float | None
    needs_repair: int
    replication: list[StreamReplication] = []
    rebuilt: bool = False
    pack_amplification: float = 1.0
    damage: str = ""
    """What is wrong with the volume's own log: no tenant can be made."""


class ChunkStatus(msgspec.Struct, frozen=True, kw_only=True):
    chunk_id: int
    index: int
    bytes: int
    sha256: str
    hot_bytes: int
    warm_bytes: int
    key: str
    offset: int = 0  # in the remote object, which is a pack where others are in it
    stored_bytes: int = 0


class ObjectStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `durable`: the remote alone restores it, blobs and log."""

    path: str
    tenant: str
    ino: int
    size: int
    generation: int
    state: str
    sealed: bool
    dirty: bool
    durable: bool
    sha256: str
    hot_bytes: int
    warm_bytes: int
    remote_bytes: int
    chunks: list[ChunkStatus]
    needs_repair: bool = False


class TreeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A directory: everything below it, added up."""

    path: str
    tenant: str
    objects: int
    bytes: int
    dirty_objects: int
    dirty_bytes: int
    durable: bool
    hot_bytes: int
    warm_bytes: int
    remote_bytes: int


def volume_status(
    view: View,
    settings: Settings,
    *,
    live: bool,
    now_ms: int,
    replication: Replication | None = None,
    rebuilt: bool = False,
) -> VolumeStatus:
    """`replication` without a daemon: None, and the folders tell."""
    manifest_dir = settings.volume.state_dir / MANIFEST_DIR
    tenants: list[TenantStatus] = []
    jobs: Counter[str] = Counter()
    for tenant_id, row in view.scan(VOLUME_STREAM, t.TENANTS):
        tenants.append(_tenant(view, manifest_dir, tenant_id, row.name, registry.by_number(row.kind).name, now_ms))
        jobs.update(JobState(job.state).name.lower() for _, job in view.scan(tenant_id, t.JOBS))
    jobs.update(JobState(job.state).name.lower() for _, job in view.scan(VOLUME_STREAM, t.JOBS))
    ages = [tenant.snapshot_age_s for tenant in tenants if tenant.snapshot_age_s is not None]
    return VolumeStatus(
        state_dir=str(settings.volume.state_dir),
        remote=settings.remote.url,
        live=live,
        tenants=tenants,
        hot_bytes=sum(tenant.hot_bytes for tenant in tenants),
        hot_limit_bytes=settings.cache.hot_bytes,
        warm_bytes=sum(tenant.warm_bytes for tenant in tenants),
        warm_limit_bytes=settings.cache.warm_bytes,
        dirty_bytes=sum(tenant.dirty_bytes for tenant in tenants),
        jobs={state.name.lower(): jobs[state.name.lower()] for state in JobState},
        log_bytes=folder_bytes(manifest_dir / str(VOLUME_STREAM)) + sum(tenant.log_bytes for tenant in tenants),
        snapshot_age_s=max(ages, default=None),
        needs_repair=sum(tenant.needs_repair for tenant in tenants),
        replication=(replication or _from_logs(view, settings)).lags({one.tenant_id: one.tenant for one in tenants}),
        rebuilt=rebuilt,
        pack_amplification=packrows.amplification(
            sum(one.pack_bytes for one in tenants), sum(one.pack_live_bytes for one in tenants)
        ),
        damage=log_damage(manifest_dir / str(VOLUME_STREAM)),
    )


def _from_logs(view: View, settings: Settings) -> Replication:
    """While no daemon runs: what the folders and the rows say, and that nothing is uploaded meanwhile."""
    found = positions_of(Env(), view, settings.volume.state_dir / MANIFEST_DIR)
    found.all_stand(NOT_RUNNING, refused=False)
    return found


def _tenant(view: View, manifest_dir: Path, tenant_id: int, name: str, kind: str, now_ms: int) -> TenantStatus:
    objects = total = dirty = dirty_bytes = 0
    for _, row in view.scan(tenant_id, t.OBJECTS):
        if row.state == ObjectState.TOMBSTONED:
            continue
        objects += 1
        total += row.size
        if row.state in (ObjectState.DIRTY, ObjectState.SEALED):
            dirty += 1
            dirty_bytes += dirty_size(manifest_dir.parent, name, row)
    folder = manifest_dir / str(tenant_id)
    packs = [row for _, row in view.scan(tenant_id, t.PACKS)]
    pack_bytes, packed_bytes = sum(row.pack_bytes for row in packs), sum(row.member_bytes for row in packs)
    live_bytes = sum(map(packrows.live_bytes, packs))
    return TenantStatus(
        tenant=name,
        tenant_id=tenant_id,
        kind=kind,
        objects=objects,
        bytes=total,
        hot_bytes=view.get(tenant_id, t.COUNTERS, HOT_BYTES) or 0,
        warm_bytes=view.get(tenant_id, t.COUNTERS, WARM_BYTES) or 0,
        remote_bytes=sum(blob.stored_bytes for _, blob in view.scan(tenant_id, t.BLOBS)) + pack_bytes - packed_bytes,
        dirty_objects=dirty,
        dirty_bytes=dirty_bytes,
        needs_repair=sum(entry.needs_repair for _, entry in entries_of(view, tenant_id)),
        log_bytes=folder_bytes(folder),
        snapshot_age_s=snapshot_age_s(folder, now_ms),
        damage=log_damage(folder),
        packs=len(packs),
        pack_bytes=pack_bytes,
        packed_bytes=packed_bytes,
        pack_live_bytes=live_bytes,
        pack_amplification=packrows.amplification(pack_bytes, live_bytes),
    )


def log_damage(folder: Path) -> str:
    """Why the stream takes no more, "" while it does."""
    mark = read_quarantine(folder)
    return mark.text if mark is not None else ""


def dirty_size(state_dir: Path, tenant: str, row: ObjectRow) -> int:
    """Of an object that is still being written only its backing file knows."""
    if row.state != ObjectState.DIRTY:
        return row.size
    try:
        return os.stat(state_dir / "hot_cache" / tenant / f"{row.ino}.{row.generation}").st_size
    except OSError:
        return row.size


def folder_bytes(folder: Path) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat().st_size for entry in entries if entry.is_file())
    except FileNotFoundError:
        return 0


def snapshot_age_s(folder: Path, now_ms: int) -> float | None:
    """Of the newest one; None when there is none yet."""
    try:
        return max(0, now_ms - local_snapshots(folder)[-1].created_ms) / 1000
    except (FileNotFoundError, IndexError):
        return None


def object_status(view: View, settings: Settings, place: Place, replication: Replication | None = None) -> ObjectStatus:
    """A file's newest generation. One never written to has generation 0 and no bytes: its name is durable, or not."""
    replication = replication or _from_logs(view, settings)
    inode = place.inode
    row = view.get(place.tenant_id, t.OBJECTS, (inode.ino, inode.generation)) if inode.generation else None
    chunks: list[ChunkStatus] = []
    remote_bytes = 0
    for index, chunk_id in enumerate(row.chunks if row else ()):
        chunk = view.get(place.tenant_id, t.CHUNKS, chunk_id) if chunk_id else None
        if chunk is None:
            continue
        here = view.get(place.tenant_id, t.RESIDENCY, chunk_id) or ResidencyRow()
        chunks.append(
            ChunkStatus(
                chunk_id=chunk_id,
                index=index,
                bytes=chunk.length,
                sha256=chunk.sha256.hex(),
                hot_bytes=chunk_bytes_here(here.mask, chunk, settings.engine.block_bytes),
                warm_bytes=here.warm_bytes,
                key=chunk.key,
                offset=chunk.offset,
                stored_bytes=chunk.stored_bytes,
            )
        )
        whole = full_mask(chunk.length, settings.engine.block_bytes)
        remote_bytes += chunk_bytes_here(whole, chunk, settings.engine.block_bytes) if chunk.key else 0
    dirty = row is not None and row.state in (ObjectState.DIRTY, ObjectState.SEALED)
    damaged = segments.needs_repair(view, place.tenant_id, (c.chunk_id for c in chunks))
    there = not dirty and not damaged and all(c.key for c in chunks)
    return ObjectStatus(
        path=place.path,
        tenant=place.tenant,
        ino=inode.ino,
        size=dirty_size(settings.volume.state_dir, place.tenant, row) if row else inode.size,
        generation=inode.generation,
        state=row.state.name.lower() if row else "empty",
        sealed=row is None or row.state != ObjectState.DIRTY,
        dirty=dirty,
        durable=there and replication.has_all_of(view, inode),
        sha256=row.sha256.hex() if row and row.hashed is HashKind.BYTES else "",
        hot_bytes=sum(c.hot_bytes for c in chunks),
        warm_bytes=sum(c.warm_bytes for c in chunks),
        remote_bytes=remote_bytes,
        chunks=chunks,
        needs_repair=damaged,
    )


def tree_status(view: View, settings: Settings, place: Place, replication: Replication | None = None) -> TreeStatus:
    """`durable` only when the remote has all that is needed of the tenant's log: names that are gone count, too."""
    replication = replication or _from_logs(view, settings)
    ends = replication.needed_ends((VOLUME_STREAM, place.tenant_id))
    found = (object_status(view, settings, file, replication) for file in files_below(view, place) if file.is_file)
    sums: Counter[str] = Counter()
    for one in found:
        sums.update(objects=1, bytes=one.size, hot=one.hot_bytes, warm=one.warm_bytes, remote=one.remote_bytes)
        sums.update(damaged=one.needs_repair)
        if one.dirty:
            sums.update(dirty=1, dirty_bytes=one.size)
    return TreeStatus(
        path=place.path,
        tenant=place.tenant,
        objects=sums["objects"],
        bytes=sums["bytes"],
        dirty_objects=sums["dirty"],
        dirty_bytes=sums["dirty_bytes"],
        durable=not sums["dirty"] and not sums["damaged"] and replication.has(ends),
        hot_bytes=sums["hot"],
        warm_bytes=sums["warm"],
        remote_bytes=sums["remote"],
    )
