"""What the tier records add up to: the tiers that hold each chunk, and nothing about chunks that are gone."""

from __future__ import annotations

import os
import random
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine import objects, residency
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import entry_of, load_index
from aof2.engine.local.handles import Key
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.index import ManifestEntry, Residency
from aof2.engine.manifest.reader import Record, Stream
from aof2.engine.manifest.snapshot import list_snapshots, snapshot_name
from aof2.engine.manifest.tier_events import SEGMENT_RETIRED, WARM_DROPPED
from aof2.engine.segments import tiers_of
from aof2.engine.settings import Settings
from aof2.engine.settings.model import RetentionSettings
from aof2.engine.verify.findings import Kind, Severity
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.engine.helpers import (
    KIB,
    backing_path,
    create_object,
    job_over,
    object_row,
    put_object,
    read_object,
    run_volume,
    seal_object,
    small_settings,
    unlink_object,
)
from tests.verify.build import commit

CHUNK = 256 * KIB
TENANT = 1
HOT, WARM, REMOTE = Residency.TIER0, Residency.TIER1, Residency.TIER2


def dull(n: int) -> bytes:
    return (b"line %d of a log that repeats itself\n" % n) * (CHUNK // 36)


def no_retention(settings: Settings) -> Settings:
    keep = RetentionSettings(undelete_window_s=0, checkpoints=1, purge_after_s=0)
    return msgspec.structs.replace(settings, retention=keep)


async def pruned(v: Volume) -> None:
    """Twice: the first may be one that housekeeping began before."""
    for _ in range(2):
        await job_over(v.jobs, TENANT, await v.jobs.prune(TENANT))


def entry(v: Volume, chunk_id: int) -> ManifestEntry:
    with v.catalog.view() as view:
        found = entry_of(view, TENANT, chunk_id)
    assert found is not None
    return found


def records(v: Volume, segment_id: int) -> list[Record]:
    v.writer.flush()
    return [r for r in Stream(v.manifest_dir / str(TENANT)).records() if r.segment_id == segment_id]


def same_as_rows(v: Volume) -> None:
    with v.catalog.view() as view:
        entries = load_index(view, TENANT).entries
        for chunk_id, chunk in view.scan(TENANT, t.CHUNKS):
            assert entries[chunk_id].residency == tiers_of(chunk, view.get(TENANT, t.RESIDENCY, chunk_id)), chunk_id


async def warm_file(v: Volume, name: bytes, data: bytes) -> tuple[Key, int]:
    """One whose only chunk left hot_cache for warm."""
    key = await put_object(v, "default", name, data)
    await v.checkpoint("default")
    await v.evictor.make_room(v.settings.cache.hot_bytes)
    return key, object_row(v, key).chunks[0]


def test_dropping_the_warm_copy_leaves_the_hot_one(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key, chunk_id = await warm_file(v, b"a", dull(1))
        assert entry(v, chunk_id).residency == WARM | REMOTE
        assert await read_object(v, key, 0, CHUNK) == dull(1)
        await v.hydrator.quiesce()
        assert entry(v, chunk_id).residency == HOT | WARM | REMOTE
        await trio.to_thread.run_sync(v.evictor.cool, [(TENANT, chunk_id)])
        assert entry(v, chunk_id).residency == HOT | REMOTE
        same_as_rows(v)
        dropped = [r.decoded() for r in records(v, chunk_id) if r.type == "CustomEvent"]
        assert [e.schema_id for e in dropped if isinstance(e, p.CustomEvent)] == [WARM_DROPPED]

    run_volume(small_settings(tmp_path), body)


def test_a_compression_is_said_when_admitted_and_when_it_ends(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        _, chunk_id = await warm_file(v, b"a", dull(1))
        told = [r.decoded() for r in records(v, chunk_id) if r.type.startswith("Compression")]
        started, done = told
        assert isinstance(started, p.CompressionStarted) and started.job_id > 0
        assert isinstance(done, p.CompressionDone) and done.compressed_bytes == v.warm.used_bytes
        _, other = await warm_file(v, b"b", dull(2))
        again = [r.decoded() for r in records(v, other) if r.type == "CompressionStarted"]
        assert [type(r) for r in again] == [p.CompressionStarted] and again != [started]  # a job of its own

    run_volume(small_settings(tmp_path), body)


@pytest.mark.expects_warnings
def test_a_chunk_that_changed_fails_to_compress(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", dull(1))
        await v.checkpoint("default")
        fd = os.open(backing_path(v, key), os.O_WRONLY)
        os.pwrite(fd, b"!", CHUNK // 2)
        os.close(fd)
        await v.evictor.make_room(v.settings.cache.hot_bytes)
        chunk_id = object_row(v, key).chunks[0]
        told = [r.decoded() for r in records(v, chunk_id) if r.type.startswith("Compression")]
        assert isinstance(told[0], p.CompressionStarted)
        assert told[1:] == [p.CompressionFailed(1)]
        assert entry(v, chunk_id).residency == REMOTE
        assert await read_object(v, key, 0, CHUNK) == dull(1)  # the remote has the real one

    run_volume(small_settings(tmp_path), body)


def test_a_segment_is_opened_with_its_object_and_sealed_under_that_number(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await create_object(v, "default", b"a")
        with v.catalog.view() as view:
            dirty = view.get(TENANT, t.DIRTY, key[1])
        assert dirty is not None and dirty.segment_id
        opened = entry(v, dirty.segment_id)
        assert (opened.opened, opened.sealed, opened.residency, opened.epoch) == (True, False, HOT, key[2])
        backing_path(v, key).write_bytes(dull(1) * 2)
        await seal_object(v, key)
        chunks = object_row(v, key).chunks
        assert chunks[0] == dirty.segment_id and len(chunks) == 2
        for index, chunk_id in enumerate(chunks):
            told = [r.decoded() for r in records(v, chunk_id)]
            assert told[0] == p.SegmentOpened(index * CHUNK, key[2])
            assert isinstance(told[1], p.SealSegment)
        same_as_rows(v)

    run_volume(small_settings(tmp_path), body)


def test_a_segment_without_a_chunk_is_retired(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        empty = await create_object(v, "default", b"empty")
        removed = await create_object(v, "default", b"removed")
        with v.catalog.view() as view:
            dirty = {key: view.get(TENANT, t.DIRTY, key[1]) for key in (empty, removed)}
        backing_path(v, empty).touch()
        await seal_object(v, empty)
        await unlink_object(v, "default", b"removed")
        for row in dirty.values():
            assert row is not None
            with v.catalog.view() as view:
                assert entry_of(view, TENANT, row.segment_id) is None
            last = records(v, row.segment_id)[-1].decoded()
            assert isinstance(last, p.CustomEvent) and last.schema_id == SEGMENT_RETIRED

    run_volume(small_settings(tmp_path), body)


def test_the_watermark_of_a_seal_is_where_the_log_was(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        keys = [await put_object(v, "default", b"f%d" % n, dull(n)) for n in range(3)]
        seals = [r for key in keys for r in records(v, object_row(v, key).chunks[0]) if r.type == "SealSegment"]
        marks = [r.decoded().coordinator_watermark for r in seals]  # type: ignore[union-attr]
        assert marks == sorted(set(marks)) and marks[0] > 0
        for seal, mark in zip(seals, marks, strict=True):
            assert seal.ordinal - 2 <= mark <= seal.ordinal  # the log's end when the batch began

    run_volume(small_settings(tmp_path), body)


def test_purged_chunks_leave_the_fold_and_the_snapshots(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    count = 300

    async def body(v: Volume) -> None:
        async def snapshot_len() -> int:
            await v.log_snapshots.take(TENANT)
            directory = v.manifest_dir / str(TENANT)
            return (directory / snapshot_name(max(list_snapshots(directory)))).stat().st_size

        keep = await put_object(v, "default", b"keep", dull(0))
        await v.checkpoint("default")
        few = await snapshot_len()
        for n in range(count):
            await put_object(v, "default", b"f%d" % n, random.Random(n).randbytes(100))
        await v.checkpoint("default")
        many = await snapshot_len()
        assert many > few + count * 200
        for n in range(count):
            await unlink_object(v, "default", b"f%d" % n)
        await pruned(v)
        with v.catalog.view() as view:
            entries = load_index(view, TENANT).entries
            assert set(entries) == {chunk_id for chunk_id, _ in view.scan(TENANT, t.CHUNKS)}
        assert set(entries) == set(object_row(v, keep).chunks)
        assert await snapshot_len() < few + 20_000  # job rows aside, as before them

    run_volume(no_retention(settings), body)


def test_an_abandoned_upload_is_never_called_done(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", dull(1))
        chunk_id = object_row(v, key).chunks[0]
        with v.catalog.view() as view:
            chunk = view.get(TENANT, t.CHUNKS, chunk_id)
        assert chunk is not None
        name = f"checkpoints/default/1/chunk-{chunk_id}-1-{chunk.sha256.hex()}.blob"
        v.writer.call(TENANT, lambda b: objects.upload_started(b, [(chunk_id, name)]))
        await unlink_object(v, "default", b"a")
        with v.catalog.view() as view:
            assert entry_of(view, TENANT, chunk_id) is not None  # its upload has not ended
        await pruned(v)
        types = [r.type for r in records(v, chunk_id)]
        assert "UploadDone" not in types
        assert types[types.index("UploadStarted") :][1:3] == ["CustomEvent", "UploadFailed"]
        assert types[-1] == "Tier2Deleted"
        with v.catalog.view() as view:
            index = load_index(view, TENANT)
        assert not index.entries and not index.pending_uploads and not index.pending_deletes

    run_volume(no_retention(small_settings(tmp_path)), body)


def test_the_only_copy_is_not_evicted(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", dull(1))
        await v.checkpoint("default")
        chunk_id = object_row(v, key).chunks[0]
        v.writer.call(TENANT, lambda b: residency.hydration_failed(b, chunk_id, 4))
        await v.evictor.make_room(v.settings.cache.hot_bytes)
        assert entry(v, chunk_id).residency == HOT | REMOTE and backing_path(v, key).exists()
        v.writer.call(TENANT, lambda b: b.record(p.UploadDone(f"k{chunk_id}", ""), segment_id=chunk_id))  # put again
        await v.evictor.make_room(v.settings.cache.hot_bytes)
        assert not backing_path(v, key).exists()

    run_volume(small_settings(tmp_path), body)


def test_verify_compares_the_fold_and_mends_it(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    chunk_ids: list[int] = []

    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", dull(1))
        await v.checkpoint("default")
        chunk_ids.extend(object_row(v, key).chunks)

    run_volume(settings, body)
    assert verify(settings).exit_code == 0
    # A record that no row goes with: the file is here, the fold says it is not.
    commit(settings, lambda b: b.record(p.LocalEvicted(1), segment_id=chunk_ids[0]))
    commit(settings, lambda b: b.record(p.CompressionDone(1, 0), segment_id=chunk_ids[0]))
    found = [f for f in verify(settings).findings if f.severity is not Severity.NOTE]
    assert [(f.kind, f.chunk_id) for f in found] == [(Kind.TIERS, chunk_ids[0])]
    assert "in warm and remote, its rows in hot and remote" in found[0].message
    assert verify(settings, repair=True).exit_code == 1
    assert verify(settings).exit_code == 0
