"""Reading cold files: a few bytes here and there, and blocks that land while others are still on their way."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.errors import CorruptError
from aof2.engine.local.handles import Key
from aof2.engine.settings import Settings
from aof2.engine.tiering.hashing import PIECE_BYTES
from aof2.engine.tiering.hydrate import GLANCES_A_BLOCK
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, MIB, put_object, read_object, run_volume, small_settings

BLOCK = 256 * KIB
CHUNK = MIB
DATA = random.Random(4).randbytes(3 * CHUNK + 1000)


def settings_of(tmp_path: Path, **changes: object) -> Settings:
    wanted = {"compression": "none", "chunk_bytes": CHUNK, "block_bytes": BLOCK, **changes}
    return small_settings(tmp_path, **wanted)  # type: ignore[arg-type]


async def cold_object(v: Volume) -> Key:
    key = await put_object(v, "default", b"a", DATA)
    await v.checkpoint("default")
    await v.evict([key])
    return key


def blob_of_chunk(v: Volume, root: Path, key: Key, index: int) -> Path:
    with v.catalog.view() as view:
        row = view.get(key[0], t.OBJECTS, key[1:])
        assert row is not None
        chunk = view.get(key[0], t.CHUNKS, row.chunks[index])
        assert chunk is not None
        blob = view.get(key[0], t.BLOBS, chunk.sha256)
        assert blob is not None
    return next(path for path in (root / "remote").rglob("*") if str(path).endswith(blob.key))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_a_glance_fetches_its_pieces_alone(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await cold_object(v)
        async with v.opened_object(key) as handle:
            before = v.remote.stats().bytes_received
            at = 2 * BLOCK + PIECE_BYTES - 10
            assert await v.hydrator.glance(handle, at, 100) == DATA[at : at + 100]
            assert v.remote.stats().bytes_received - before == 2 * PIECE_BYTES
            for _ in range(GLANCES_A_BLOCK - 1):
                handle.ahead.next_offset = handle.ahead.frontier = 0  # elsewhere in between
                assert await v.hydrator.glance(handle, at, 100) is not None
            handle.ahead.next_offset = handle.ahead.frontier = 0
            assert handle.resident_bytes == 0
            assert await v.hydrator.glance(handle, at + 5000, 100) is None  # again the same block: all of it now
            assert await read_object(v, key, at + 5000, 100) == DATA[at + 5000 : at + 5100]
            assert handle.resident_bytes == BLOCK
            assert await v.hydrator.glance(handle, at, 100) is None  # it is here

    run_volume(settings_of(tmp_path), body, parts=("jobs",))


def test_glances_at_the_edges(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await cold_object(v)
        async with v.opened_object(key) as handle:
            glance = v.hydrator.glance
            assert await glance(handle, 0, 100) is None  # the start of a file is where reading it begins
            assert await glance(handle, CHUNK - 10 + CHUNK, 20) is None  # two chunks
            assert await glance(handle, len(DATA) - 7, 100) is None  # its last chunk is too short to have pieces
            assert await glance(handle, len(DATA), 10) is None
            assert await glance(handle, 2 * CHUNK, MIB) is None
            assert await glance(handle, 3 * CHUNK - 5, 5) == DATA[3 * CHUNK - 5 : 3 * CHUNK]

    run_volume(settings_of(tmp_path), body, parts=("jobs",))


def test_reading_on_is_no_glance(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await cold_object(v)
        async with v.opened_object(key) as handle:
            at = 2 * CHUNK + 1000
            assert await v.hydrator.glance(handle, at, 4096) == DATA[at : at + 4096]
            assert await v.hydrator.glance(handle, at + 4096, 4096) is None

    run_volume(settings_of(tmp_path), body, parts=("jobs",))


def test_a_damaged_piece_is_not_served(tmp_path: Path) -> None:
    async def body(v: Volume) -> None:
        key = await cold_object(v)
        at = 2 * CHUNK + BLOCK + 77
        flip(blob_of_chunk(v, tmp_path, key, 2), BLOCK + 77)
        async with v.opened_object(key) as handle:
            assert await v.hydrator.glance(handle, at, 10) is None
            with pytest.raises(CorruptError):
                await read_object(v, key, at, 10)

    run_volume(settings_of(tmp_path), body, parts=("jobs",))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_pieces_belong_to_raw_blobs_and_go_with_their_chunk(tmp_path: Path, compression: str) -> None:
    async def body(v: Volume) -> None:
        key = await put_object(v, "default", b"a", b"abcdefgh" * (CHUNK // 8))
        await v.checkpoint("default")
        await v.evict([key])
        async with v.opened_object(key) as handle:
            seen = await v.hydrator.glance(handle, 3 * BLOCK, 16)
        assert seen == (b"abcdefgh" * 2 if compression == "none" else None)
        with v.catalog.view() as view:
            chunks = {chunk_id for chunk_id, _ in view.scan(key[0], t.CHUNKS)}
            assert {chunk_id for chunk_id, _ in view.scan(key[0], t.PIECES)} == chunks

    run_volume(settings_of(tmp_path, compression=compression), body, parts=("jobs",))


def test_a_damaged_block_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    """Blocks of a request land one by one: those before the damage are here, and room is taken for just them."""

    async def body(v: Volume) -> None:
        key = await cold_object(v)
        flip(blob_of_chunk(v, tmp_path, key, 1), 2 * BLOCK + 5)
        used = v.quota.usage.used_bytes
        async with v.opened_object(key) as handle:
            with pytest.raises(CorruptError):
                await v.hydrator.obtain(handle, [4, 5, 6, 7])
            assert [handle.is_resident(b) for b in range(4, 8)] == [True, True, False, False]
            assert v.quota.usage.used_bytes - used == 2 * BLOCK
            assert v.quota.usage.reserved_bytes == 0
            assert os.stat(handle.path).st_blocks * 512 == 2 * BLOCK
            assert await read_object(v, key, CHUNK, 2 * BLOCK) == DATA[CHUNK : CHUNK + 2 * BLOCK]

    run_volume(settings_of(tmp_path), body, parts=("jobs",))


def test_a_reader_gets_its_block_while_the_rest_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(v: Volume) -> None:
        key = await cold_object(v)
        go_on = trio.Event()
        arrived: list[int] = []
        receive = v.hydrator.fetcher.receive

        def slow(*args: object) -> int:
            landed = args[-1]

            def then_wait(block: int, count: int) -> None:
                landed(block, count)  # type: ignore[operator]
                if block == 0:
                    trio.from_thread.run(go_on.wait)

            return receive(*args[:-1], then_wait)  # type: ignore[arg-type]

        monkeypatch.setattr(v.hydrator.fetcher, "receive", slow)
        async with v.opened_object(key) as handle, trio.open_nursery() as nursery:
            nursery.start_soon(v.hydrator.fill, handle)
            while not arrived:
                await trio.sleep(0.001)
                if v.hydrator._flights.awaits(key, 0) or handle.is_resident(0):
                    assert await read_object(v, key, 5, 100) == DATA[5:105]
                    arrived.append(0)
            assert not handle.is_resident(1)
            go_on.set()
        assert await read_object(v, key, 0, len(DATA)) == DATA

    run_volume(settings_of(tmp_path), body, parts=("jobs",))


def test_nothing_unproven_is_put_into_a_file_that_is_written_to(tmp_path: Path) -> None:
    """After a crash its extents tell what is in it: a block with a wrong byte must not get there even for a moment."""

    async def body(v: Volume) -> None:
        key = await cold_object(v)
        flip(blob_of_chunk(v, tmp_path, key, 1), 5)
        handle = await v.hydrator.open(key, "default")
        v.handles.detach(key)
        v.hydrator.fetcher.receive = None  # type: ignore[method-assign, assignment]
        with pytest.raises(CorruptError):
            await v.hydrator.obtain(handle, [4, 5])
        assert os.stat(handle.path).st_blocks == 0
        pages, _ = await v.hydrator.obtain(handle, [0, 1])
        assert pages == {}
        assert os.pread(handle.fd, 2 * BLOCK, 0) == DATA[: 2 * BLOCK]
        handle.close_file()

    run_volume(settings_of(tmp_path), body, parts=("jobs",))
