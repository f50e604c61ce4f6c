"""A small volume on a directory remote, objects in it without a mount, and a way to run a trio test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path

import msgspec
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import JobRow, JobState, ObjectRow
from aof2.engine.env import Env
from aof2.engine.jobs.errors import JobFailedError
from aof2.engine.jobs.queue import LIVE
from aof2.engine.jobs.service import Jobs
from aof2.engine.local.handles import Key
from aof2.engine.local.sparse import counted_bytes
from aof2.engine.objects import ObjectGoneError
from aof2.engine.settings import Settings
from aof2.engine.settings.model import (
    CacheSettings,
    EngineSettings,
    FilesTenant,
    ManifestSettings,
    MetricsSettings,
    RemoteSettings,
    VolumeSettings,
)
from aof2.engine.tiering.coldscan import ColdScanOptions, Sink
from aof2.engine.units import MinFree
from aof2.engine.volume import PARTS, Volume, open_volume
from aof2.fs.bench.objects import backing_path, create_object, put_object, seal_object

KIB = 1 << 10
MIB = 1 << 20


def small_settings(
    root: Path,
    *,
    hot_bytes: int = 64 * MIB,
    chunk_bytes: int = 256 * KIB,
    block_bytes: int = 16 * KIB,
    compression: str = "zstd",
    remote_url: str | None = None,
    **remote: object,
) -> Settings:
    """Chunks of 256 KiB and blocks of 16 KiB: large objects without large files."""
    (root / "remote").mkdir(parents=True, exist_ok=True)
    url = remote_url or f"file://{root / 'remote'}"
    return Settings(
        volume=VolumeSettings(mountpoint=root / "mnt", state_dir=root / "state"),
        remote=RemoteSettings(url=url, **remote),  # type: ignore[arg-type]
        cache=CacheSettings(hot_bytes=hot_bytes, page_cache_bytes=16 * MIB, min_free=MinFree()),
        manifest=ManifestSettings(chunk_capacity_bytes=16 * KIB),
        metrics=MetricsSettings(listen=""),
        tenants={"default": FilesTenant(compression=compression)},
        engine=EngineSettings(chunk_bytes=chunk_bytes, block_bytes=block_bytes),
    )


def run_volume(
    settings: Settings,
    body: Callable[[Volume], Awaitable[None]],
    *,
    env: Env | None = None,
    parts: Collection[str] = PARTS,
) -> None:
    async def main() -> None:
        with trio.fail_after(120):
            async with open_volume(settings, env=env, parts=parts) as volume:
                await body(volume)

    trio.run(main)


def with_cache(settings: Settings, **changes: object) -> Settings:
    return msgspec.structs.replace(settings, cache=msgspec.structs.replace(settings.cache, **changes))


# -- objects without a mount ---------------------------------------------------------------------------------------


def object_row(volume: Volume, key: Key) -> ObjectRow:
    with volume.catalog.view() as view:
        row = view.get(key[0], t.OBJECTS, (key[1], key[2]))
    if row is None:
        raise ObjectGoneError(f"object {key[1]}.{key[2]} is gone")
    return row


async def read_object(volume: Volume, key: Key, offset: int, length: int) -> bytes:
    volume.recent.hot.used(key[1])
    async with volume.opened_object(key) as handle:
        return await volume.hydrator.read(handle, offset, length)


async def cold_read(
    volume: Volume, key: Key, offset: int, length: int, sink: Sink, options: ColdScanOptions | None = None
) -> int:
    async with volume.opened_object(key) as handle:
        return await volume.cold.read_page_trickle(handle, offset, length, sink, options)


async def unlink_object(volume: Volume, tenant: str, name: bytes) -> None:
    """Removes a name. Published bytes stay for the undelete window; others go with it."""
    tenant_id = volume.tenants.named(tenant).tenant_id
    work = partial(namespace.unlink, parent=namespace.root_ino(tenant_id), name=name)
    inode = await result_of(volume.writer.submit(tenant_id, work))
    key = (tenant_id, inode.ino, inode.generation)
    with volume.catalog.view() as view:
        gone = view.get(key[0], t.OBJECTS, (key[1], key[2])) is None
    if not inode.nlink:
        volume.recent.hot.unwanted(key[1])
    if gone and not inode.nlink:
        volume.recent.hot.forget(key[1])
        volume.handles.forget(key)
        measure = partial(counted_bytes, block_bytes=volume.settings.engine.block_bytes)
        volume.evictor.doomed.add(backing_path(volume, key), tenant, measure)
        await volume.evictor.doomed.delete_all()


async def undelete_object(volume: Volume, tenant: str, ino: int, name: bytes) -> None:
    tenant_id = volume.tenants.named(tenant).tenant_id
    work = partial(namespace.undelete, ino=ino, parent=namespace.root_ino(tenant_id), name=name)
    await result_of(volume.writer.submit(tenant_id, work))


__all__ = [
    "KIB",
    "MIB",
    "backing_path",
    "cold_read",
    "create_object",
    "object_row",
    "put_object",
    "read_object",
    "run_volume",
    "seal_object",
    "small_settings",
    "undelete_object",
    "unlink_object",
    "with_cache",
]


async def job_over(jobs: Jobs, tenant_id: int, job_id: int) -> JobRow:
    """The job once it is over; JobFailedError with its reason when it failed."""
    while True:
        change = jobs.runner.changes.next()
        row = jobs.runner.job(tenant_id, job_id)
        assert row is not None
        if row.state == JobState.FAILED:
            raise JobFailedError(row.reason)
        if row.state not in LIVE:
            return row
        await change.wait()
