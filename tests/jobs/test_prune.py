"""PruneCheckpoint: keeps what retention keeps, deletes the rest once and only when nobody can want it."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import msgspec
import pytest

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.rows import JobState, ObjectState
from aof2.engine.jobs import prune, queue
from aof2.engine.remote.errors import RemoteAuthError, RemoteUnavailableError
from tests.engine.helpers import backing_path, object_row, read_object, seal_object, small_settings, unlink_object

from .helpers import CHUNK, KEEP, TENANT, Clock, World, run_world

Key = tuple[int, int, int]


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


async def rewrite(w: World, key: Key, data: bytes) -> Key:
    """The next generation of a file, as a writer that reopens it would leave it."""
    stream_id, ino, generation = key

    def begin(b: Batch) -> None:
        inode = b.get(t.INODES, ino)
        assert inode is not None
        b.put(t.INODES, ino, msgspec.structs.replace(inode, generation=generation + 1))
        objects.create(b, ino, generation + 1, chunk_bytes=CHUNK)

    w.v.writer.call(stream_id, begin)
    new = (stream_id, ino, generation + 1)
    path = backing_path(w.v, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    await seal_object(w.v, new)
    return new


async def pruned(w: World) -> dict[str, object]:
    return queue.report(await w.wait(TENANT, await w.jobs.prune(TENANT)))


def states(w: World) -> dict[tuple[int, int], ObjectState]:
    return {key: row.state for key, row in w.rows(t.OBJECTS).items()}


def catalog_keys(w: World) -> list[str]:
    return sorted(blob.key for blob in w.rows(t.BLOBS).values())


def pending_deletes(w: World) -> set[tuple[int, str]]:
    with w.v.catalog.view() as view:
        return load_index(view, TENANT).pending_deletes


def test_the_newest_generations_stay(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        key = await w.put("a", content(0, CHUNK + 1))
        for i in range(1, 5):
            await w.jobs.checkpoint(TENANT)
            key = await rewrite(w, key, content(i, CHUNK + 1))
        await w.jobs.checkpoint(TENANT)
        assert len(w.remote_blobs()) == 10
        chunks = [c for c in w.rows(t.CHUNKS).values() if c.superseded]
        assert {c.generation for c in chunks} == {1, 2, 3, 4}
        assert await pruned(w) == {}
        assert len(w.rows(t.OBJECTS)) == 5  # superseded a moment ago
        clock.jump(61)
        expected = prune.forecast(w.v.catalog, TENANT, clock.now_ms(), KEEP)
        assert (expected.generations, expected.blobs, expected.later_blobs) == (3, 0, 6)
        assert len(w.rows(t.OBJECTS)) == 5  # looked at, and left alone
        report = await pruned(w)
        assert report["objects_released"] == 3
        assert {generation for _, generation in w.rows(t.OBJECTS)} == {4, 5}
        assert len(w.remote_blobs()) == 10  # unreferenced a moment ago
        clock.jump(61)
        expected = prune.forecast(w.v.catalog, TENANT, clock.now_ms(), KEEP)
        assert (expected.generations, expected.blobs, expected.later_blobs) == (0, 6, 0)
        report = await pruned(w)
        assert (report["blobs_deleted"], report["bytes_freed"]) == (6, expected.bytes)
        assert w.remote_blobs() == catalog_keys(w)
        assert len(w.remote_blobs()) == 4
        assert w.quota_is_even()
        assert len(list(w.v.hot.root.rglob("[0-9]*.*"))) == 2
        await w.v.evict([key])
        assert await read_object(w.v, key, 0, CHUNK + 1) == content(4, CHUNK + 1)
        clock.jump(10_000)
        before = w.remote.count("delete")
        await pruned(w)
        assert w.remote.count("delete") == before
        assert not prune.is_due(w.v.catalog, TENANT, clock.now_ms(), KEEP)

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_shared_content_stays_as_long_as_one_needs_it(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        data = content(1, CHUNK)
        a = await w.put("a", data)
        b = await w.put("b", data)
        await w.jobs.checkpoint(TENANT)
        await unlink_object(w.v, "default", b"a")
        clock.jump(601)
        assert (await pruned(w))["objects_released"] == 1
        clock.jump(601)
        await pruned(w)
        (blob,) = w.rows(t.BLOBS).values()
        assert blob.refs == 1
        assert len(w.remote_blobs()) == 1
        await w.v.evict([b])
        assert await read_object(w.v, b, 0, CHUNK) == data
        assert a[1:] not in w.rows(t.OBJECTS)

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_tombstones_go_after_their_window(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        old = await w.put("a", content(1, CHUNK))
        await w.jobs.checkpoint(TENANT)
        key = await rewrite(w, old, content(2, 2 * CHUNK))
        await w.jobs.checkpoint(TENANT)
        await unlink_object(w.v, "default", b"a")
        clock.jump(599)
        await pruned(w)
        assert states(w)[key[1:]] == ObjectState.TOMBSTONED
        clock.jump(2)
        await pruned(w)
        assert w.rows(t.OBJECTS) == {}
        assert w.rows(t.CHUNKS) == w.rows(t.RESIDENCY) == w.rows(t.TOMBSTONES) == {}
        assert key[1] not in w.rows(t.INODES)
        assert w.v.quota.usage.used_bytes == 0
        assert list(w.v.hot.root.rglob("[0-9]*.*")) == []
        clock.jump(61)
        await pruned(w)
        assert w.remote_blobs() == []
        assert w.rows(t.BLOBS) == {}

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_what_comes_back_into_use_is_not_deleted(tmp_path: Path) -> None:
    """Between the last reference going and purge_after, somebody writes the same content again."""
    clock = Clock()

    async def body(w: World) -> None:
        data = content(1, CHUNK)
        await w.put("a", data)
        await w.jobs.checkpoint(TENANT)
        await unlink_object(w.v, "default", b"a")
        clock.jump(601)
        await pruned(w)
        b = await w.put("b", data)
        await w.jobs.checkpoint(TENANT)
        assert w.remote.count("put") == 1  # it was still there
        clock.jump(601)
        await pruned(w)
        await w.v.evict([b])
        assert await read_object(w.v, b, 0, CHUNK) == data

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_a_queued_delete_is_never_shared(tmp_path: Path) -> None:
    """The blob left the catalog and waits to be deleted: the same content is uploaded anew, under another key."""
    clock = Clock()

    async def body(w: World) -> None:
        data = content(1, CHUNK)
        await w.put("a", data)
        await w.jobs.checkpoint(TENANT)
        await unlink_object(w.v, "default", b"a")
        clock.jump(601)
        await pruned(w)
        clock.jump(61)
        w.remote.fail = lambda op, key: RemoteUnavailableError("away") if op == "delete" else None
        job_id = await w.jobs.prune(TENANT)
        await w.until(lambda: w.job(job_id).attempts == 1)
        assert len(pending_deletes(w)) == 1
        b = await w.put("b", data)
        await w.jobs.checkpoint(TENANT)
        assert w.remote.count("put") == 2
        w.remote.fail = lambda op, key: None
        await w.jobs.runner.kick()
        await w.wait(TENANT, job_id)
        assert pending_deletes(w) == set()
        assert w.remote_blobs() == catalog_keys(w)
        await w.v.evict([b])
        assert await read_object(w.v, b, 0, CHUNK) == data

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_a_cold_scan_holds_its_blobs(tmp_path: Path) -> None:
    clock = Clock()
    held: set[str] = set()

    async def body(w: World) -> None:
        await w.put("a", content(1, CHUNK))
        await w.put("b", content(2, CHUNK))
        await w.jobs.checkpoint(TENANT)
        await unlink_object(w.v, "default", b"a")
        await unlink_object(w.v, "default", b"b")
        clock.jump(601)
        await pruned(w)
        clock.jump(61)
        held.add(w.remote_blobs()[0])
        job_id = await w.jobs.prune(TENANT)
        await w.until(lambda: w.job(job_id).attempts == 1)
        row = w.job(job_id)
        assert (row.state, row.reason) == (JobState.QUEUED, "1 blobs are being read by cold scans")
        assert w.remote_blobs() == sorted(held)
        held.clear()
        await w.jobs.runner.kick()
        await w.wait(TENANT, job_id)
        assert w.remote_blobs() == []

    run_world(tmp_path, body, clock=clock.mock, env=clock.env(), blocked=lambda key: key in held)


def test_what_is_open_stays(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        data = content(1, 2 * CHUNK)
        key = await w.put("a", data)
        await w.jobs.checkpoint(TENANT)
        await w.v.evict([key])
        async with w.v.opened_object(key) as handle:
            await unlink_object(w.v, "default", b"a")
            clock.jump(601)
            assert (await pruned(w))["objects_in_use"] == 1
            assert await w.v.hydrator.read(handle, 0, len(data)) == data
            await w.v.hydrator.settle()
        assert (await pruned(w))["objects_released"] == 1
        assert w.v.quota.usage.used_bytes == 0

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


@pytest.mark.expects_warnings
def test_a_wrong_count_costs_no_data(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        await w.put("a", content(1, CHUNK))
        await w.jobs.checkpoint(TENANT)

        def spoil(b: Batch) -> None:
            for sha256, blob in b.scan(t.BLOBS):
                b.put(t.BLOBS, sha256, msgspec.structs.replace(blob, refs=0, unreferenced_ms=1))

        w.v.writer.call(TENANT, spoil)
        await pruned(w)
        assert len(w.remote_blobs()) == 1

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())
    assert "blobs without references are referenced" in caplog.text


def test_uploads_nobody_finished_are_cleared(tmp_path: Path) -> None:
    """A checkpoint put some blobs of an object that was unlinked before it was published."""
    clock = Clock()

    async def body(w: World) -> None:
        key = await w.put("a", content(1, 2 * CHUNK))
        puts: list[str] = []

        def fail(op: str, name: str) -> Exception | None:
            puts.append(name)
            return RemoteAuthError("403") if op == "put" and "chunk-2-" in name else None

        w.remote.fail = fail
        (job_id,) = await w.jobs.plan(TENANT)
        await w.until(lambda: w.job(job_id).attempts == 1)
        assert len(w.remote_blobs()) == 1
        await unlink_object(w.v, "default", b"a")
        w.remote.fail = lambda op, name: None
        await pruned(w)
        assert len(w.remote_blobs()) == 1  # it may still be on its way
        clock.jump(61)
        await pruned(w)
        assert w.remote_blobs() == []
        assert pending_deletes(w) == set()
        with w.v.catalog.view() as view:
            assert load_index(view, TENANT).pending_uploads == {}
        assert key[1:] not in w.rows(t.OBJECTS)

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_two_uploads_of_one_content_leave_one_blob(tmp_path: Path) -> None:
    """Both were on their way before either was in the catalog: the second commit queues its own blob for deletion."""
    clock = Clock()

    async def body(w: World) -> None:
        a = await w.put("a", content(1, CHUNK))
        b = await w.put("b", content(1, CHUNK))
        for key, checkpoint_id in ((a, 1), (b, 2)):
            chunk_id = object_row(w.v, key).chunks[0]
            sha256 = w.rows(t.CHUNKS)[chunk_id].sha256
            name = f"checkpoints/default/{checkpoint_id}/chunk-{chunk_id}-1-{sha256.hex()}.blob"
            w.v.remote.put_blob(name, b"x", 1)
            up = objects.Uploaded(chunk_id, name, "e", 1, "", True)
            w.v.writer.call(
                TENANT,
                partial(objects.published, ino=key[1], generation=1, checkpoint_id=checkpoint_id, uploads=[up]),
            )
        (blob,) = w.rows(t.BLOBS).values()
        assert (blob.refs, blob.key) == (2, w.remote_blobs()[0])
        assert {c.key for c in w.rows(t.CHUNKS).values()} == {blob.key}
        await pruned(w)
        assert w.remote_blobs() == [blob.key]
        with w.v.catalog.view() as view:
            assert {e.key for e in load_index(view, TENANT).entries.values()} == {blob.key}

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_prunes_come_by_themselves_when_there_is_something(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        await w.put("a", content(1, 100))
        await w.jobs.checkpoint(TENANT)
        await unlink_object(w.v, "default", b"a")
        clock.jump(700)
        await w.until(lambda: not w.rows(t.OBJECTS))
        await w.until(lambda: all(row.state == JobState.DONE for row in w.all_jobs()))
        clock.jump(700)
        await w.until(lambda: not w.remote_blobs())

    settings = small_settings(tmp_path)
    run_world(settings, body, clock=clock.mock, env=clock.env(), prune_every_s=650.0)
