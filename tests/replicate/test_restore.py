"""A volume from the remote alone: what was published is there, byte for byte; what was not is named, and not shown."""

from __future__ import annotations

import random
import shutil
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine import namespace
from aof2.engine.audit.reader import Replay
from aof2.engine.audit.state import VisibleState
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import bundle_key, chunk_key
from aof2.engine.objects import HOT_BYTES
from aof2.engine.remote.fence import claim, read_volume
from aof2.engine.remote.keys import is_pack
from aof2.engine.remote.open import open_remote
from aof2.engine.replicate.claim import load_identity
from aof2.engine.replicate.listing import list_stream
from aof2.engine.replicate.lost import Why
from aof2.engine.replicate.restore import STAGING_SUFFIX, RestoreError, RestoreReport, restore
from aof2.engine.replicate.stream import log_state
from aof2.engine.settings import Settings
from aof2.engine.settings.remote import RemoteSettings
from tests.engine.helpers import KIB, create_object, put_object, read_object
from tests.engine.helpers import small_settings as engine_settings

from .helpers import Replicated, keys_of, open_directory, run_replicated

MAP = 1 << 30
TENANT = 1
SIZES = {b"empty": 0, b"one": 1, b"small": 5000, b"two-chunks": 300 * KIB}


def content(name: bytes) -> bytes:
    return random.Random(name).randbytes(SIZES[name])


def small_settings(root: Path) -> Settings:
    """Chunks of the log seal 50 ms after the last commit: nothing here waits for long."""
    made = engine_settings(root)
    return msgspec.structs.replace(made, manifest=msgspec.structs.replace(made.manifest, rotation_period_ms=50))


def run_restore(root: Path, settings: Settings) -> RestoreReport:
    with closing(open_remote(Env(), RemoteSettings(url=settings.remote.url))) as store:
        return restore(Env(), store, settings.volume.state_dir, map_bytes=MAP)


def lose_machine(settings: Settings) -> None:
    settings.volume.state_dir.rename(settings.volume.state_dir.with_name("lost"))


async def fill(r: Replicated) -> None:
    for name in SIZES:
        await put_object(r.volume, "default", name, content(name))
    await r.volume.checkpoint("default")


async def look_up(r: Replicated, name: bytes) -> tuple[int, int, int] | None:
    from aof2.engine.catalog.rows import INO_STREAM_SHIFT, ROOT_INO

    with r.volume.catalog.view() as view:
        entry = view.get(TENANT, t.DENTRIES, (TENANT << INO_STREAM_SHIFT | ROOT_INO, name))
        inode = view.get(TENANT, t.INODES, entry.ino) if entry else None
    return (TENANT, inode.ino, inode.generation) if inode else None


async def expect_all(r: Replicated) -> None:
    for name, size in SIZES.items():
        key = await look_up(r, name)
        assert key is not None
        assert await read_object(r.volume, key, 0, size + 1) == content(name)


@pytest.mark.parametrize("snapshots", [False, True])
def test_what_was_published_comes_back_byte_for_byte(tmp_path: Path, snapshots: bool) -> None:
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        await fill(r)
        await r.settle()
        if snapshots:
            await r.snapshot(0)
            await r.snapshot(TENANT)
            await put_object(r.volume, "default", b"later", b"later")
            await r.volume.checkpoint("default")
        await r.settle()

    run_replicated(settings, first)
    lose_machine(settings)
    before = read_volume(open_directory(tmp_path))
    report = run_restore(tmp_path, settings)
    assert report.whole, report
    assert report.lost == []
    assert report.tenants == ["default"]
    assert report.checked_blobs >= 4
    assert read_volume(open_directory(tmp_path)) == before  # claimed when it is opened, not before
    known = load_identity(settings.volume.state_dir)
    assert known is not None and known.volume_uuid == report.volume_uuid

    async def second(r: Replicated) -> None:
        with r.volume.catalog.view() as view:
            assert list(view.scan(TENANT, t.RESIDENCY)) == []
            assert view.get(TENANT, t.COUNTERS, HOT_BYTES) == 0
        assert r.volume.quota.usage.used_bytes == 0
        await expect_all(r)
        key = await put_object(r.volume, "default", b"new", b"new bytes")
        await r.volume.checkpoint("default")
        await r.settle()
        assert r.fenced == []
        assert await read_object(r.volume, key, 0, 100) == b"new bytes"
        assert r.replicator.fence is not None
        assert r.replicator.fence.epoch == 2

    run_replicated(settings, second)
    # Whatever was changed by the restore is in the logs: the rows come back from them the same.
    shutil.rmtree(settings.volume.state_dir / "catalog")
    run_replicated(settings, expect_all)


