"""What makes way: the least recently used, as far as uses can be seen, also after a remount, a kill, a damaged file."""

from __future__ import annotations

import os
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.env import Env
from aof2.engine.local.handles import HandleTable, Key
from aof2.engine.recency import saved
from aof2.engine.recency.segmented import Image
from aof2.engine.volume import Volume
from tests.engine.helpers import (
    KIB,
    backing_path,
    put_object,
    read_object,
    run_volume,
    small_settings,
    unlink_object,
    with_cache,
)

SIZE = 64 * KIB
COUNT = 20
PARTS = ("jobs",)


def content(n: int) -> bytes:
    return bytes([n % 251 + 1]) * SIZE


def names(keys: dict[int, Key], v: Volume) -> list[int]:
    """Which of the files are here."""
    return [n for n, key in keys.items() if v.evictor.hot_bytes_of(key)]


async def fill(v: Volume, count: int = COUNT) -> dict[int, Key]:
    keys = {n: await put_object(v, "default", b"f%d" % n, content(n)) for n in range(count)}
    await v.checkpoint("default")
    return keys


async def leave(v: Volume, files: int) -> None:
    """Evicts until so many files of SIZE are left."""
    v.evictor._low_water = 1.0
    assert v.quota.usage.limit_bytes is not None
    await v.evictor.make_room(v.quota.usage.limit_bytes - files * SIZE)


def test_the_oldest_write_goes_first(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        keys = await fill(v)
        await leave(v, 5)
        assert names(keys, v) == [15, 16, 17, 18, 19]

    run_volume(small_settings(tmp_path, compression="none"), body, parts=PARTS)


def test_a_read_keeps_a_file_also_when_its_handle_is_dropped(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        v.handles._idle_max = 2
        keys = await fill(v)
        for n in (3, 8, 1):
            assert await read_object(v, keys[n], 0, 10) == content(n)[:10]
        for n in (5, 6):  # these take the handles
            await read_object(v, keys[n], 0, 10)
        await leave(v, 5)
        assert names(keys, v) == [1, 3, 5, 6, 8]

    assert HandleTable()._idle_max > 2
    run_volume(small_settings(tmp_path, compression="none"), body, parts=PARTS)


def test_the_order_is_kept_across_a_remount(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, compression="none")
    keys: dict[int, Key] = {}

    async def first(v: Volume) -> None:
        keys.update(await fill(v))
        for n in (4, 2, 9):
            await read_object(v, keys[n], 0, 10)

    async def second(v: Volume) -> None:
        assert v.recent.complete, "nothing has to be looked for after a clean stop"
        await read_object(v, keys[0], 0, 10)
        await leave(v, 4)
        assert names(keys, v) == [0, 2, 4, 9]
        await leave(v, 3)
        assert names(keys, v) == [0, 2, 9]

    run_volume(settings, first, parts=PARTS)
    run_volume(settings, second, parts=PARTS)


def killed(settings: object, body: Callable[[Volume], Awaitable[None]]) -> None:
    """Runs the volume in a child that ends without closing it."""
    pid = os.fork()
    if not pid:
        try:

            async def and_die(v: Volume) -> None:
                await body(v)
                await trio.to_thread.run_sync(v.writer.flush)
                os._exit(0)

            run_volume(settings, and_die, parts=PARTS)  # type: ignore[arg-type]
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_after_a_kill_what_the_file_does_not_list_is_newer_than_what_it_does(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, compression="none")

    async def first(v: Volume) -> None:
        await fill(v, 6)

    async def second(v: Volume) -> None:
        for n in range(6, 12):
            await put_object(v, "default", b"f%d" % n, content(n))
        await v.checkpoint("default")

    async def third(v: Volume) -> None:
        with v.catalog.view() as view:
            keys = {n: (1, ino, 1) for n, ((ino, _), _) in enumerate(view.scan(1, t.OBJECTS))}
        assert len(keys) == 12
        assert not v.recent.complete
        await read_object(v, keys[1], 0, 10)
        await leave(v, 4)
        assert names(keys, v) == [1, 9, 10, 11]
        while not v.recent.complete:
            await trio.sleep(0.01)
        assert len(v.recent.hot) == 4

    run_volume(settings, first, parts=PARTS)
    killed(settings, second)
    run_volume(settings, third, parts=PARTS)


@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_without_the_file_everything_is_found(tmp_path: Path, harm: str) -> None:
    settings = small_settings(tmp_path, compression="none")
    keys: dict[int, Key] = {}

    async def first(v: Volume) -> None:
        keys.update(await fill(v))

    async def second(v: Volume) -> None:
        await read_object(v, keys[0], 0, 10)
        await leave(v, 3)
        assert names(keys, v) == [0, 18, 19], "by age of the write, then"

    run_volume(settings, first, parts=PARTS)
    path = tmp_path / "state" / "recency" / "hot.lru"
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3])
    run_volume(settings, second, parts=PARTS)


