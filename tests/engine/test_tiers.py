"""Objects through the tiers: in, up, out and back, bit for bit."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.env import Env, Files
from aof2.engine.errors import ReadOnlyError
from aof2.engine.local.handles import Key
from aof2.engine.manifest.reader import Stream
from aof2.engine.objects import on_disk
from aof2.engine.tiering import flights
from aof2.engine.volume import Volume
from tests.engine.helpers import backing_path, object_row, put_object, read_object

from .helpers import KIB, MIB, run_volume, small_settings

CHUNK = 256 * KIB
BLOCK = 16 * KIB
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 5 * CHUNK + 123]


def content(seed: int, size: int, *, dull: bool = False) -> bytes:
    return bytes(size) if dull else random.Random(seed).randbytes(size)


async def hot_files(v: Volume) -> list[Path]:
    return sorted(v.hot.root.rglob("[0-9]*.*"))


def disk_bytes(folder: Path) -> int:
    """What the files take on disk; they come and go while we look."""
    total = 0
    for path in folder.rglob("*.*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_round_trip_whole_and_by_random_ranges(tmp_path: Path, compression: str) -> None:
    async def body(v: Volume) -> None:
        data = {size: content(size, size, dull=size % 2 == 0) for size in SIZES}
        keys: dict[int, Key] = {}
        for size in SIZES:
            keys[size] = await put_object(v, "default", b"f%d" % size, data[size])
            assert await read_object(v, keys[size], 0, size + 10) == data[size]
        assert await v.checkpoint("default") == len(SIZES)
        assert await v.checkpoint("default") == 0
        for size in SIZES:
            assert object_row(v, keys[size]).state == ObjectState.PUBLISHED
        freed, skipped = await v.evict(list(keys.values()))
        assert (freed, skipped) == (sum(map(on_disk, SIZES)), [])
        assert await hot_files(v) == []
        assert v.quota.usage.used_bytes == 0
        rng = random.Random(1)
        for size in SIZES[1:]:
            for _ in range(10):
                offset, length = rng.randrange(size), rng.randrange(1, size + 1)
                assert await read_object(v, keys[size], offset, length) == data[size][offset : offset + length]
        for size in SIZES:
            assert await read_object(v, keys[size], 0, size) == data[size]
        assert v.quota.usage.used_bytes == sum(map(on_disk, SIZES))

    run_volume(small_settings(tmp_path, compression=compression), body)


def test_it_is_all_there_after_a_restart(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    data = content(1, 3 * CHUNK + 7)
    keys: list[Key] = []

    async def first(v: Volume) -> None:
        keys.append(await put_object(v, "default", b"a", data))
        await v.checkpoint("default")
        await v.evict(keys)
        assert await read_object(v, keys[0], CHUNK, 10) == data[CHUNK : CHUNK + 10]

    async def second(v: Volume) -> None:
        assert not v.opened.rebuilt
        used = v.quota.usage.used_bytes
        assert 0 < used < len(data)
        fetched = v.hydrator.fetched_bytes
        assert await read_object(v, keys[0], CHUNK, 10) == data[CHUNK : CHUNK + 10]
        assert v.hydrator.fetched_bytes == fetched  # the residency survived
        assert await read_object(v, keys[0], 0, len(data)) == data

    run_volume(settings, first)
    run_volume(settings, second)


def test_identical_content_is_uploaded_once(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        data = content(3, CHUNK)
        a = await put_object(v, "default", b"a", data)
        await v.checkpoint("default")
        before = v.publisher.uploaded_bytes
        b = await put_object(v, "default", b"b", data)
        await v.checkpoint("default")
        assert v.publisher.uploaded_bytes == before
        await v.evict([a, b])
        assert await read_object(v, b, 0, CHUNK) == data
        with v.catalog.view() as view:
            ((_, blob),) = view.scan(b[0], t.BLOBS)
        assert blob.refs == 2

    run_volume(small_settings(tmp_path), body)


def test_nothing_dirty_is_evicted(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", content(1, 1000))
        freed, skipped = await v.evict([key])
        assert (freed, skipped) == (0, [key])
        assert await read_object(v, key, 0, 1000) == content(1, 1000)

    run_volume(small_settings(tmp_path), body)


def test_a_file_in_use_is_skipped_and_named(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", content(1, 1000))
        await v.checkpoint("default")
        async with v.opened_object(key):
            assert await v.evict([key]) == (0, [key])
        with open(backing_path(v, key), "rb"):
            assert await v.evict([key]) == (0, [key])
        assert await v.evict([key]) == (4096, [])

    run_volume(small_settings(tmp_path), body)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("harm", ["flip", "cut", "remove", "replace"])
def test_a_damaged_local_copy_is_fetched_again(tmp_path: Path, harm: str) -> None:
    settings = small_settings(tmp_path)
    data = content(9, 2 * CHUNK)
    keys: list[Key] = []

    async def write(v: Volume) -> None:
        keys.append(await put_object(v, "default", b"a", data))
        await v.checkpoint("default")

    async def read(v: Volume) -> None:
        path = backing_path(v, keys[0])
        if harm == "flip":
            bad = bytearray(path.read_bytes())
            bad[BLOCK * 3] ^= 1
            path.write_bytes(bad)
        elif harm == "cut":
            path.write_bytes(data[: CHUNK + 5])
        elif harm == "remove":
            path.unlink()
        else:
            path.unlink()
            path.write_bytes(bytes(len(data)))
        assert await read_object(v, keys[0], 0, len(data)) == data
        assert await read_object(v, keys[0], 0, len(data)) == data

    run_volume(settings, write)
    run_volume(settings, read)


def test_more_than_fits_makes_way(tmp_path: Path) -> None:
    """20 objects of a quarter of the cache each, read at random: the limit holds, the bytes are right."""

    async def body(v: Volume) -> None:
        limit = v.settings.cache.hot_bytes
        data = {i: content(i, CHUNK) for i in range(20)}
        keys: dict[int, Key] = {}
        for i, piece in data.items():
            keys[i] = await put_object(v, "default", b"f%d" % i, piece)
            await v.checkpoint("default")
        rng = random.Random(4)
        for _ in range(200):
            i = rng.randrange(20)
            offset = rng.randrange(CHUNK)
            assert await read_object(v, keys[i], offset, 1000) == data[i][offset : offset + 1000]
            assert v.quota.usage.used_bytes + v.quota.usage.reserved_bytes <= limit
            # A file in many pieces takes a page for the list of them, which is not counted.
            assert disk_bytes(v.hot.root) <= limit + 4096 * sum(1 for _ in v.hot.root.rglob("*.1"))
        assert v.evictor.evictions > 0

    run_volume(small_settings(tmp_path, hot_bytes=4 * CHUNK), body)


def test_turned_off_the_volume_is_read_only_and_serves_what_there_is(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    data = content(1, 2 * CHUNK)
    keys: list[Key] = []

    async def write(v: Volume) -> None:
        keys.append(await put_object(v, "default", b"a", data))
        await v.checkpoint("default")
        await v.evict(keys)

    async def read(v: Volume) -> None:
        assert await read_object(v, keys[0], 0, len(data)) == data
        with pytest.raises(ReadOnlyError, match="turned off"):
            await put_object(v, "default", b"b", b"x")
        assert await read_object(v, keys[0], 5, 10) == data[5:15]

    run_volume(settings, write)
    off = msgspec.structs.replace(settings, manifest=msgspec.structs.replace(settings.manifest, enabled=False))
    before = sorted((p, p.stat().st_size) for p in (tmp_path / "state" / "manifest").rglob("*.mlog"))
    run_volume(off, read)
    assert sorted((p, p.stat().st_size) for p in (tmp_path / "state" / "manifest").rglob("*.mlog")) == before
    run_volume(settings, write_more(keys, data))


def write_more(keys: list[Key], data: bytes) -> Callable[[Volume], Awaitable[None]]:
    async def body(v: Volume) -> None:
        assert await read_object(v, keys[0], 0, len(data)) == data
        await put_object(v, "default", b"b", b"x")

    return body


def test_of_a_large_object_only_what_is_wanted_goes(tmp_path: Path) -> None:
    """Chunks are punched out of a file that holds much more than has to make way."""

    async def body(v: Volume) -> None:
        data = content(3, 6 * CHUNK)
        big = await put_object(v, "default", b"big", data)
        await v.checkpoint("default")
        v.handles.forget(big)
        await v.evictor.make_room(3 * CHUNK)
        used = v.quota.usage.used_bytes
        assert 0 < used < 6 * CHUNK
        assert backing_path(v, big).stat().st_blocks * 512 == used
        fetched = v.hydrator.fetched_bytes
        tail = 5 * CHUNK
        assert await read_object(v, big, tail, CHUNK) == data[tail:]
        assert v.hydrator.fetched_bytes == fetched  # what stayed is trusted as it is
        assert await read_object(v, big, 0, len(data)) == data

    run_volume(small_settings(tmp_path, hot_bytes=8 * CHUNK, compression="none"), body, parts=("jobs",))


def test_files_without_rows_are_swept(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", content(1, 1000))
        kept = backing_path(v, key)
        orphan = kept.with_name("12345.1")
        orphan.write_bytes(b"left by a crash")
        warm = v.warm.path("default", 777)
        warm.parent.mkdir(parents=True)
        warm.write_bytes(b"this too")
        odd = kept.with_name("notes.txt")
        odd.write_bytes(b"not ours to judge")
        await v.janitor.sweep_orphans()  # and the volume once by itself, at the start
        assert (kept.exists(), orphan.exists(), warm.exists(), odd.exists()) == (True, False, False, True)
        await v.checkpoint("default")
        await v.evict([key])
        kept.write_bytes(b"an eviction that was cut short")
        assert await v.janitor.sweep_orphans() == 1
        assert not kept.exists()
        assert await read_object(v, key, 0, 1000) == content(1, 1000)

    run_volume(small_settings(tmp_path), body, parts=("jobs",))


def test_a_chunk_is_said_to_be_fetched_once_however_many_requests_that_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flights, "REQUEST_BYTES", BLOCK)

    async def body(v: Volume) -> None:
        data = b"compress" * (CHUNK // 4)
        key = await put_object(v, "default", b"a", data)
        await v.checkpoint("default")
        await v.evict([key])
        async with v.opened_object(key) as handle:
            await v.hydrator.fill(handle)
        assert v.remote.stats().requests >= 2 * CHUNK // BLOCK
        assert await read_object(v, key, 0, len(data)) == data
        await trio.to_thread.run_sync(v.writer.flush)
        said = [r for r in Stream(v.manifest_dir / str(key[0])).records() if r.type == "HydrationStarted"]
        assert len(said) == len({r.segment_id for r in said}) == 2

    run_volume(small_settings(tmp_path, compression="zstd"), body, parts=("jobs",))


class NotingFiles(Files):
    """Remembers which ranges were handed to the disk early, and which files were synced after that."""

    def __init__(self) -> None:
        self.handed: list[tuple[int, int]] = []
        self.synced_after: list[int] = []

    def start_writeback(self, fd: int, offset: int, length: int) -> None:
        self.handed.append((offset, length))
        super().start_writeback(fd, offset, length)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.synced_after.append(len(self.handed))


def test_what_comes_in_bulk_is_on_its_way_to_the_disk_before_the_sync(tmp_path: Path) -> None:
    files = NotingFiles()
    size = 3 * MIB

    async def body(v: Volume) -> None:
        data = content(6, size)
        key = await put_object(v, "default", b"a", data)
        await v.checkpoint("default")
        await v.evict([key])
        assert await read_object(v, key, 2 * MIB + 5, 10) == data[2 * MIB + 5 : 2 * MIB + 15]
        assert files.handed == []  # a block here and there is not worth it
        async with v.opened_object(key) as handle:
            await v.hydrator.fill(handle)
        assert sorted(files.handed) == [(0, MIB), (MIB, MIB)]
        assert files.synced_after[-1] == 2  # an early start is no promise
        assert await read_object(v, key, 0, size) == data

    settings = small_settings(tmp_path, chunk_bytes=MIB, compression="none")
    run_volume(settings, body, env=Env(files=files), parts=("jobs",))
