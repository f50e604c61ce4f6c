"""The tier between: compressed copies that save requests; and scans that leave no trace."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import load_index
from aof2.engine.local.handles import Key
from aof2.engine.manifest.reader import Stream
from aof2.engine.tiering.coldscan import ColdScanOptions
from aof2.engine.volume import Volume
from tests.catalog.helpers import every_row
from tests.engine.helpers import cold_read, put_object, read_object

from .helpers import KIB, run_volume, small_settings, with_cache
from .test_tiers import content

CHUNK = 256 * KIB


def dull(n: int) -> bytes:
    return (b"line %d of a log that repeats itself\n" % n) * (CHUNK // 36)


async def filled(v: Volume, count: int) -> dict[Key, bytes]:
    data: dict[Key, bytes] = {}
    for n in range(count):
        key = await put_object(v, "default", b"f%d" % n, dull(n))
        await v.checkpoint("default")
        data[key] = dull(n)
    return data


def test_what_leaves_hot_stays_warm_and_comes_back_without_a_request(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        data = await filled(v, 12)
        assert v.evictor.evictions > 0
        assert v.warm.used_bytes > 0
        shutil.rmtree(tmp_path / "remote" / "checkpoints")  # whatever is read now is read from here
        for key, expected in data.items():
            assert await read_object(v, key, 0, len(expected)) == expected
        assert v.hydrator.fetched_bytes == 0
        types = [r.type for r in Stream(v.manifest_dir / "1").records()]
        assert "CompressionDone" in types
        with v.catalog.view() as view:
            assert view.get(1, t.COUNTERS, "warm_bytes") == v.warm.used_bytes
            assert sum(n for _, n in view.scan(1, t.WARM)) == v.warm.used_bytes

    run_volume(small_settings(tmp_path, hot_bytes=4 * CHUNK), body)


def test_warm_has_a_limit_and_survives_a_restart(tmp_path: Path) -> None:
    settings = with_cache(small_settings(tmp_path, hot_bytes=3 * CHUNK), warm_bytes=CHUNK)
    keys: dict[Key, bytes] = {}

    async def first(v: Volume) -> None:
        keys.update(await filled(v, 20))
        assert 0 < v.warm.used_bytes <= CHUNK
        on_disk = sum(p.stat().st_size for p in v.warm.root.rglob("*.blob"))
        assert on_disk == v.warm.used_bytes

    async def second(v: Volume) -> None:
        assert 0 < v.warm.used_bytes <= CHUNK
        for key, expected in keys.items():
            assert await read_object(v, key, 0, len(expected)) == expected

    run_volume(settings, first)
    run_volume(settings, second)


def test_what_does_not_compress_is_not_kept(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        for n in range(8):
            await put_object(v, "default", b"f%d" % n, content(n, CHUNK))
            await v.checkpoint("default")
        assert v.evictor.evictions > 0
        assert v.warm.used_bytes == 0
        assert list(v.warm.root.rglob("*.blob")) == []

    run_volume(small_settings(tmp_path, hot_bytes=3 * CHUNK), body)


@pytest.mark.expects_warnings
def test_a_damaged_warm_copy_is_given_up_and_fetched(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        data = await filled(v, 8)
        for path in v.warm.root.rglob("*.blob"):
            bad = bytearray(path.read_bytes())
            bad[0] ^= 1
            path.write_bytes(bad)
        for key, expected in data.items():
            assert await read_object(v, key, 0, len(expected)) == expected
        assert v.hydrator.fetched_bytes > 0

    run_volume(small_settings(tmp_path, hot_bytes=3 * CHUNK), body)


def test_evicting_by_name_drops_the_warm_copy_too(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        data = await filled(v, 8)
        await v.evict(list(data))
        assert (v.warm.used_bytes, v.quota.usage.used_bytes) == (0, 0)
        tiers = [*v.warm.root.rglob("*"), *v.hot.root.rglob("[0-9]*.*")]
        assert [path for path in tiers if path.is_file()] == []

    run_volume(small_settings(tmp_path, hot_bytes=3 * CHUNK), body)


def _rows(v: Volume) -> dict[tuple[str, bytes], bytes]:
    """Every row but those of the log's own upload, which goes on by itself."""
    with v.catalog.view() as view:
        return {slot: row for slot, row in every_row(view).items() if b"manifest/" not in slot[1]}


def test_a_cold_scan_streams_and_leaves_no_trace(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        data = content(5, 5 * CHUNK + 1234)
        key = await put_object(v, "default", b"f", data)
        await v.checkpoint("default")
        await v.evict([key])
        before = _rows(v)
        got: list[bytes] = []

        async def sink(piece: bytes) -> None:
            got.append(piece)
            with v.catalog.view() as view:
                blobs = [row.key for _, row in view.scan(1, t.BLOBS)]
            assert all(v.cold.holds(blob) for blob in blobs)

        options = ColdScanOptions(priority=3, expected_span_bytes=64 * KIB)
        assert await cold_read(v, key, 100, len(data), sink, options) == len(data) - 100
        assert b"".join(got) == data[100:]
        assert len(got) > 5
        assert v.quota.usage.used_bytes == 0
        assert v.pages.used_bytes == 0
        assert _rows(v) == before
        with v.catalog.view() as view:
            assert not any(v.cold.holds(row.key) for _, row in view.scan(1, t.BLOBS))

    run_volume(small_settings(tmp_path, compression="none"), body)


def test_a_cold_scan_uses_what_is_here(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        data = content(6, 2 * CHUNK)
        key = await put_object(v, "default", b"f", data)
        got: list[bytes] = []

        async def sink(piece: bytes) -> None:
            got.append(piece)

        assert await cold_read(v, key, 0, len(data), sink) == len(data)
        assert b"".join(got) == data
        with v.catalog.view() as view:
            assert load_index(view, 1).needs_repair == []

    run_volume(small_settings(tmp_path), body)


def test_a_read_with_no_room_at_all_is_served_from_memory(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        data = content(7, CHUNK)
        keys = [await put_object(v, "default", b"a", data)]
        await v.checkpoint("default")
        await v.evict(keys)
        dirty = await put_object(v, "default", b"dirty", content(8, 2 * CHUNK))  # never published: nothing to evict
        assert await read_object(v, keys[0], 0, CHUNK) == data
        assert v.quota.usage.used_bytes <= v.settings.cache.hot_bytes
        assert v.pages.used_bytes > 0
        assert await read_object(v, dirty, 0, 10) == content(8, 2 * CHUNK)[:10]

    run_volume(small_settings(tmp_path, hot_bytes=2 * CHUNK), body)