def test_what_is_used_or_pinned_is_passed_over_and_keeps_its_place(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        keys = await fill(v)
        with open(backing_path(v, keys[1]), "rb"):
            async with v.opened_object(keys[0]):
                await leave(v, 4)
            assert names(keys, v) == [0, 1, 18, 19]
        await leave(v, 2)
        assert names(keys, v) == [18, 19]

    run_volume(small_settings(tmp_path, compression="none"), body, parts=PARTS)


def test_a_scan_leaves_what_was_used_twice(tmp_path: Path) -> None:
    """Cache of 32 files, 8 of them read again, a scan of 100: the 8 are still here."""

    async def body(v: Volume) -> None:
        keys: dict[int, Key] = {}
        for n in range(100):
            keys[n] = await put_object(v, "default", b"f%d" % n, content(n))
            if n % 10 == 9:
                await v.checkpoint("default")
        hot = range(8)
        for _ in range(2):
            for n in hot:
                assert await read_object(v, keys[n], 0, SIZE) == content(n)
        for n in range(8, 100):
            assert await read_object(v, keys[n], 0, SIZE) == content(n)
        fetched = v.hydrator.fetched_bytes
        for n in hot:
            assert await read_object(v, keys[n], 0, SIZE) == content(n)
        assert v.hydrator.fetched_bytes == fetched
        assert v.quota.usage.used_bytes <= v.settings.cache.hot_bytes

    run_volume(small_settings(tmp_path, hot_bytes=32 * SIZE, compression="none"), body, parts=PARTS)


def test_a_removed_file_goes_first(tmp_path: Path) -> None:
    """It is kept for undelete in the remote; here it is only in the way."""

    async def body(v: Volume) -> None:
        keys = await fill(v)
        for n in (5, 12):
            await read_object(v, keys[n], 0, 10)
        await unlink_object(v, "default", b"f12")
        await leave(v, 19)
        assert 12 not in names(keys, v)

    run_volume(small_settings(tmp_path, compression="none"), body, parts=PARTS)


def test_the_order_is_saved_while_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aof2.engine.tiering.recent.SAVE_EVERY_S", 0.05)

    async def body(v: Volume) -> None:
        keys = await fill(v, 3)
        path = v.state_dir / "recency" / "hot.lru"
        while (found := saved.read(path) if path.exists() else None) is None or len(found.image.keys) < 3:
            await trio.sleep(0.02)
        assert not found.closed
        assert set(found.image.keys) == {key[1] for key in keys.values()}

    run_volume(small_settings(tmp_path, compression="none"), body, parts=PARTS)
    found = saved.read(tmp_path / "state" / "recency" / "hot.lru")
    assert found is not None
    assert found.closed


def test_a_full_disk_costs_the_order_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async def body(v: Volume) -> None:
        await fill(v, 2)
        monkeypatch.setattr(saved, "write", no_room)

    settings = small_settings(tmp_path, compression="none")
    run_volume(settings, body, env=Env(), parts=PARTS)
    monkeypatch.undo()
    run_volume(settings, fill_one, parts=PARTS)
    monkeypatch.setattr(saved, "take_back_closed", no_room)
    run_volume(settings, look, parts=PARTS)


async def fill_one(v: Volume) -> None:
    await put_object(v, "default", b"one", content(1))


async def look(v: Volume) -> None:
    assert len(v.recent.hot) == 3


def test_a_lowered_limit_holds_without_a_further_request(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, hot_bytes=32 * SIZE, compression="none")
    keys: dict[int, Key] = {}

    async def first(v: Volume) -> None:
        keys.update(await fill(v))

    async def second(v: Volume) -> None:
        while v.quota.over_limit():
            await trio.sleep(0.01)
        assert names(keys, v) == [13, 14, 15, 16, 17, 18, 19]

    run_volume(settings, first, parts=PARTS)
    run_volume(with_cache(settings, hot_bytes=8 * SIZE), second, parts=PARTS)


def test_warm_copies_make_way_by_last_use_also_after_a_restart(tmp_path: Path) -> None:
    settings = with_cache(small_settings(tmp_path), warm_bytes=4 * SIZE)
    keys: dict[int, Key] = {}

    def in_warm(v: Volume) -> list[int]:
        with v.catalog.view() as view:
            rows = {n: view.get(1, t.OBJECTS, keys[n][1:]) for n in keys}
        return [n for n, row in rows.items() if row is not None and v.warm.has((1, row.chunks[0]))]

    async def first(v: Volume) -> None:
        keys.update(await fill(v, 8))
        await leave(v, 0)
        assert in_warm(v) == list(range(8))
        for n in (0, 3):
            assert await read_object(v, keys[n], 0, SIZE) == content(n)

    async def second(v: Volume) -> None:
        order = [key & 0xFFFF for key in v.recent.warm.in_order()]
        assert len(order) == 8
        with v.catalog.view() as view:
            used = [view.get(1, t.OBJECTS, keys[n][1:]) for n in (0, 3)]
        assert order[-2:] == [row.chunks[0] & 0xFFFF for row in used if row is not None], "used last, goes last"

    run_volume(settings, first, parts=PARTS)
    run_volume(settings, second, parts=PARTS)


def test_killed_while_the_order_is_saved(tmp_path: Path) -> None:
    """The old order or the new one, whole."""
    path = tmp_path / "recency" / "hot.lru"
    old, new = (Image((1, 0, 0), array("Q", [key]), array("I", [1])) for key in (1, 2))
    for point in saved.CRASH_POINTS:
        saved.write(Env(), path, old, closed=False)
        env = StoppingEnv(point)
        with pytest.raises(StoppedError):
            saved.write(env, path, new, closed=False)
        assert saved.read(path) in ((old, False), (new, False))
    saved.write(Env(), path, new, closed=False)
    assert saved.read(path) == (new, False)


class StoppedError(Exception):
    pass


class StoppingEnv(Env):
    def __init__(self, point: str) -> None:
        super().__init__()
        self.point = point

    def failpoint(self, name: str) -> None:
        if name == self.point:
            raise StoppedError