def test_a_rebuilt_catalog_does_not_bring_the_old_machine_back(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        await fill(r)
        await r.settle()

    run_replicated(settings, first)
    lose_machine(settings)
    run_restore(tmp_path, settings)
    shutil.rmtree(settings.volume.state_dir / "catalog")

    async def second(r: Replicated) -> None:
        with r.volume.catalog.view() as view:
            assert list(view.scan(TENANT, t.RESIDENCY)) == []
            assert view.get(TENANT, t.COUNTERS, HOT_BYTES) == 0
            assert all(row.backing is None for _, row in view.scan(TENANT, t.OBJECTS))
        await expect_all(r)

    run_replicated(settings, second)


def test_what_never_got_there_is_named_and_not_shown(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        await fill(r)
        await put_object(r.volume, "default", b"sealed only", b"x" * 777)
        key = await look_up(r, b"sealed only")
        assert key is not None
        second_name = partial(namespace.link, ino=key[1], parent=namespace.root_ino(TENANT), name=b"its other name")
        await trio.to_thread.run_sync(partial(r.volume.writer.call, TENANT, second_name, sync=True))
        await create_object(r.volume, "default", b"being written")
        await put_object(r.volume, "default", b"same as small", content(b"small"))
        await r.settle()

    run_replicated(settings, first)
    lose_machine(settings)
    report = run_restore(tmp_path, settings)
    assert not report.whole
    assert sorted((x.path, x.why, x.size, x.outcome) for x in report.lost) == [
        ("default/being written", Why.NEVER_SEALED, 0, "dropped"),
        ("default/sealed only", Why.NEVER_UPLOADED, 777, "dropped"),
    ]
    assert report.rescued == ["default/same as small"]  # its content is on the remote, under another's name

    async def second(r: Replicated) -> None:
        await expect_all(r)
        assert await look_up(r, b"sealed only") is None
        assert await look_up(r, b"being written") is None
        with r.volume.catalog.view() as view:
            top = namespace.list_dir(view, TENANT, namespace.root_ino(TENANT), None, 100)
            assert [name for name, _ in top] == sorted([*SIZES, b"same as small"])
            assert list(view.scan(TENANT, t.LINKS)) == []
        key = await look_up(r, b"same as small")
        assert key is not None
        assert await read_object(r.volume, key, 0, 5000) == content(b"small")
        with r.volume.catalog.view() as view:
            states = {row.state for _, row in view.scan(TENANT, t.OBJECTS)}
            assert states == {ObjectState.PUBLISHED}
            assert list(view.scan(TENANT, t.UNPUBLISHED)) == []
        await put_object(r.volume, "default", b"sealed only", b"again")

    run_replicated(settings, second)


def test_a_complete_upload_that_was_not_recorded_is_found(tmp_path: Path) -> None:
    """The blobs are put, the commit that says so is lost with the machine."""
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        await put_object(r.volume, "default", b"two-chunks", content(b"two-chunks"))
        await r.settle()
        uploads = keys_of(r.volume.remote, "manifest/")
        await r.volume.checkpoint("default")
        # UploadStarted got there, UploadDone did not: cut the remote's log behind what it had, plus the starts.
        await r.settle()
        r.volume.bare_remote.delete(set(keys_of(r.volume.remote, "manifest/")) - set(uploads))

    run_replicated(settings, first)
    store = open_directory(tmp_path)
    lose_machine(settings)
    report = run_restore(tmp_path, settings)
    # Without UploadStarted nobody knows where to look, so it is lost ...
    assert [x.why for x in report.lost] == [Why.NEVER_UPLOADED]
    assert keys_of(store, "checkpoints/")
    shutil.rmtree(settings.volume.state_dir)

    # ... and with it, it is found.
    lost = settings.volume.state_dir.with_name("lost")
    lost.rename(settings.volume.state_dir)

    async def again(r: Replicated) -> None:
        keys = keys_of(r.volume.remote, "checkpoints/")
        with r.volume.catalog.view() as view:
            chunk_ids = [chunk_id for chunk_id, _ in view.scan(TENANT, t.CHUNKS)]

        def started(b: object) -> None:
            for chunk_id in chunk_ids:
                row = b.get(t.CHUNKS, chunk_id)  # type: ignore[attr-defined]
                b.put(t.CHUNKS, chunk_id, msgspec.structs.replace(row, key=""))  # type: ignore[attr-defined]
                b.delete(t.BLOBS, row.sha256)  # type: ignore[attr-defined]
                (key,) = [k for k in keys if row.sha256.hex() in k]
                b.record(p.UploadStarted(key), segment_id=chunk_id)  # type: ignore[attr-defined]
            for key, row in b.scan(t.OBJECTS):  # type: ignore[attr-defined]
                b.put(t.OBJECTS, key, msgspec.structs.replace(row, state=ObjectState.SEALED))  # type: ignore[attr-defined]

        await trio.to_thread.run_sync(lambda: r.volume.writer.call(TENANT, started, sync=True))
        await r.settle()

    run_replicated(settings, again)
    lose_machine(settings)
    report = run_restore(tmp_path, settings)
    assert report.lost == []
    assert report.rescued == ["default/two-chunks"]

    async def last(r: Replicated) -> None:
        key = await look_up(r, b"two-chunks")
        assert key is not None
        assert await read_object(r.volume, key, 0, 1 << 20) == content(b"two-chunks")

    run_replicated(settings, last)


@pytest.mark.parametrize("lies", [False, True])
def test_packs_are_restored_and_unrecorded_ones_found(tmp_path: Path, lies: bool) -> None:
    """By the directory of their pack; one that does not add up finds nothing, and what rows name is read without it."""
    settings = small_settings(tmp_path)
    files = {f"f{i}".encode(): random.Random(i).randbytes(50 + 31 * i) for i in range(12)}

    async def first(r: Replicated) -> None:
        for name, data in files.items():
            await put_object(r.volume, "default", name, data)
        await r.volume.checkpoint("default")
        begun: list[int] = []

        def unrecorded(b: object) -> None:
            """Half of them as before the commit: their uploads were begun, and no row knows that they are there."""
            for (ino, generation), row in list(b.scan(t.OBJECTS))[::2]:  # type: ignore[attr-defined]
                chunk = b.get(t.CHUNKS, row.chunks[0])  # type: ignore[attr-defined]
                key = chunk.key
                if not is_pack(key):
                    continue  # it was planned before the others came
                begun.append(ino)
                b.put(t.CHUNKS, chunk.chunk_id, msgspec.structs.replace(chunk, key="", offset=0))  # type: ignore[attr-defined]
                b.delete(t.BLOBS, chunk.sha256)  # type: ignore[attr-defined]
                b.record(p.UploadStarted(key), segment_id=chunk.chunk_id)  # type: ignore[attr-defined]
                sealed = msgspec.structs.replace(row, state=ObjectState.SEALED)
                b.put(t.OBJECTS, (ino, generation), sealed)  # type: ignore[attr-defined]

        await trio.to_thread.run_sync(lambda: r.volume.writer.call(TENANT, unrecorded, sync=True))
        assert begun
        await r.settle()

    run_replicated(settings, first)
    if lies:
        for pack in (tmp_path / "remote").rglob("pack-*.blob"):
            raw = bytearray(pack.read_bytes())
            raw[-200] ^= 1
            pack.write_bytes(raw)
    lose_machine(settings)
    report = run_restore(tmp_path, settings)
    assert bool(report.rescued) != lies
    gone = {lost.path.rpartition("/")[2].encode() for lost in report.lost}
    assert bool(gone) == lies
    assert gone < files.keys()

    async def last(r: Replicated) -> None:
        for name, data in files.items():
            key = await look_up(r, name)
            assert (key is None) == (name in gone)
            if key is None:
                continue
            assert await read_object(r.volume, key, 0, 1 << 20) == data

    run_replicated(settings, last)


def test_a_file_that_was_being_changed_goes_back_to_what_was_published(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        await fill(r)
        key = await look_up(r, b"small")
        assert key is not None
        ino = key[1]

        def reopen(b: object) -> None:
            inode = b.get(t.INODES, ino)  # type: ignore[attr-defined]
            old = b.get(t.OBJECTS, (ino, 1))  # type: ignore[attr-defined]
            b.put(t.INODES, ino, msgspec.structs.replace(inode, generation=2, size=9999))  # type: ignore[attr-defined]
            dirty = msgspec.structs.replace(old, generation=2, state=ObjectState.DIRTY, chunks=())
            b.put(t.OBJECTS, (ino, 2), dirty)  # type: ignore[attr-defined]

        await trio.to_thread.run_sync(lambda: r.volume.writer.call(TENANT, reopen, sync=True))
        await r.settle()

    run_replicated(settings, first)
    lose_machine(settings)
    report = run_restore(tmp_path, settings)
    (lost,) = report.lost
    assert (lost.path, lost.outcome) == ("default/small", "taken back to generation 1")
    run_replicated(settings, expect_all)


@pytest.mark.expects_warnings
def test_missing_blobs_are_listed_and_never_served(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        await fill(r)
        await r.settle()

    run_replicated(settings, first)
    lose_machine(settings)
    store = open_directory(tmp_path)
    sizes = {info.key: info.size for info in store.list("checkpoints/")}
    gone = min(sizes, key=lambda key: sizes[key])  # the blob of the one byte
    store.delete([gone])
    report = run_restore(tmp_path, settings)
    (lost,) = report.lost
    assert (lost.path, lost.why, lost.keys) == ("default/one", Why.BLOB_MISSING, [gone])

    async def second(r: Replicated) -> None:
        key = await look_up(r, b"one")
        assert key is not None
        with r.volume.catalog.view() as view:
            assert len(load_index(view, TENANT).needs_repair) == 1
        with pytest.raises(CorruptError):
            await read_object(r.volume, key, 0, 1)
        other = await look_up(r, b"small")
        assert other is not None
        assert await read_object(r.volume, other, 0, 5000) == content(b"small")

    run_replicated(settings, second)


def test_bundles_and_audit_ranges_come_back(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        for i in range(12):
            await put_object(r.volume, "default", b"f%d" % i, b"%d" % i * 100)
            await r.volume.checkpoint("default")
            await r.settle()
            if i % 3 == 2:
                await r.snapshot(TENANT)
        await put_object(r.volume, "default", b"last", b"last")
        await r.volume.checkpoint("default")
        await r.settle()

    run_replicated(settings, first)
    store = open_directory(tmp_path)
    assert any(key.endswith(".mlogs") for key in keys_of(store, f"manifest/{TENANT}/"))
    audit = settings.volume.state_dir / "audit" / f"{TENANT}.asl"
    original = VisibleState.of(Replay(audit))
    assert original.problems == []
    lose_machine(settings)
    report = run_restore(tmp_path, settings)
    assert report.whole, report
    (restored,) = report.audit
    assert restored.records > 0

    async def second(r: Replicated) -> None:
        await r.settle()

    run_replicated(settings, second)
    again = VisibleState.of(Replay(audit))
    assert again.problems == []
    assert again.root_hash() == original.root_hash()
    assert again.problems == []


def test_a_bundle_that_the_log_does_not_know_of_is_finished(tmp_path: Path) -> None:
    """The machine was lost after its chunks were deleted, and before the log that says so was uploaded."""
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        for i in range(4):
            await put_object(r.volume, "default", b"f%d" % i, b"%d" % i * 100)
            await r.volume.checkpoint("default")
            await r.settle()
        await r.snapshot(TENANT)

    run_replicated(settings, first)
    store = open_directory(tmp_path)
    indexes = sorted(list_stream(store, TENANT).chunks)[:3]
    assert indexes == list(range(indexes[0], indexes[0] + 3))
    bundle, sources = bundle_key(TENANT, indexes[0], indexes[-1]), [chunk_key(TENANT, i) for i in indexes]
    store.compose(bundle, sources)
    store.delete(sources)
    lose_machine(settings)
    run_restore(tmp_path, settings)

    async def second(r: Replicated) -> None:
        for i in range(4, 12):
            await put_object(r.volume, "default", b"f%d" % i, b"%d" % i * 100)
            await r.volume.checkpoint("default")
            await r.settle()
        await r.snapshot(TENANT)
        assert r.replicator.stuck == {}
        state = log_state(r.volume.catalog, TENANT)
        assert bundle in state.objects
        assert not set(sources) & set(state.objects)

    run_replicated(settings, second)


def test_what_cannot_be_restored_is_refused_with_a_reason(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    with pytest.raises(RestoreError, match="right url"):
        run_restore(tmp_path, settings)
    assert not settings.volume.state_dir.exists()
    store = open_directory(tmp_path)
    fence = claim(Env(), store)
    report = run_restore(tmp_path, settings)
    assert report.tenants == []
    with pytest.raises(RestoreError, match="not empty"):
        run_restore(tmp_path, settings)
    shutil.rmtree(settings.volume.state_dir)
    fence.put(f"manifest/{TENANT}/0.mlog", b"x")
    with pytest.raises(RestoreError, match="volume's own log"):
        run_restore(tmp_path, settings)
    assert not settings.volume.state_dir.with_name(settings.volume.state_dir.name + STAGING_SUFFIX).exists()


def test_tenants_that_never_uploaded_are_named(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    run_replicated(settings, lambda r: r.settle())
    lose_machine(settings)
    store = open_remote(Env(), RemoteSettings(url=settings.remote.url))
    store.delete(keys_of(store, f"manifest/{TENANT}/"))
    report = run_restore(tmp_path, settings)
    assert report.never_uploaded == ["default"]
    assert not report.whole

    async def second(r: Replicated) -> None:
        await fill(r)
        await expect_all(r)

    run_replicated(settings, second)


@pytest.mark.expects_warnings
def test_two_machines_one_volume(tmp_path: Path) -> None:
    """The restored one takes over when it opens; the first turns read-only at its next upload."""
    settings = small_settings(tmp_path)
    other = msgspec.structs.replace(
        settings, volume=msgspec.structs.replace(settings.volume, state_dir=tmp_path / "second")
    )

    async def first(r: Replicated) -> None:
        await fill(r)
        await r.settle()
        await trio.to_thread.run_sync(lambda: run_restore(tmp_path, other))
        await trio.to_thread.run_sync(lambda: run_replicated(other, second))
        before = keys_of(r.volume.remote, "manifest/")
        await put_object(r.volume, "default", b"too late", b"x")
        with trio.fail_after(10):
            while not r.fenced:
                await trio.sleep(0.01)
        assert "another writer took the volume over" in r.fenced[0]
        assert keys_of(r.volume.remote, "manifest/") == before

    async def second(r: Replicated) -> None:
        await expect_all(r)
        await put_object(r.volume, "default", b"mine", b"mine")
        await r.volume.checkpoint("default")
        await r.settle()
        assert r.fenced == []

    run_replicated(settings, first)


@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_the_log_goes_on_behind_a_hole(tmp_path: Path, harm: str) -> None:
    """A chunk that no snapshot covers is lost: what came before it is there, and the volume works."""
    settings = small_settings(tmp_path)

    async def first(r: Replicated) -> None:
        for i in range(6):
            await put_object(r.volume, "default", b"f%d" % i, b"%d" % i)
            await r.volume.checkpoint("default")
            await r.settle()

    async def second(r: Replicated) -> None:
        assert await look_up(r, b"f0") is not None
        assert await look_up(r, b"f5") is None
        await fill(r)
        await r.settle()
        await r.snapshot(TENANT)
        await put_object(r.volume, "default", b"after", b"after")
        await r.volume.checkpoint("default")
        await r.settle()
        assert r.fenced == []
        assert r.replicator.stuck == {}

    async def third(r: Replicated) -> None:
        await expect_all(r)
        for name in (b"f0", b"after"):
            assert await look_up(r, name) is not None
        await r.settle()
        assert r.fenced == []

    run_replicated(settings, first)
    path = tmp_path / "remote" / "manifest" / str(TENANT) / "3.mlog"
    if harm == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[120] ^= 1
        path.write_bytes(data)
    lose_machine(settings)
    report = run_restore(tmp_path, settings)
    assert len(report.gaps) == 1
    assert not report.whole
    run_replicated(settings, second)
    shutil.rmtree(settings.volume.state_dir)
    report = run_restore(tmp_path, settings)
    assert report.gaps == []
    run_replicated(settings, third)
