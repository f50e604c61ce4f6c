"""Objects put into a volume without a mount: what the benches, and the tests of the engine, move between tiers.

Owner: the trio task that has the volume open. A crash leaves what the catalog says of a file that was being written.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import trio

from aof2.engine import namespace, objects
from aof2.engine.aio import result_of
from aof2.engine.catalog.rows import ObjectRow
from aof2.engine.local.handles import Key
from aof2.engine.tiering.hashing import ObjectDigest, digest_file
from aof2.engine.tiering.recent import units_of
from aof2.engine.volume import Volume


def backing_path(volume: Volume, key: Key) -> Path:
    return volume.hot.path(volume.tenant_names()[key[0]], key[1], key[2])


async def create_object(volume: Volume, tenant: str, name: bytes, parent: int = 0) -> Key:
    """A new, empty file in a directory (0: the tenant's root), dirty, with a backing file to write to."""
    tenant_id = volume.tenants.named(tenant).tenant_id
    chunk_bytes = volume.settings.engine.chunk_bytes
    work = partial(namespace.create, parent=parent or namespace.root_ino(tenant_id), name=name, chunk_bytes=chunk_bytes)
    ino = (await result_of(volume.writer.submit(tenant_id, work))).ino
    os.close(volume.hot.create(volume.hot.path(tenant, ino, 1)))
    return (tenant_id, ino, 1)


async def put_object(volume: Volume, tenant: str, name: bytes, data: bytes, parent: int = 0) -> Key:
    """A whole object at once: created, written, sealed."""
    key = await create_object(volume, tenant, name, parent)
    await trio.to_thread.run_sync(_write, backing_path(volume, key), data)
    await seal_object(volume, key)
    return key


def _write(path: Path, data: bytes) -> None:
    with open(path, "r+b") as f:
        f.write(data)


async def seal_object(volume: Volume, key: Key) -> ObjectRow:
    """The last writer is gone: hashes the backing file, syncs it and records it as sealed."""
    tenant, block_bytes = volume.tenant_names()[key[0]], volume.settings.engine.block_bytes
    digest, identity = await trio.to_thread.run_sync(_digest, volume, backing_path(volume, key))
    size = objects.digest_disk_bytes(digest, block_bytes)
    reserved = await volume.evictor.take(tenant, size)
    if reserved is not None:
        reserved.commit(size)
    else:
        # The bytes are there already: they count, over the limit if need be, and clean data makes way.
        volume.quota.note_used(tenant, size)
    work = partial(
        objects.seal, ino=key[1], generation=key[2], digest=digest, backing=identity, block_bytes=block_bytes
    )
    try:
        row = await result_of(volume.writer.submit(key[0], work))
    except Exception:
        volume.evictor.give_back(tenant, size)  # counted when the seal is recorded, not before
        raise
    volume.recent.hot.touched(key[1])
    volume.recent.hot.sized(key[1], units_of(size))
    volume.jobs.sealed(key[0], digest.data_bytes)
    return row


def _digest(volume: Volume, path: Path) -> tuple[ObjectDigest, tuple[int, int, int]]:
    engine = volume.settings.engine
    fd = volume.hot.open(path)
    try:
        size = os.fstat(fd).st_size
        digest = digest_file(fd, size, chunk_bytes=engine.chunk_bytes, block_bytes=engine.block_bytes, path=str(path))
        # Bytes and name: a seal speaks of a file that is there after power loss.
        volume.env.files.fsync(fd)
        volume.env.files.fsync_dir(path.parent)
        return digest, volume.hot.identity(fd)
    finally:
        os.close(fd)
