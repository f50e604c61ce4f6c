"""The catalog as its users see it: atomic batches, group commit, rows that come back from the logs alone."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aof2.engine.catalog import changes, snapshots
from aof2.engine.catalog import ops as o
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.rows import ChunkRow, DentryRow, InodeRow
from aof2.engine.catalog.store import TRUST_NAME, Trust, current_boot_id, trusted
from aof2.engine.env import Env, Files
from aof2.engine.errors import FatalIOError, LimitError, ReadOnlyError
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.reader import Stream
from aof2.engine.manifest.writer import SealedChunk
from tests.manifest.replay import replay

from .helpers import Volume, every_row, open_volume, volume

DAY_MS = 24 * 3600 * 1000


def make_file(name: bytes, size: int = 0) -> Callable[[Batch], Any]:
    def work(b: Batch) -> int:
        ino = b.next_id("ino")
        b.put(t.INODES, ino, InodeRow(ino, 0o100644, size=size))
        b.put(t.DENTRIES, (1, name), DentryRow(ino, 0o100644))
        return ino

    return work


def test_rows_written_are_rows_read(tmp_path: Path) -> None:
    with volume(tmp_path) as v:
        ino = v.writer.call(1, make_file(b"a", 5))
        with v.catalog.view() as view:
            row = view.get(1, t.INODES, ino)
            assert row is not None
            assert row.size == 5
            assert view.get(1, t.DENTRIES, (1, b"a")) == DentryRow(ino, 0o100644)
            assert view.get(2, t.INODES, ino) is None
            assert view.get(1, t.INODES, 99) is None


def test_a_batch_sees_its_own_changes_and_those_before_it(tmp_path: Path) -> None:
    def work(b: Batch) -> tuple[int, int, object]:
        first, second = b.next_id("ino"), b.next_id("ino", step=10)
        b.put(t.INODES, first, InodeRow(first, 0))
        b.delete(t.INODES, first)
        return first, second, b.get(t.INODES, first)

    with volume(tmp_path) as v:
        assert v.writer.call(1, work) == (1, 2, None)
        assert v.writer.call(1, work) == (12, 13, None)


def test_a_batch_that_raises_changes_nothing(tmp_path: Path) -> None:
    def work(b: Batch) -> None:
        make_file(b"x")(b)
        b.record(p.SegmentOpened(0, 1), segment_id=5)
        raise LimitError("no")

    with volume(tmp_path) as v:
        v.writer.call(1, make_file(b"before"))
        with v.catalog.view() as view:
            before = every_row(view)
        with pytest.raises(LimitError):
            v.writer.call(1, work)
        with v.catalog.view() as view:
            assert every_row(view) == before
        assert v.writer.call(1, make_file(b"after")) == 2


def test_tier_records_are_folded_and_logged_with_the_rows(tmp_path: Path) -> None:
    def work(b: Batch) -> None:
        b.record(p.SegmentOpened(0, 1), segment_id=7)
        b.record(p.UploadStarted("k"), segment_id=7)
        make_file(b"f")(b)

    with volume(tmp_path) as v:
        v.writer.call(1, work, sync=True)
        v.writer.call(1, lambda b: b.record(p.UploadDone("k", "e"), segment_id=7), sync=True)
        with v.catalog.view() as view:
            index = load_index(view, 1)
        assert index.entries[7].key == "k"
        assert index.same_state(replay(v.directory(1)))
        assert [r.type for r in Stream(v.directory(1)).records()][:3] == [
            "SegmentOpened",
            "UploadStarted",
            "CustomEvent",
        ]


def test_unknown_streams_and_a_log_turned_off_are_refused(tmp_path: Path) -> None:
    with volume(tmp_path) as v:
        with pytest.raises(LimitError, match="no stream 9"):
            v.writer.call(9, make_file(b"a"))
        v.target.enabled = False
        with pytest.raises(ReadOnlyError, match="turned off"):
            v.writer.call(1, make_file(b"a"))


def churn(v: Volume, rounds: int, *, snapshot_at: tuple[int, ...] = ()) -> None:
    """Rows, tier records, deletions and two streams."""
    for i in range(rounds):
        stream = 1 + i % 2

        def work(b: Batch, i: int = i) -> None:
            ino = make_file(b"f%d" % i, i)(b)
            b.apply(o.UpsertChunk(ChunkRow(i + 1, ino, 1, 0, i, b"h" * 32)))
            b.record(p.SegmentOpened(0, 1), segment_id=i + 1)
            if i % 3 == 0:
                b.record(p.UploadStarted(f"key{i}"), segment_id=i + 1)
            if i > 4:
                b.delete(t.DENTRIES, (1, b"f%d" % (i - 4)))
                b.record(p.LocalEvicted(i), segment_id=i - 3)

        v.writer.call(stream, work)
        if i in snapshot_at:
            snapshots.take(v.env, v.catalog, v.writer, v.directory(stream), stream)


def rows_of(v: Volume) -> dict[tuple[str, bytes], bytes]:
    with v.catalog.view() as view:
        return every_row(view)


def test_deleting_lmdb_and_reopening_rebuilds_identical_rows(tmp_path: Path) -> None:
    with volume(tmp_path, streams=(1, 2)) as v:
        v.writer.call(1, lambda b: changes.register(b, "gc"))
        churn(v, 60, snapshot_at=(20, 31, 44))
        before = rows_of(v)
    shutil.rmtree(tmp_path / "catalog")
    with volume(tmp_path, streams=(1, 2)) as v:
        assert v.opened.rebuilt
        assert rows_of(v) == before
    with volume(tmp_path, streams=(1, 2)) as v:
        assert not v.opened.rebuilt
        assert v.opened.replayed_records == 0
        assert rows_of(v) == before


def test_rebuilding_without_the_snapshots_gives_the_same_rows(tmp_path: Path) -> None:
    with volume(tmp_path, streams=(1, 2)) as v:
        churn(v, 40, snapshot_at=(15, 30))
        before = rows_of(v)
    shutil.rmtree(tmp_path / "catalog")
    for path in (tmp_path / "manifest").rglob("snapshot_*.bin"):
        path.unlink()
    with volume(tmp_path, streams=(1, 2)) as v:
        assert rows_of(v) == before


def test_rows_behind_the_log_are_caught_up(tmp_path: Path) -> None:
    with volume(tmp_path) as v:
        churn_one(v, 10)
        saved = tmp_path / "saved"
        v.catalog.sync()
        shutil.copytree(tmp_path / "catalog", saved)
        churn_one(v, 25)
        before = rows_of(v)
    shutil.rmtree(tmp_path / "catalog")
    shutil.copytree(saved, tmp_path / "catalog")
    with volume(tmp_path) as v:
        assert not v.opened.rebuilt
        assert v.opened.replayed_records > 0
        assert rows_of(v) == before


def churn_one(v: Volume, count: int) -> None:
    for i in range(count):
        v.writer.call(1, make_file(b"n%d" % i))


def test_trust_is_only_for_this_boot_or_a_clean_stop(tmp_path: Path) -> None:
    with volume(tmp_path) as v:
        churn_one(v, 3)
        directory = v.catalog.directory
        assert trusted(directory)  # this boot
        assert not msgspec.json.decode((directory / TRUST_NAME).read_bytes(), type=Trust).clean
    assert msgspec.json.decode((directory / TRUST_NAME).read_bytes(), type=Trust).clean
    other = Trust(boot_id="another", clean=False)
    (directory / TRUST_NAME).write_bytes(msgspec.json.encode(other))
    assert not trusted(directory)
    (directory / TRUST_NAME).write_bytes(msgspec.json.encode(msgspec.structs.replace(other, clean=True)))
    assert trusted(directory)
    newer = Trust(boot_id=current_boot_id(), clean=True, format_version=2)
    (directory / TRUST_NAME).write_bytes(msgspec.json.encode(newer))
    assert not trusted(directory)
    (directory / TRUST_NAME).write_bytes(b"{")
    assert not trusted(directory)


@pytest.mark.expects_warnings
def test_damaged_lmdb_files_are_rebuilt(tmp_path: Path) -> None:
    with volume(tmp_path) as v:
        churn_one(v, 10)
        before = rows_of(v)
    (tmp_path / "catalog" / "data.mdb").write_bytes(b"not lmdb" * 100)
    with volume(tmp_path) as v:
        assert v.opened.rebuilt
        assert rows_of(v) == before


@pytest.mark.expects_warnings
def test_rows_ahead_of_their_log_are_rebuilt(tmp_path: Path) -> None:
    with volume(tmp_path) as v:
        churn_one(v, 5)
        expected = rows_of(v)
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path / "manifest", saved)
    with volume(tmp_path) as v:
        churn_one(v, 5)
    shutil.rmtree(tmp_path / "manifest")
    shutil.copytree(saved, tmp_path / "manifest")
    with volume(tmp_path) as v:
        assert v.opened.rebuilt
        assert rows_of(v) == expected


@pytest.mark.expects_warnings
def test_a_damaged_stream_is_set_aside_and_the_others_open(tmp_path: Path) -> None:
    with volume(tmp_path, streams=(1, 2)) as v:
        churn(v, 20)
        for stream in v.opened.streams.values():
            v.writer.flush()
            stream.log.rotate()
    path = tmp_path / "manifest" / "2" / "0.mlog"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    shutil.rmtree(tmp_path / "catalog")
    with volume(tmp_path, streams=(1, 2)) as v:
        assert list(v.opened.quarantined) == [2]
        v.writer.call(1, make_file(b"still works"))
        with pytest.raises(LimitError):
            v.writer.call(2, make_file(b"no"))


def test_many_threads_share_commits(tmp_path: Path) -> None:
    with volume(tmp_path, log=None) as v:
        barrier = threading.Barrier(32)

        def work(n: int) -> None:
            barrier.wait()
            v.writer.call(1, make_file(b"t%d" % n), sync=True)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(32)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with v.catalog.view() as view:
            assert len(list(view.scan(1, t.INODES))) == 32
            assert view.get(1, t.COUNTERS, "ino") == 32


@pytest.mark.expects_warnings
def test_a_full_map_refuses_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    v = open_volume(tmp_path, map_bytes=1 << 20)
    count = 0
    with pytest.raises(LimitError, match="map is full"):
        for _ in range(10_000):
            v.writer.call(1, make_file(b"f%d" % count, 1))
            count += 1
    with pytest.raises(LimitError):
        v.writer.call(1, lambda b: [make_file(b"g%d" % i)(b) for i in range(1000)])
    rows = rows_of(v)
    v.close()
    with volume(tmp_path, map_bytes=1 << 24) as v:
        assert rows_of(v) == rows
        assert v.writer.call(1, make_file(b"more")) == count + 1


class FailingFiles(Files):
    fail_space = False
    fail_fsync = False

    def preallocate(self, fd: int, offset: int, length: int) -> None:
        if self.fail_space:
            raise OSError(28, "No space left on device")
        super().preallocate(fd, offset, length)

    def fsync(self, fd: int) -> None:
        if self.fail_fsync:
            raise FatalIOError("fsync failed: Input/output error")
        super().fsync(fd)


def test_no_room_for_the_log_changes_nothing_in_any_stream(tmp_path: Path) -> None:
    files = FailingFiles()
    with volume(tmp_path, env=Env(files=files), streams=(1, 2)) as v:
        v.writer.call(1, make_file(b"one"))
        before = rows_of(v)
        files.fail_space = True
        with pytest.raises(OSError, match="No space"):
            v.writer.call(2, make_file(b"two"))
        assert rows_of(v) == before
        files.fail_space = False
        v.writer.call(2, make_file(b"two"))
        after = rows_of(v)
    shutil.rmtree(tmp_path / "catalog")
    with volume(tmp_path, streams=(1, 2)) as v:
        assert rows_of(v) == after


@pytest.mark.expects_warnings
def test_a_failed_fsync_ends_writing(tmp_path: Path) -> None:
    files = FailingFiles()
    v = open_volume(tmp_path, env=Env(files=files))
    v.writer.call(1, make_file(b"one"), sync=True)
    files.fail_fsync = True
    with pytest.raises(FatalIOError):
        v.writer.call(1, make_file(b"two"), sync=True)
    files.fail_fsync = False
    with pytest.raises((FatalIOError, ReadOnlyError)):
        v.writer.call(1, make_file(b"three"), sync=True)
    v.writer.close()
    v.catalog.abandon()


class Told:
    def __init__(self) -> None:
        self.chunks: list[tuple[int, int]] = []
        self.due: list[int] = []

    def sealed(self, stream_id: int, chunk: SealedChunk) -> None:
        self.chunks.append((stream_id, chunk.header.chunk_index))

    def changed(self, stream_id: int) -> None:
        pass

    def snapshot_due(self, stream_id: int) -> None:
        self.due.append(stream_id)


def test_sealed_chunks_and_due_snapshots_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aof2.engine.catalog.writer.SNAPSHOT_EVERY_BYTES", 20_000)
    told = Told()
    with volume(tmp_path, events=told) as v:
        churn_one(v, 300)
    assert told.chunks == [(1, i) for i in range(len(told.chunks))]
    assert len(told.chunks) >= 2
    assert 1 <= len(told.due) <= 4


# -- the change feed ---------------------------------------------------------------------------------------------


def upsert(n: int) -> Callable[[Batch], Any]:
    return lambda b: b.apply(o.UpsertChunk(ChunkRow(n, 1, 1, 0, n)))


def page(v: Volume, name: str, limit: int = 1000) -> list[changes.ManifestChangeRecord]:
    with v.catalog.view() as view:
        return changes.page(view, 1, name, limit=limit)


def feed_len(v: Volume) -> int:
    with v.catalog.view() as view:
        return len(list(view.scan(1, t.CHANGES)))


def test_subscribers_page_acknowledge_and_trim(tmp_path: Path) -> None:
    with volume(tmp_path) as v:
        v.writer.call(1, upsert(1))
        assert feed_len(v) == 0  # nobody reads it
        assert v.writer.call(1, lambda b: changes.register(b, "gc")) == 1
        assert v.writer.call(1, lambda b: changes.register(b, "copy")) == 1
        for n in range(2, 12):
            v.writer.call(1, upsert(n))
        v.writer.call(1, lambda b: b.apply(o.SetWatermark("checkpoint", 7)))
        records = page(v, "gc")
        assert [r.sequence for r in records] == list(range(2, 13))
        assert records[0].ops == (o.UpsertChunk(ChunkRow(2, 1, 1, 0, 2)),)
        assert records[-1].watermarks == {"checkpoint": 7}
        assert [r.sequence for r in page(v, "gc", limit=3)] == [2, 3, 4]
        assert v.writer.call(1, lambda b: changes.acknowledge(b, "gc", 8)) == 0
        assert v.writer.call(1, lambda b: changes.acknowledge(b, "copy", 5)) == 4
        assert feed_len(v) == 7
    with volume(tmp_path) as v:  # cursors survive a restart
        assert [r.sequence for r in page(v, "gc")] == [9, 10, 11, 12]
        assert v.writer.call(1, lambda b: changes.acknowledge(b, "gc", 999)) == 0
        assert page(v, "gc") == []
        assert v.writer.call(1, lambda b: changes.unregister(b, "copy")) == 7
        assert feed_len(v) == 0


def test_an_idle_cursor_expires_and_starts_over(tmp_path: Path) -> None:
    now = [1_700_000_000_000]
    with volume(tmp_path, env=Env(now_ms=lambda: now[0])) as v:
        v.writer.call(1, lambda b: changes.register(b, "slow"))
        v.writer.call(1, lambda b: changes.register(b, "quick"))
        v.writer.call(1, upsert(1))
        now[0] += DAY_MS - 1
        v.writer.call(1, lambda b: changes.acknowledge(b, "quick", 1))
        assert v.writer.call(1, partial(changes.expire, idle_ms=DAY_MS)) == []
        now[0] += 1
        assert v.writer.call(1, partial(changes.expire, idle_ms=DAY_MS)) == ["slow"]
        assert feed_len(v) == 0
        with pytest.raises(changes.CursorExpiredError, match="snapshot"):
            page(v, "slow")
        with pytest.raises(changes.CursorExpiredError):
            v.writer.call(1, lambda b: changes.acknowledge(b, "slow", 1))


def test_watermarks_never_go_down(tmp_path: Path) -> None:
    with volume(tmp_path) as v:
        for generation in (5, 3, 9):
            v.writer.call(1, lambda b, g=generation: b.apply(o.SetWatermark("c", g)))
        with v.catalog.view() as view:
            assert view.get(1, t.WATERMARKS, "c") == 9


# -- random use --------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("delete"), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("tier"), st.integers(0, 5), st.integers(0, 9)),
        st.tuples(st.just("snapshot"), st.just(0), st.just(0)),
        st.tuples(st.just("reopen"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=25)
@given(STEPS)
def test_rebuilt_rows_equal_the_living_whatever_happened(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    root = tmp_path_factory.mktemp("volume")
    v = open_volume(root, log=None)
    tiers = [
        p.SegmentOpened(1, 1), p.SealSegment(1, 2), p.UploadStarted("a"), p.UploadDone("a", "e"),
        p.UploadFailed("b", 3), p.Tier2DeleteQueued("a"), p.Tier2Deleted("a"),
        p.HydrationFailed(4), p.LocalEvicted(1), p.HydrationDone(5),
    ]  # fmt: skip
    for kind, key, value in steps:
        if kind == "put":
            v.writer.call(1, lambda b, k=key, n=value: b.put(t.INODES, k, InodeRow(k, n)))
        elif kind == "delete":
            v.writer.call(1, lambda b, k=key: b.delete(t.INODES, k))
        elif kind == "tier":
            v.writer.call(1, lambda b, k=key, n=value: b.record(tiers[n], segment_id=k))
        elif kind == "snapshot":
            snapshots.take(v.env, v.catalog, v.writer, v.directory(1), 1)
        else:
            v.close()
            v = open_volume(root)
    before = rows_of(v)
    v.close()
    shutil.rmtree(root / "catalog")
    v = open_volume(root)
    assert rows_of(v) == before
    with v.catalog.view() as view:
        assert load_index(view, 1).same_state(replay(v.directory(1)))
    v.close()
    shutil.rmtree(root)
