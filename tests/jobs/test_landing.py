"""Neighbours of a small file: they become files together, each checked, and are no use of themselves."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from aof2.engine import namespace
from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.local.sparse import on_disk
from aof2.engine.manifest.format import RecordType
from aof2.engine.tiering import landing
from tests.engine.helpers import backing_path, object_row, read_object, small_settings

from .helpers import TENANT, World, run_world
from .test_packs import Key, check_clean, content, pack_keys

COUNT = 40


class HookEnv(Env):
    """Does something at a point."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.at: dict[str, Callable[[], object]] = {}

    def failpoint(self, name: str) -> None:
        hook = self.at.pop(name, None)
        if hook is not None:
            hook()


async def cold(w: World, data: list[bytes]) -> dict[Key, bytes]:
    """Published together, in their order, and nothing of them here."""
    files = {await w.put(f"f{i}", piece): piece for i, piece in enumerate(data)}
    await w.jobs.checkpoint(TENANT)
    await w.until(lambda: not w.jobs.runner.running)
    assert len(pack_keys(w)) == 1
    await w.v.evict(list(files))
    w.remote.calls.clear()
    return files


def plain(count: int = COUNT) -> list[bytes]:
    return [content(i, 40 + 37 * i) for i in range(count)]


def is_here(w: World, key: Key) -> bool:
    row = object_row(w.v, key)
    with w.v.catalog.view() as view:
        here = view.get(key[0], t.RESIDENCY, row.chunks[0])
    assert (here is not None and here.mask != 0) == backing_path(w.v, key).exists()
    if not backing_path(w.v, key).exists():
        return False
    found = os.stat(backing_path(w.v, key))
    return row.backing == (found.st_ino, found.st_size, found.st_mtime_ns)


async def read_two(w: World, files: dict[Key, bytes]) -> None:
    """The second miss brings the neighbours."""
    for key in list(files)[:2]:
        assert await read_object(w.v, key, 0, 1 << 20) == files[key]
    await w.v.hydrator.quiesce()


@pytest.mark.parametrize("compressible", [False, True])
def test_neighbours_land_in_one_commit(tmp_path: Path, compressible: bool) -> None:
    seen: list[tuple[int, int]] = []

    async def body(w: World) -> None:
        data = [bytes([i]) * (300 + i) for i in range(COUNT)] if compressible else plain()
        files = await cold(w, data)
        w.v.target.streams[TENANT].observe = lambda kind, segment_id, _: seen.append((kind, segment_id))
        groups = w.v.writer.groups
        await read_two(w, files)
        assert w.v.writer.groups - groups <= 6
        assert w.remote.count("get") == 2
        assert all(is_here(w, key) for key in files)
        assert w.quota_is_even()
        for key in files:
            (chunk_id,) = object_row(w.v, key).chunks
            assert (RecordType.HYDRATION_STARTED, chunk_id) in seen
            assert (RecordType.HYDRATION_DONE, chunk_id) in seen
        for key, piece in files.items():
            assert await read_object(w.v, key, 0, 1 << 20) == piece
        assert w.remote.count("get") == 2
        assert not w.v.handles.moving

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_more_than_one_commit_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "AT_ONCE", 7)

    async def body(w: World) -> None:
        files = await cold(w, plain())
        for key in list(files)[20:22]:
            assert await read_object(w.v, key, 0, 1 << 20) == files[key]
        await w.v.hydrator.quiesce()
        assert all(is_here(w, key) for key in files)
        assert w.quota_is_even()

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_a_damaged_member_does_not_land(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        files = await cold(w, plain())
        bad = list(files)[9]
        with w.v.catalog.view() as view:
            chunk = view.get(TENANT, t.CHUNKS, object_row(w.v, bad).chunks[0])
        assert chunk is not None
        at = tmp_path / "remote" / chunk.key
        pack = bytearray(at.read_bytes())
        pack[chunk.offset + 3] ^= 1
        at.write_bytes(pack)
        await read_two(w, files)
        assert [key for key in files if not is_here(w, key)] == [bad]
        assert w.quota_is_even()
        pack[chunk.offset + 3] ^= 1
        at.write_bytes(pack)
        assert await read_object(w.v, bad, 0, 1 << 20) == files[bad]

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_removed_while_it_lands(tmp_path: Path) -> None:
    env = HookEnv()

    async def body(w: World) -> None:
        files = await cold(w, plain())
        gone = list(files)[5]
        unlink = partial(namespace.unlink, parent=namespace.root_ino(TENANT), name=b"f5")
        env.at["land.synced"] = lambda: w.v.writer.call(TENANT, unlink)
        await read_two(w, files)
        assert not env.at
        assert not backing_path(w.v, gone).exists()
        assert all(is_here(w, key) for key in files if key != gone)
        assert w.quota_is_even()

    run_world(tmp_path, body, env=env)
    check_clean(tmp_path)


def test_who_wants_one_that_lands_waits_for_it(tmp_path: Path) -> None:
    env = HookEnv()
    began, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        began.set()
        go_on.wait(60)

    async def body(w: World) -> None:
        files = await cold(w, plain())
        key = list(files)[11]
        done = trio.Event()

        async def read() -> None:
            assert await read_object(w.v, key, 0, 1 << 20) == files[key]
            done.set()

        env.at["land.written"] = hold
        for first in list(files)[:2]:
            await read_object(w.v, first, 0, 1)
        await trio.to_thread.run_sync(began.wait)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            assert not done.is_set()
            go_on.set()
        assert w.remote.count("get") == 2

    run_world(tmp_path, body, env=env)
    check_clean(tmp_path)


def test_coming_along_is_no_use_and_is_counted_when_it_was_none(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        files = await cold(w, plain())
        windows = w.v.hydrator.fetcher.windows
        used = list(files)[:2]
        await read_two(w, files)
        order = list(w.v.recent.hot.in_order())
        assert {key[1] for key in used} == set(order[-2:])
        third = list(files)[2]
        await read_object(w.v, third, 0, 1)
        assert order != list(w.v.recent.hot.in_order())
        unread = windows.unread_bytes
        await w.v.evict(list(files))
        rest = [key for key in files if key not in (*used, third)]
        assert windows.unread_bytes - unread >= sum(len(files[key]) for key in rest)

    run_world(tmp_path, body)
    check_clean(tmp_path)


def test_without_room_nothing_lands_and_all_is_read(tmp_path: Path) -> None:
    data = [random.Random(i).randbytes(9000) for i in range(COUNT)]
    settings = small_settings(tmp_path, hot_bytes=2 * sum(on_disk(len(piece)) for piece in data))

    async def body(w: World) -> None:
        files = await cold(w, data)
        held = w.v.quota.try_reserve("default", w.v.quota.usage.limit_bytes - 3 * 12288)  # type: ignore[operator]
        assert held is not None
        with held:
            await read_two(w, files)
            assert sum(is_here(w, key) for key in files) <= 3
            for key, piece in files.items():
                assert await read_object(w.v, key, 0, 1 << 20) == piece
        await w.v.hydrator.quiesce()
        assert w.quota_is_even()

    run_world(settings, body)
    check_clean(tmp_path)
