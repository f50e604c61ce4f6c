"""The crash matrix of the tiers: killed at every named point of sealing, upload, eviction, hydration and recovery.

After a kill (page cache intact) everything that was answered is there. After power loss (unsynced pages dropped, LMDB
gone) everything that was synced is. Either way the counts are right, nothing unverified is served, and the volume goes
on.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from aof2.engine import objects
from aof2.engine.catalog import recovery, store, writer
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.local import warm
from aof2.engine.settings import Settings
from aof2.engine.tiering import evict, hydrate, publish
from aof2.engine.volume import Volume
from tests.engine.helpers import object_row, put_object, read_object
from tests.support.crash import Acks, Crash, PowerLoss, crash_cases, hits_of, run_until_crash

from .helpers import KIB, run_volume, small_settings

CHUNK = 256 * KIB
POINTS = tuple(
    point
    for module in (hydrate, evict, publish, warm, writer, store)
    for point in module.CRASH_POINTS
    if point != "publish.rebuild_deleted"  # of repair, which has its own tests
)


def content(n: int) -> bytes:
    """Even ones compress, odd ones do not."""
    size = [1000, CHUNK, 2 * CHUNK + 77][n % 3]
    return (b"%d again and again " % n * size)[:size] if n % 2 == 0 else random.Random(n).randbytes(size)


def settings_in(root: Path, remote: Path) -> Settings:
    remote.mkdir(exist_ok=True)
    settings = small_settings(root, hot_bytes=4 * CHUNK, remote_url=f"file://{remote}")
    return msgspec.structs.replace(settings, retention=settings.retention)


def workload(env: Env, acks: Acks) -> None:
    root: Path = env.files.root  # type: ignore[attr-defined]

    async def body(v: Volume) -> None:
        for n in range(6):
            await put_object(v, "default", b"f%d" % n, content(n))
            acks.tell({"answered": n})
            if n % 2:
                v.writer.flush()
                acks.tell({"synced": n})
            await v.checkpoint("default")
            acks.tell({"published": n})
        for n in range(6):
            await read_object(v, key_of(v, n), 0, len(content(n)))
            await v.hydrator.quiesce()

    settings = settings_in(root, acks.path.with_name("remote"))
    run_volume(settings, body, env=env)
    run_volume(settings, body_again, env=env)


async def body_again(v: Volume) -> None:
    await v.evict([key_of(v, n) for n in range(6)])


def key_of(v: Volume, n: int) -> tuple[int, int, int]:
    tenant_id = v.tenants.named("default").tenant_id
    with v.catalog.view() as view:
        for (_, name), entry in view.scan(tenant_id, t.DENTRIES):
            if name == b"f%d" % n:
                return (tenant_id, entry.ino, 1)
    raise KeyError(n)


def told(crash: Crash, what: str) -> int:
    return max((a[what] for a in crash.acks if isinstance(a, dict) and what in a), default=-1)


def check(root: Path, remote: Path, *, there: int, published: int) -> None:
    """Objects up to `there` are whole; those up to `published` are in the remote; the volume works on."""

    async def body(v: Volume) -> None:
        for n in range(there + 1):
            key = key_of(v, n)
            row = object_row(v, key)
            assert row.state in (ObjectState.SEALED, ObjectState.PUBLISHED)
            assert n > published or row.state == ObjectState.PUBLISHED
            assert await read_object(v, key, 0, row.size) == content(n)
        await v.hydrator.quiesce()
        counted(v)
        await v.checkpoint("default")
        keys = [key_of(v, n) for n in range(there + 1)]
        assert (await v.evict(keys))[1] == []
        for n in range(there + 1):
            assert await read_object(v, keys[n], 0, len(content(n))) == content(n)
        await put_object(v, "default", b"after", b"life goes on")

    run_volume(settings_in(root, remote), body)


def counted(v: Volume) -> None:
    """The counters are the sums of their rows, and the quota knows them."""
    tenant_id = v.tenants.named("default").tenant_id
    block_bytes = v.settings.engine.block_bytes
    with v.catalog.view() as view:
        hot = 0
        for chunk_id, row in view.scan(tenant_id, t.RESIDENCY):
            chunk = view.get(tenant_id, t.CHUNKS, chunk_id)
            assert chunk is not None
            hot += objects.chunk_disk_bytes(row.mask, chunk, block_bytes)
        assert (view.get(tenant_id, t.COUNTERS, objects.HOT_BYTES) or 0) == hot
        warm_bytes = sum(size for _, size in view.scan(tenant_id, t.WARM))
        assert (view.get(tenant_id, t.COUNTERS, objects.WARM_BYTES) or 0) == warm_bytes
    assert v.quota.usage.used_bytes == hot


@pytest.mark.expects_warnings
def test_every_point(tmp_path: Path) -> None:
    hits = hits_of(workload, tmp_path / "hits")
    rng = random.Random(8)
    killed_at: set[str] = set()
    for n, (point, nth) in enumerate(crash_cases(hits, POINTS, per_point_max=2)):
        base = tmp_path / f"case{n}"
        crash = run_until_crash(workload, base, point, nth)
        if not crash.killed:
            continue  # commits group by chance: this run passed the point less often
        killed_at.add(point)
        shutil.copytree(base / "remote", base / "remote2", dirs_exist_ok=True)
        disk = PowerLoss(crash).disk(base / "disk", rng)
        shutil.rmtree(disk / "state" / "catalog", ignore_errors=True)
        check(disk, base / "remote2", there=told(crash, "published"), published=told(crash, "published"))
        check(crash.root, base / "remote", there=told(crash, "answered"), published=told(crash, "published"))
        shutil.rmtree(base)
    assert killed_at == set(POINTS)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("point", recovery.CRASH_POINTS)
def test_a_crash_while_the_catalog_is_rebuilt(tmp_path: Path, point: str) -> None:
    def twice(env: Env, acks: Acks) -> None:
        root: Path = env.files.root  # type: ignore[attr-defined]
        settings = settings_in(root, acks.path.with_name("remote"))

        async def first(v: Volume) -> None:
            for n in range(3):
                await put_object(v, "default", b"f%d" % n, content(n))
            await v.checkpoint("default")
            for stream_id in v.target.streams:
                await v.log_snapshots.take(stream_id)

        async def second(_: Volume) -> None:
            pass

        run_volume(settings, first, parts=("jobs",))  # uploads would make more or fewer chunks each time
        shutil.rmtree(root / "state" / "catalog")
        acks.tell({"published": 2})
        run_volume(settings, second, env=env)

    hits = hits_of(twice, tmp_path / "hits")
    for nth in range(1, hits[point] + 1):
        base = tmp_path / str(nth)
        crash = run_until_crash(twice, base, point, nth)
        assert crash.killed
        check(crash.root, base / "remote", there=2, published=2)
