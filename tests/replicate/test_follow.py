"""A second folder fed from the remote alone: the same rows but for residency, whatever was bundled or dropped."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState, ResidencyRow
from aof2.engine.catalog.store import Catalog
from aof2.engine.env import Env
from aof2.engine.errors import ReadOnlyError, UnsupportedError
from aof2.engine.manifest import payloads as p
from aof2.engine.objects import HOT_BYTES
from aof2.engine.remote.errors import FencedError, RemoteMissingError
from aof2.engine.remote.fence import claim
from aof2.engine.replicate.follow import Follower
from aof2.engine.replicate.uploader import ReplicateOptions
from tests.catalog.helpers import every_row

from .helpers import TENANT, Rig, keys_of, make_file, open_directory, run_rig, sha

MAP = 1 << 30
SMALL_BUNDLES = ReplicateOptions(backoff_s=0.002, backoff_max_s=0.01, bundle_chunks=3)


def follower(root: Path, store: object) -> Follower:
    return Follower(Env(), store, root / "second", map_bytes=MAP)  # type: ignore[arg-type]


def rows_of(catalog: Catalog) -> dict[tuple[str, bytes], bytes]:
    """Every row of the tenant that is not about the log's own objects: those lag by what is not sealed yet."""
    prefix = t.STREAM.pack(TENANT)
    with catalog.view() as view:
        rows = every_row(view)
    return {k: v for k, v in rows.items() if k[1].startswith(prefix) and k[0] != "segments"}


