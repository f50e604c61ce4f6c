"""What a snapshot keeps from being pruned, and for how long."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from aof2.engine import snapshots
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectRow, ObjectState
from tests.engine.helpers import read_object, unlink_object

from .helpers import CHUNK, TENANT, Clock, World, run_world
from .test_prune import content, pruned, rewrite


def generation(number: int, published_ms: int, tombstoned_ms: int = 0) -> ObjectRow:
    state = ObjectState.TOMBSTONED if tombstoned_ms else ObjectState.PUBLISHED
    return ObjectRow(7, number, state, published_ms=published_ms, tombstoned_ms=tombstoned_ms)


@pytest.mark.parametrize(
    ("moments", "kept"),
    [
        ([], set()),
        ([5], set()),
        ([10], {1}),
        ([19], {1}),
        ([20], {2}),
        ([25, 31], {2, 3}),
        ([40], set()),
        ([12, 39], {1, 3}),
    ],
)
def test_what_was_current_then(moments: list[int], kept: set[int]) -> None:
    rows = [generation(1, 10), generation(2, 20), generation(3, 30, tombstoned_ms=40)]
    assert snapshots.pinned(rows, moments) == kept


def test_what_was_not_in_the_remote_is_nobodys() -> None:
    dirty = ObjectRow(7, 2, ObjectState.DIRTY)
    assert snapshots.pinned([generation(1, 10), dirty], [15]) == {1}
    assert snapshots.pinned([dirty], [15]) == set()


def test_deleted_and_rewritten_files_stay_until_it_is_deleted(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        old, dropped = content(1, CHUNK + 5), content(2, CHUNK)
        key = await w.put("a", old)
        gone = await w.put("b", dropped)
        await w.jobs.checkpoint(TENANT)
        clock.jump(1)
        row = w.v.writer.call(TENANT, partial(snapshots.take, name="then"))
        clock.jump(1)
        for i in range(3, 8):
            key = await rewrite(w, key, content(i, CHUNK))
            await w.jobs.checkpoint(TENANT)
        await unlink_object(w.v, "default", b"b")
        for _ in range(4):
            clock.jump(10_000_000)
            await pruned(w)
        assert {(ino, number) for ino, number in w.rows(t.OBJECTS)} == {(key[1], n) for n in (1, 5, 6)} | {gone[1:]}
        for kept, data in (((TENANT, key[1], 1), old), (gone, dropped)):
            await w.v.evict([kept])
            assert await read_object(w.v, kept, 0, len(data)) == data
        w.v.writer.call(TENANT, partial(snapshots.delete, snapshot_id=row.snapshot_id))
        for _ in range(4):
            clock.jump(10_000_000)
            await pruned(w)
        assert {(ino, number) for ino, number in w.rows(t.OBJECTS)} == {(key[1], 5), (key[1], 6)}
        assert gone[1] not in w.rows(t.INODES)
        assert len(w.remote_blobs()) == 2
        with pytest.raises(snapshots.NoSuchSnapshotError):
            w.v.writer.call(TENANT, partial(snapshots.delete, snapshot_id=row.snapshot_id))

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())
