"""Files through their life: created, sealed, published, read, written again, evicted, truncated, unlinked."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.files import Files, Mode, stream_of
from aof2.engine.files.state import NodeFlags
from tests.engine.helpers import KIB, small_settings
from tests.files.helpers import FakeKernel, content, make, publish, row_of, run_files, scribble, top

BLOCK = 16 * KIB


def data_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def test_a_new_file_is_sealed_after_its_last_close(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(300 * KIB)
        ino = await make(files, b"a", data)
        assert row_of(files, ino).state == ObjectState.DIRTY
        assert await files.sealer.seal_now() == 1
        row = row_of(files, ino)
        assert (row.state, row.size, len(row.chunks)) == (ObjectState.SEALED, len(data), 2)
        assert files.known.get(ino) is None and not kernel.fds
        assert await content(files, ino) == data

    run_files(small_settings(tmp_path), body)


def test_a_resident_file_is_passed_through(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", b"hello")
        await publish(files)
        fh = await files.open(ino, os.O_RDONLY)
        assert kernel.modes[ino] == Mode.PASSTHROUGH
        await files.release(fh)

    run_files(small_settings(tmp_path), body)


def test_an_evicted_file_is_ranged_and_comes_back(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(300 * KIB)
        ino = await make(files, b"a", data)
        await publish(files)
        await files.volume.evict([(stream_of(ino), ino, 1)])
        fh = await files.open(ino, os.O_RDONLY)
        assert kernel.modes[ino] == Mode.RANGED and not kernel.present[ino]
        assert await files.handle(fh).read_bytes(5 * BLOCK + 7, 100) == data[5 * BLOCK + 7 :][:100]
        assert 5 in kernel.present[ino]
        await files.release(fh)
        assert await content(files, ino) == data
        await files.volume.hydrator.quiesce()
        fh = await files.open(ino, os.O_RDONLY)
        assert kernel.modes[ino] == Mode.PASSTHROUGH
        await files.release(fh)

    run_files(small_settings(tmp_path), body)


@pytest.mark.parametrize("cut", [False, True])
def test_a_clean_file_keeps_still_until_somebody_writes(tmp_path: Path, cut: bool) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino = await make(files, b"a", data_of(300 * KIB))
        await publish(files)
        await files.volume.evict([(stream_of(ino), ino, 1)])
        fh = await files.open(ino, os.O_RDONLY)
        assert kernel.modes[ino] == Mode.RANGED and kernel.flags[ino] & NodeFlags.STILL
        if cut:
            await files.truncate(ino, BLOCK)
        else:
            await files.release(await files.open(ino, os.O_RDWR))
        assert not kernel.flags[ino] & NodeFlags.STILL
        await files.release(fh)

    run_files(small_settings(tmp_path), body)


def test_bad_blocks_of_an_open_file_are_not_answered_for(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(300 * KIB)
        ino = await make(files, b"a", data)
        await publish(files)
        key = (stream_of(ino), ino, 1)
        await files.volume.evict([key])
        fh = await files.open(ino, os.O_RDONLY)
        await files.handle(fh).read_bytes(0, len(data))
        await files.volume.hydrator.quiesce()
        for block in (4, 5, 7):
            kernel.present[ino].add(block)
        scribble(files, ino, b"rot", 5 * BLOCK)
        async with files.volume.opened_object(key) as handle:
            await files.volume.hydrator.give_up(handle, [5, 4, 7])
        assert not kernel.present[ino] & {4, 5, 7} and kernel.present[ino] >= {3, 6}
        assert await files.handle(fh).read_bytes(5 * BLOCK, 100) == data[5 * BLOCK :][:100]
        assert 5 in kernel.present[ino]
        await files.release(fh)

    run_files(small_settings(tmp_path), body)


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_backing_file_without_a_byte_does_not_stay(tmp_path: Path, looked_at: bool) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(300 * KIB)
        ino = await make(files, b"a", data)
        await publish(files)
        await files.volume.evict([(stream_of(ino), ino, 1)])
        fh = await files.open(ino, os.O_RDONLY)
        if looked_at:
            assert await files.handle(fh).read_bytes(5 * BLOCK, 100) == data[5 * BLOCK :][:100]
        await files.release(fh)
        await files.volume.hydrator.quiesce()
        path = files.volume.hot.path(files.volume.tenant_names()[stream_of(ino)], ino, 1)
        assert path.exists()
        files.volume.handles.close_all()
        assert path.exists() == looked_at
        assert await content(files, ino) == data

    run_files(small_settings(tmp_path), body)


def test_writing_a_published_file_on_makes_a_generation(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(300 * KIB)
        ino = await make(files, b"a", data)
        await publish(files)
        fh = await files.open(ino, os.O_RDWR)
        row = row_of(files, ino)
        assert (row.generation, row.state) == (2, ObjectState.DIRTY)
        scribble(files, ino, b"new", 10)
        await files.release(fh)
        await publish(files)
        row = row_of(files, ino)
        assert (row.generation, row.state) == (2, ObjectState.PUBLISHED)
        assert await content(files, ino) == data[:10] + b"new" + data[13:]

    run_files(small_settings(tmp_path), body)


@pytest.mark.parametrize("offset", [0, 10, BLOCK - 2, 5 * BLOCK, 18 * BLOCK, 300 * KIB, 400 * KIB])
@pytest.mark.parametrize("length", [3, BLOCK, BLOCK + 1])
def test_a_cold_file_is_written_where_it_is(tmp_path: Path, offset: int, length: int) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(300 * KIB)
        ino = await make(files, b"a", data)
        await publish(files)
        await files.volume.evict([(stream_of(ino), ino, 1)])
        fh = await files.open(ino, os.O_RDWR)
        assert kernel.modes[ino] == Mode.RANGED
        new = data_of(length, 2)
        assert await files.handle(fh).write(offset, new) == length
        expected = bytearray(data.ljust(offset, b"\0"))
        expected[offset : offset + length] = new
        got = b""
        while part := await files.handle(fh).read_bytes(len(got), 50_000):
            got += part
        assert got == bytes(expected)
        await files.release(fh)
        await publish(files)
        assert row_of(files, ino).generation == 2
        assert await content(files, ino) == bytes(expected)

    run_files(small_settings(tmp_path), body)


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("size", [0, 1, BLOCK, 5 * BLOCK + 3, 300 * KIB, 310 * KIB])
def test_truncate(tmp_path: Path, size: int, cold: bool) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(300 * KIB)
        ino = await make(files, b"a", data)
        await publish(files)
        if cold:
            await files.volume.evict([(stream_of(ino), ino, 1)])
        await files.truncate(ino, size)
        assert await content(files, ino) == data[:size].ljust(size, b"\0")
        await publish(files)
        assert row_of(files, ino).size == size
        assert await content(files, ino) == data[:size].ljust(size, b"\0")

    run_files(small_settings(tmp_path), body)


def test_unlinked_while_open(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        row, fh = await files.create(top(files.volume), b"a", os.O_RDWR, mode=0o644, uid=0, gid=0)
        work = partial(namespace.unlink, parent=top(files.volume), name=b"a", is_open=files.known.is_open)
        gone = await result_of(files.volume.writer.submit(stream_of(row.ino), work))
        files.removal.removed(gone)
        scribble(files, row.ino, b"still there")
        file = files.known.get(row.ino)
        assert file is not None
        path = file.path
        await files.release(fh)
        await files.volume.evictor.doomed.delete_all()
        assert not path.exists() and files.known.get(row.ino) is None
        assert files.volume.quota.usage.used_bytes == 0

    run_files(small_settings(tmp_path), body)


def test_dirty_files_survive_a_restart(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    data = data_of(100 * KIB)
    inos: list[int] = []

    async def first(files: Files, kernel: FakeKernel) -> None:
        inos.append(await make(files, b"a", data))

    async def second(files: Files, kernel: FakeKernel) -> None:
        assert await content(files, inos[0]) == data
        await publish(files)
        assert row_of(files, inos[0]).state == ObjectState.PUBLISHED

    run_files(settings, first)
    run_files(settings, second)


def test_accounting_adds_up(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        inos = [await make(files, b"%d" % i, data_of(50 * KIB + i)) for i in range(4)]
        await publish(files)
        for ino in inos[:2]:
            fh = await files.open(ino, os.O_RDWR)
            scribble(files, ino, b"x" * 100_000, 0)
            await files.release(fh)
        await files.truncate(inos[2], 0)
        await publish(files)
        await files.volume.evict([(stream_of(inos[3]), inos[3], 1)])
        on_disk = sum(p.stat().st_blocks * 512 for p in (tmp_path / "state" / "hot_cache" / "default").iterdir())
        assert files.volume.quota.usage.used_bytes == on_disk

    run_files(small_settings(tmp_path), body)


def test_a_file_opened_to_write_and_left_as_it_was_keeps_its_generation(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(300 * KIB)
        ino = await make(files, b"a", data)
        await publish(files)
        before = files.volume.quota.usage.used_bytes
        for mode in (os.O_RDWR, os.O_WRONLY):
            fh = await files.open(ino, mode)
            assert row_of(files, ino).generation == 2
            await files.release(fh)
            await files.sealer.seal_now()
            row = row_of(files, ino)
            assert (row.generation, row.state) == (1, ObjectState.PUBLISHED)
            assert files.known.get(ino) is None
            assert files.volume.quota.usage.used_bytes == before
        assert await content(files, ino) == data
        assert await files.volume.evict([(stream_of(ino), ino, 1)]) == (before, [])
        assert await content(files, ino) == data

    run_files(small_settings(tmp_path), body)