def test_a_follower_catches_up_again_and_again(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        with follower(tmp_path, r.store) as second:
            for i in range(12):
                await r.write(make_file(i))
                if i % 4 == 3:
                    await r.snapshot()
                done = {s.stream_id: s for s in second.catch_up()}
                assert done[TENANT].missing == []
                assert done[TENANT].chunks_fetched >= 1
                assert rows_of(second.catalog) == rows_of(r.catalog)
            assert {s.stream_id: s for s in second.catch_up()}[TENANT].chunks_fetched == 0
        with follower(tmp_path, r.store) as second:
            await r.write(make_file(50))
            second.catch_up()
            assert rows_of(second.catalog) == rows_of(r.catalog)

    run_rig(tmp_path, body, options=SMALL_BUNDLES)


def test_one_that_slept_reads_the_bundles(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(0))
        with follower(tmp_path, r.store) as second:
            second.catch_up()
            for i in range(1, 12):
                await r.write(make_file(i))
                if i % 3 == 2:
                    await r.snapshot()
            assert [k for k in keys_of(r.store, f"manifest/{TENANT}/") if k.endswith(".mlogs")]
            assert f"manifest/{TENANT}/1.mlog" not in keys_of(r.store)
            (done,) = [s for s in second.catch_up() if s.stream_id == TENANT]
            assert done.missing == []
            assert done.snapshot_id is None  # bundles hold the whole way
            assert rows_of(second.catalog) == rows_of(r.catalog)

    run_rig(tmp_path, body, options=SMALL_BUNDLES)


def test_dropped_chunks_are_jumped_by_a_snapshot(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(0), make_file(1))
        with follower(tmp_path, r.store) as second:
            second.catch_up()
            await r.write(*(make_file(i) for i in range(2, 7)))
            await r.write(lambda b: b.delete(t.INODES, 1))
            await r.snapshot()
            await r.write(make_file(8))
            r.store.delete([f"manifest/{TENANT}/{i}.mlog" for i in (3, 4)])
            (done,) = [s for s in second.catch_up() if s.stream_id == TENANT]
            assert done.snapshot_id == 1
            assert done.missing == []
            assert rows_of(second.catalog) == rows_of(r.catalog)
            with second.catalog.view() as view:
                assert view.get(TENANT, t.INODES, 1) is None
        with follower(tmp_path, r.store) as second:
            await r.write(make_file(9))
            second.catch_up()
            assert rows_of(second.catalog) == rows_of(r.catalog)

    run_rig(tmp_path, body)


def test_a_hole_that_nothing_covers_is_said(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(*(make_file(i) for i in range(5)))
        r.store.delete([f"manifest/{TENANT}/2.mlog"])
        with follower(tmp_path, r.store) as second:
            (done,) = [s for s in second.catch_up() if s.stream_id == TENANT]
            assert done.missing == ["chunks 2 to 2 are not on the remote"]
            assert done.position is not None
            assert done.position.chunk_index == 1

    run_rig(tmp_path, body)


def test_a_damaged_snapshot_is_passed_over(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        for i in range(3):
            await r.write(make_file(i))
            await r.snapshot()
        await r.write(make_file(9))
        path = tmp_path / "remote" / "manifest" / str(TENANT) / "snapshot_3.bin"
        path.write_bytes(path.read_bytes()[:-3])
        with follower(tmp_path, r.store) as second:
            (done,) = [s for s in second.catch_up() if s.stream_id == TENANT]
            assert done.snapshot_id == 2
            assert "snapshot 3" in done.missing[0]
            assert rows_of(second.catalog) == rows_of(r.catalog)

    run_rig(tmp_path, body)


def resident_object(number: int, *, key: str) -> object:
    def work(b: Batch) -> None:
        row = ObjectRow(number, 1, ObjectState.PUBLISHED, 10, chunks=(number,), sha256=sha(number), backing=(1, 2, 3))
        b.put(t.OBJECTS, (number, 1), row)
        b.put(t.CHUNKS, number, ChunkRow(number, number, 1, 0, 10, sha(number), key=key))
        b.put(t.RESIDENCY, number, ResidencyRow(1))
        b.put(t.COUNTERS, HOT_BYTES, (b.get(t.COUNTERS, HOT_BYTES) or 0) + 10)
        b.record(p.SegmentOpened(0, 1), segment_id=number)
        b.record(p.UploadDone(key, "etag"), segment_id=number)

    return work


def test_nothing_is_resident_on_a_follower(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(*(resident_object(i, key=f"k{i}") for i in range(1, 5)))  # type: ignore[arg-type]
        with follower(tmp_path, r.store) as second:
            second.catch_up()
            with second.catalog.view() as view:
                assert list(view.scan(TENANT, t.RESIDENCY)) == []
                assert [row.backing for _, row in view.scan(TENANT, t.OBJECTS)] == [None] * 4
                assert view.get(TENANT, t.COUNTERS, HOT_BYTES) == 0
            await r.write(resident_object(5, key="k5"))  # type: ignore[arg-type]
            second.catch_up()
            with second.catalog.view() as view:
                assert list(view.scan(TENANT, t.RESIDENCY)) == []

    run_rig(tmp_path, body)


def test_many_chunks_make_way_for_a_newer_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aof2.engine.replicate.follow.LOCAL_CHUNKS_MAX", 4)

    async def body(r: Rig) -> None:
        with follower(tmp_path, r.store) as second:
            for i in range(15):
                await r.write(make_file(i))
                if i % 5 == 4:
                    await r.snapshot()
                second.catch_up()
                assert len(list((tmp_path / "second" / "manifest" / str(TENANT)).glob("*.mlog"))) <= 7
        # What is here is enough to rebuild the rows.
        for path in (tmp_path / "second" / "catalog").iterdir():
            path.unlink()
        with follower(tmp_path, r.store) as second:
            assert rows_of(second.catalog) == rows_of(r.catalog)

    run_rig(tmp_path, body)


def test_a_follower_stays_with_its_volume(tmp_path: Path) -> None:
    store = open_directory(tmp_path)
    with follower(tmp_path, store) as second:
        with pytest.raises(RemoteMissingError, match="right url"):
            second.catch_up()
        with pytest.raises(ReadOnlyError, match="another aof2 process"):
            follower(tmp_path, store)
        claim(Env(), store)
        assert second.catch_up() == []
        store.delete(["volume.json"])
        claim(Env(), store)
        with pytest.raises(FencedError, match="follows"):
            second.catch_up()


def test_what_a_newer_version_wrote_is_not_jumped_over(tmp_path: Path) -> None:
    async def body(r: Rig) -> None:
        await r.write(make_file(1), make_file(2))
        path = tmp_path / "remote" / "manifest" / str(TENANT) / "1.mlog"
        data = bytearray(path.read_bytes())
        data[8] = 2
        path.write_bytes(data)
        with follower(tmp_path, r.store) as second, pytest.raises(UnsupportedError, match="upgrade"):
            second.catch_up()

    run_rig(tmp_path, body)
