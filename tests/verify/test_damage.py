"""Each thing damaged by itself: exactly that is found, the exit code is fsck's, and what is safe to mend is mended."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import lmdb
import msgspec
import pytest

from aof2.engine import objects
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.env import Env
from aof2.engine.errors import ReadOnlyError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.format import LOG_SEGMENT_ID
from aof2.engine.remote import fence
from aof2.engine.remote.open import open_remote
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Kind
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume
from tests.engine.helpers import put_object, run_volume, small_settings
from tests.verify.build import (
    BLOCK,
    CHUNK,
    TENANT,
    backing,
    blob,
    chunks_of,
    commit,
    damage_of,
    flip,
    kinds,
    mended,
    old,
    read_all,
)


def test_a_whole_volume_is_clean(settings: Settings) -> None:
    for deep in (False, True):
        report = verify(settings, deep_remote=deep)
        assert (report.exit_code, kinds(report)) == (0, [])
        assert report.clean
        assert report.evictions == 5
        assert report.objects == 7
        assert report.remote == ("read" if deep else "listed")
    assert report.blobs == 7  # `same` shares the blobs of `here`
    assert report.local_bytes > 3 * CHUNK


@pytest.mark.parametrize("block", [0, 17])
def test_a_flipped_byte_in_a_backing_file(settings: Settings, block: int) -> None:
    flip(backing(settings, "here"), block * BLOCK + 3)
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.LOCAL_DAMAGED])
    (found,) = damage_of(report)
    assert found.chunk_id == chunks_of(settings, "here")[block // 16].chunk_id
    assert f"block(s) {block % 16} of" in found.message
    mended(settings)
    read_all(settings)


def test_the_last_block_of_a_file_takes_the_file_with_it(settings: Settings) -> None:
    path = backing(settings, "partly")
    path.write_bytes(os.urandom(path.stat().st_size))
    assert kinds(verify(settings)) == [Kind.LOCAL_DAMAGED]
    mended(settings)
    assert not path.exists()
    read_all(settings)


def test_a_backing_file_that_is_cut_short(settings: Settings) -> None:
    os.truncate(backing(settings, "here"), CHUNK + 1)
    assert kinds(verify(settings)) == [Kind.LOCAL_DAMAGED]
    mended(settings)
    read_all(settings)


def test_a_backing_file_that_is_gone(settings: Settings) -> None:
    backing(settings, "here").unlink()
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.LOCAL_MISSING])
    mended(settings)
    read_all(settings)


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_the_only_copy_is_left_alone(settings: Settings, harm: str) -> None:
    path = backing(settings, "dirty")
    if harm == "flip":
        flip(path, 1)
    else:
        path.unlink()
    report = verify(settings, repair=True)
    kind = Kind.LOCAL_DAMAGED if harm == "flip" else Kind.LOCAL_MISSING
    assert (report.exit_code, kinds(report)) == (4, [kind])
    (found,) = damage_of(report)
    assert not found.repairable
    assert "the remote does not have" in found.message


@pytest.mark.parametrize("harm", ["flip", "remove"])
def test_a_warm_blob(settings: Settings, harm: str) -> None:
    (path,) = (settings.volume.state_dir / "warm").rglob("*.blob")
    if harm == "flip":
        flip(path, 9)
    else:
        path.unlink()
    assert kinds(verify(settings)) == [Kind.LOCAL_DAMAGED if harm == "flip" else Kind.LOCAL_MISSING]
    mended(settings)
    read_all(settings)


@pytest.mark.parametrize(
    "place", ["hot_cache/default/1099511627999.1", "hot_cache/default/evicted", "warm/default/999.blob"]
)
def test_orphans_on_this_disk(settings: Settings, place: str) -> None:
    path = settings.volume.state_dir / place
    if path.name == "evicted":
        path = backing(settings, "gone")
    path.write_bytes(b"orphan")
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.LOCAL_ORPHAN])
    mended(settings)
    assert not path.exists()


def test_a_file_that_is_not_ours_is_only_listed(settings: Settings) -> None:
    path = settings.volume.state_dir / "hot_cache/default/notes.txt"
    path.write_bytes(b"somebody's")
    report = verify(settings, repair=True)
    assert (report.exit_code, kinds(report)) == (4, [Kind.LOCAL_ORPHAN])
    assert path.exists()


def test_leftover_scratch(settings: Settings) -> None:
    scratch = settings.volume.state_dir / "checkpoint_scratch" / "checkpoint-1-9"
    scratch.mkdir(parents=True)
    (scratch / "chunk-1.blob").write_bytes(b"half")
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.SCRATCH])
    mended(settings)
    assert not scratch.exists()


# -- remote ------------------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_a_blob_is_found_by_reading(settings: Settings) -> None:
    flip(blob(settings, "here"), 100)
    assert verify(settings).exit_code == 0
    report = verify(settings, deep_remote=True)
    assert (report.exit_code, kinds(report)) == (4, [Kind.REMOTE_DAMAGED])
    mended(settings, deep=True)
    read_all(settings)


def test_a_damaged_blob_with_no_copy_here_is_left(settings: Settings) -> None:
    path = blob(settings, "gone")
    flip(path, path.stat().st_size - 20)
    report = verify(settings, deep_remote=True, repair=True)
    assert (report.exit_code, kinds(report)) == (4, [Kind.REMOTE_DAMAGED])
    assert not damage_of(report)[0].repairable


@pytest.mark.parametrize(("name", "code"), [("here", 1), ("gone", 4)])
def test_a_blob_that_is_missing(settings: Settings, name: str, code: int) -> None:
    blob(settings, name).unlink()
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.REMOTE_MISSING])
    assert verify(settings, repair=True).exit_code == code
    if code == 1:
        assert verify(settings, deep_remote=True).exit_code == 0
        read_all(settings)


def test_another_machines_remote_is_left_alone(settings: Settings) -> None:
    """Its writer went on with the volume: what is missing here may be what it has just replaced, or deleted."""
    damaged = blob(settings, "here")
    flip(damaged, 10)
    mended(settings, deep=True)  # it is ours: the claim on it is made now
    flip(damaged, 10)
    bad = damaged.read_bytes()
    with contextlib.closing(open_remote(Env(), settings.remote)) as store:
        mine, _ = fence.read_volume(store) or pytest.fail("it was deleted without a claim")
        fence.claim(Env(), store)
        report = verify(settings, deep_remote=True, repair=True)
        assert (report.exit_code, kinds(report)) == (4, [Kind.REMOTE_DAMAGED])
        assert damaged.read_bytes() == bad
        _, etag = fence.read_volume(store) or pytest.fail("the claim is gone")
        store.replace_if_match("volume.json", msgspec.json.encode(mine), etag)
    mended(settings, deep=True)
    assert damaged.read_bytes() != bad


def test_a_blob_of_another_length(settings: Settings) -> None:
    path = blob(settings, "here")
    os.truncate(path, path.stat().st_size - 1)
    for deep in (False, True):
        report = verify(settings, deep_remote=deep)
        assert (report.exit_code, kinds(report)) == (4, [Kind.REMOTE_DAMAGED])
    mended(settings)


def test_a_blob_that_two_files_share_is_made_of_either(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def body(v: Volume) -> None:
        data = os.urandom(CHUNK)
        first = await put_object(v, "default", b"first", data)
        await v.checkpoint("default")
        await put_object(v, "default", b"second", data)
        await v.checkpoint("default")
        await v.evict([first])

    run_volume(settings, body, parts=("jobs",))
    assert blob(settings, "first") == blob(settings, "second")
    flip(blob(settings, "second"), 10)
    mended(settings, deep=True)


def test_a_blob_of_another_chunk(settings: Settings) -> None:
    one, two = blob(settings, "here"), blob(settings, "gone")
    shutil.copy2(two, one)
    assert kinds(verify(settings, deep_remote=True)) == [Kind.REMOTE_DAMAGED]


def test_an_orphan_in_the_remote_is_listed_once_it_is_old(settings: Settings) -> None:
    path = blob(settings, "here").with_name(f"chunk-77-1-{'ab' * 32}.blob")
    path.write_bytes(b"orphan")
    assert verify(settings).exit_code == 0
    old(path)
    report = verify(settings, repair=True)
    assert (report.exit_code, kinds(report)) == (4, [Kind.REMOTE_ORPHAN])
    assert path.exists()


@pytest.mark.parametrize("harm", ["none", "missing", "flip", "other"])
def test_the_log_in_the_remote(settings: Settings, harm: str) -> None:
    key = f"manifest/{TENANT}/0.mlog"
    commit(settings, lambda b: b.record(p.UploadDone(key, "etag"), segment_id=LOG_SEGMENT_ID))
    assert settings.remote.directory is not None
    copy = settings.remote.directory / key
    copy.parent.mkdir(parents=True)
    shutil.copy2(settings.volume.state_dir / key, copy)
    if harm == "missing":
        copy.unlink()
    elif harm == "flip":
        flip(copy, 64 + 41)
    elif harm == "other":
        shutil.copy2(settings.volume.state_dir / "manifest/0/0.mlog", copy)
    report = verify(settings, deep_remote=True)
    assert kinds(report) == ([] if harm == "none" else [Kind.REMOTE_LOG])
    assert verify(settings).exit_code == (4 if harm == "missing" else 0)


def test_a_remote_that_is_away(settings: Settings) -> None:
    assert settings.remote.directory is not None
    settings.remote.directory.rename(settings.remote.directory.with_name("elsewhere"))
    report = verify(settings)
    assert (report.exit_code, report.remote) == (0, "unreachable")
    assert verify(settings, deep_remote=True).exit_code == 8
    assert not settings.remote.directory.exists()


# -- log and catalog ---------------------------------------------------------------------------------------------


def test_a_flipped_byte_in_the_log(settings: Settings) -> None:
    flip(settings.volume.state_dir / "manifest" / str(TENANT) / "0.mlog", 64 + 41)
    report = verify(settings)
    assert report.exit_code == 4
    assert set(kinds(report)) == {Kind.LOG}
    again = verify(settings, repair=True)
    assert (again.exit_code, again.repaired) == (4, 0)
    assert not (settings.volume.state_dir / "manifest" / str(TENANT) / "quarantine.json").exists()


def edit_row(settings: Settings, change: str) -> None:
    env = lmdb.open(str(settings.volume.state_dir / "catalog"), max_dbs=20, map_size=1 << 30)
    db = env.open_db(b"chunk_catalog")
    with env.begin(write=True, db=db) as txn:
        key, value = next(iter(txn.cursor()))
        if change == "differs":
            txn.put(key, value[:-1] + bytes([value[-1] ^ 1]))
        elif change == "missing":
            txn.delete(key)
        else:
            txn.put(key + b"x", value)
    env.close()


@pytest.mark.parametrize("change", ["differs", "missing", "extra"])
def test_a_catalog_row(settings: Settings, change: str) -> None:
    edit_row(settings, change)
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.CATALOG])
    mended(settings)
    read_all(settings)


def test_a_torn_catalog_takes_nobody_down(settings: Settings) -> None:
    path = settings.volume.state_dir / "catalog" / "data.mdb"
    size = path.stat().st_size
    with open(path, "r+b") as f:
        f.seek(2 * 4096)
        f.write(os.urandom(size - 2 * 4096))
    report = verify(settings)
    assert report.exit_code == 4
    assert set(kinds(report)) == {Kind.CATALOG}
    mended(settings)
    read_all(settings)


def test_a_catalog_that_is_gone_is_no_damage(settings: Settings) -> None:
    shutil.rmtree(settings.volume.state_dir / "catalog")
    assert verify(settings).exit_code == 0
    assert not (settings.volume.state_dir / "catalog").exists()


def test_a_wrong_reference_count(settings: Settings) -> None:
    sha256 = chunks_of(settings, "here")[0].sha256

    def work(b: Batch) -> None:
        row = b.get(t.BLOBS, sha256)
        assert row is not None and row.refs == 2
        b.put(t.BLOBS, sha256, msgspec.structs.replace(row, refs=1))

    commit(settings, work)
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.REFCOUNT])
    mended(settings)


@pytest.mark.parametrize("counter", [objects.HOT_BYTES, objects.WARM_BYTES])
def test_a_wrong_counter(settings: Settings, counter: str) -> None:
    commit(settings, lambda b: b.put(t.COUNTERS, counter, 7))
    report = verify(settings)
    assert (report.exit_code, kinds(report)) == (4, [Kind.COUNTER])
    mended(settings)


@pytest.mark.parametrize("forgery", ["never uploaded", "deleted before"])
def test_an_eviction_that_was_not_safe(settings: Settings, forgery: str) -> None:
    """The forged record alone: rows and bytes are as they were."""
    chunk = chunks_of(settings, "dirty" if forgery == "never uploaded" else "here")[0]

    def work(b: Batch) -> None:
        if forgery == "deleted before":
            b.record(p.Tier2DeleteQueued(chunk.key), segment_id=chunk.chunk_id)
        b.record(p.LocalEvicted(chunk.length), segment_id=chunk.chunk_id)

    commit(settings, work)
    report = verify(settings, repair=True)
    assert (report.exit_code, kinds(report)) == (4, [Kind.EVICTION, Kind.TIERS])
    found, folded = damage_of(report)
    assert (found.chunk_id, found.repairable) == (chunk.chunk_id, False)
    assert (folded.chunk_id, folded.repaired) == (chunk.chunk_id, True)  # the file is here, as the rows say


def test_an_object_that_lost_a_chunk_row(settings: Settings) -> None:
    chunk = chunks_of(settings, "gone")[1]
    commit(settings, lambda b: b.delete(t.CHUNKS, chunk.chunk_id))
    report = verify(settings, repair=True)
    assert report.exit_code == 4
    assert set(kinds(report)) == {Kind.OBJECT, Kind.REFCOUNT}


def test_several_at_once(settings: Settings) -> None:
    flip(backing(settings, "here"), 5)
    blob(settings, "same", 1).unlink()
    (settings.volume.state_dir / "hot_cache/default/1099511627999.1").write_bytes(b"")
    report = verify(settings)
    assert sorted(kinds(report)) == sorted([Kind.LOCAL_DAMAGED, Kind.REMOTE_MISSING, Kind.LOCAL_ORPHAN])
    mended(settings)
    read_all(settings)


def test_only_what_is_named_is_looked_at(settings: Settings) -> None:
    flip(backing(settings, "here"), 5)
    blob(settings, "gone").unlink()
    assert kinds(verify(settings, paths=["default/partly"], deep_remote=True)) == []
    assert kinds(verify(settings, paths=[str(settings.volume.mountpoint / "default" / "gone")])) == [
        Kind.REMOTE_MISSING
    ]
    found = verify(settings, paths=["default"], jobs=1)
    assert set(kinds(found)) == {Kind.LOCAL_DAMAGED, Kind.REMOTE_MISSING}


def test_repair_wants_the_volume_to_itself(settings: Settings) -> None:
    import fcntl

    fd = os.open(settings.volume.state_dir, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(ReadOnlyError, match="stop the daemon or run it through the daemon"):
            verify(settings, repair=True)
        assert verify(settings).live
    finally:
        os.close(fd)


def test_nothing_is_written_by_looking(settings: Settings, tmp_path: Path) -> None:
    def picture() -> dict[str, tuple[int, int]]:
        files = [f for f in tmp_path.rglob("*") if f.is_file() and f.name != "lock.mdb"]
        return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in files}

    before = picture()
    flip(backing(settings, "here"), 5)
    verify(settings, deep_remote=True)
    assert picture() == before
