"""A generation that was brought back shares its blobs with the old one, and outlives it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from aof2.engine import generations as past
from aof2.engine import namespace
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from tests.engine.helpers import read_object, unlink_object

from .helpers import CHUNK, TENANT, Clock, World, run_world
from .test_prune import content, pruned, rewrite

ROOT = namespace.root_ino(TENANT)


def test_the_blobs_stay_as_long_as_one_needs_them(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        first = content(1, 2 * CHUNK + 7)
        key = await w.put("a", first)
        await w.jobs.checkpoint(TENANT)
        blobs = set(w.remote_blobs())
        for i in range(2, 4):
            key = await rewrite(w, key, content(i, CHUNK))
            await w.jobs.checkpoint(TENANT)
        ino = key[1]
        row = w.v.writer.call(TENANT, partial(past.revert, ino=ino, generation=1, purge_after_ms=60_000))
        beside = partial(past.revert_beside, ino=ino, generation=1, parent=ROOT, name=b"beside")
        made = w.v.writer.call(TENANT, beside)
        assert (row.generation, made.generation, made.size) == (4, 1, len(first))
        assert set(w.remote_blobs()) >= blobs and len(w.remote_blobs()) == len(blobs) + 2  # nothing was uploaded
        for _ in range(3):
            clock.jump(10_000)
            await pruned(w)
        assert {generation for i, generation in w.rows(t.OBJECTS) if i == ino} == {3, 4}
        assert set(w.remote_blobs()) >= blobs, "the old generation took them along"
        for key in ((TENANT, ino, 4), (TENANT, made.ino, 1)):
            await w.v.evict([key])
            assert await read_object(w.v, key, 0, len(first)) == first
        await unlink_object(w.v, "default", b"a")
        await unlink_object(w.v, "default", b"beside")
        for _ in range(4):
            clock.jump(10_000_000)
            await pruned(w)
        assert w.remote_blobs() == [] and not w.rows(t.OBJECTS) and not w.rows(t.BLOBS)
        assert w.quota_is_even()

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        key = await w.put("a", b"one")
        revert = partial(past.revert, ino=key[1], purge_after_ms=0)
        with pytest.raises(past.NotSettledError):
            w.v.writer.call(TENANT, partial(revert, generation=1))
        await w.jobs.checkpoint(TENANT)
        before = w.rows(t.OBJECTS), w.rows(t.BLOBS), w.rows(t.INODES)
        for wrong in (0, 2, 99):
            with pytest.raises(past.NoSuchGenerationError):
                w.v.writer.call(TENANT, partial(revert, generation=wrong))
        with pytest.raises(FileExistsError):
            beside = partial(past.revert_beside, ino=key[1], generation=1, parent=ROOT, name=b"a")
            w.v.writer.call(TENANT, beside)
        assert (w.rows(t.OBJECTS), w.rows(t.BLOBS), w.rows(t.INODES)) == before
        [row] = [row for row in w.rows(t.OBJECTS).values() if row.ino == key[1]]
        assert row.state == ObjectState.PUBLISHED

    run_world(tmp_path, body)
