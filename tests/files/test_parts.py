"""Files larger than the cache: written, read back, written over, cut, sealed, unlinked."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.files import Files, extents, parts, stream_of
from aof2.engine.kinds.kernel import Grown
from aof2.engine.objects import HOT_BYTES
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Severity
from aof2.engine.verify.run import verify
from tests.engine.helpers import MIB
from tests.files.helpers import FakeKernel, content, on_disk, publish, read, row_of, run_files, scribble, top, write
from tests.files.test_room import BLOCK, CHUNK, LIMIT, accounts_add_up, create, data_of, settings_of, watched, write_all

SIZE = 5 * LIMIT + 3 * BLOCK + 7


def verified(settings: Settings) -> None:
    """The checker finds nothing wrong."""
    report = verify(settings, deep_remote=True)
    assert [f.message for f in report.findings if f.severity != Severity.NOTE] == []


async def read_all(files: Files, kernel: FakeKernel, fh: int, size: int, step: int = 100_000) -> bytes:
    out = bytearray()
    while len(out) < size:
        part = await read(files, kernel, fh, len(out), min(step, size - len(out)))
        assert part
        out += part
    return bytes(out)


async def evict(files: Files, ino: int) -> None:
    row = row_of(files, ino)
    _, skipped = await files.volume.evict([(stream_of(ino), ino, row.generation)])
    assert not skipped


def counted(files: Files) -> int:
    """What the rows count; holes that a writer left are among it."""
    with files.volume.catalog.view() as view:
        return view.get(stream_of(top(files.volume)), t.COUNTERS, HOT_BYTES) or 0


def parts_of(files: Files, ino: int) -> int:
    return sum(1 for chunk_id in row_of(files, ino).chunks if chunk_id)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_file_larger_than_the_cache(tmp_path: Path, compression: str) -> None:
    settings = settings_of(tmp_path, "budget", timeout_s=10.0, compression=compression)

    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(SIZE // 2) + (b"again and again " * SIZE)[: SIZE - SIZE // 2]
        ino, fh = await create(files, b"a")
        await watched(files, LIMIT + BLOCK, partial(write_all, files, kernel, fh, data))
        assert kernel.answered > SIZE / 40_000 / 2
        assert parts_of(files, ino) >= (SIZE - LIMIT) // CHUNK

        async def look() -> None:
            assert await read_all(files, kernel, fh, SIZE) == data

        await watched(files, LIMIT + BLOCK, look)
        await files.release(fh)
        await publish(files)
        row = row_of(files, ino)
        assert (row.state, row.size) == (ObjectState.PUBLISHED, SIZE)
        assert row.sha256 == hashlib.sha256(data).digest()
        accounts_add_up(files)
        await evict(files, ino)
        assert await content(files, ino) == data
        await files.volume.hydrator.quiesce()
        accounts_add_up(files)

    run_files(settings, body)
    verified(settings)


def test_verify_is_clean_while_it_is_written(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "budget", timeout_s=10.0)
    inos: list[int] = []

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        inos.append(ino)
        await write_all(files, kernel, fh, data_of(3 * LIMIT))

    async def after(files: Files, kernel: FakeKernel) -> None:
        """The process ended with the file open: it goes on."""
        fh = await files.open(inos[0], os.O_RDWR)
        assert await read_all(files, kernel, fh, 3 * LIMIT) == data_of(3 * LIMIT)
        await write(files, kernel, fh, 3 * LIMIT, b"and more")
        await files.release(fh)
        await publish(files)
        row = row_of(files, inos[0])
        assert row.sha256 == hashlib.sha256(data_of(3 * LIMIT) + b"and more").digest()
        await evict(files, inos[0])
        assert await content(files, inos[0]) == data_of(3 * LIMIT) + b"and more"
        await files.volume.hydrator.quiesce()
        accounts_add_up(files)

    run_files(settings, body)
    verified(settings)
    run_files(settings, after)
    verified(settings)


@pytest.mark.parametrize("seed", range(6))
def test_random_writes_reads_and_cuts(tmp_path: Path, seed: int) -> None:
    """Against bytes in memory; several times the cache, with a restart now and then."""
    settings = settings_of(tmp_path, "budget", hot_bytes=2 * MIB, timeout_s=10.0)
    rng = random.Random(seed)
    model = bytearray()
    inos: list[int] = []

    async def body(files: Files, kernel: FakeKernel) -> None:
        if inos:
            fh = await files.open(inos[0], os.O_RDWR)
        else:
            ino, fh = await create(files, b"a")
            inos.append(ino)
        for _ in range(120):
            match rng.choice(["append"] * 6 + ["over"] * 3 + ["read"] * 3 + ["cut", "extend", "fsync"]):
                case "append":
                    data = rng.randbytes(rng.choice([100, BLOCK, 3 * BLOCK, CHUNK]))
                    await write(files, kernel, fh, len(model), data)
                    model.extend(data)
                case "over" if model:
                    at = rng.randrange(len(model))
                    data = rng.randbytes(rng.choice([1, 1000, BLOCK, 2 * BLOCK + 5]))
                    await write(files, kernel, fh, at, data)
                    model[at : at + len(data)] = data
                case "read" if model:
                    at = rng.randrange(len(model))
                    got = await read(files, kernel, fh, at, 2 * BLOCK)
                    assert got == model[at : at + 2 * BLOCK]
                case "cut" if model:
                    size = rng.randrange(len(model) // 2, len(model))
                    await files.truncate(inos[0], size)
                    del model[size:]
                case "extend":
                    size = len(model) + rng.choice([1, BLOCK, CHUNK + 3])
                    await files.truncate(inos[0], size)
                    model.extend(bytes(size - len(model)))
                case "fsync":
                    await files.durability.fsync(inos[0])
            assert on_disk(files.volume) <= 2 * MIB + 2 * BLOCK
        if rng.random() < 0.5:
            return  # ends with the file open
        await files.release(fh)
        await publish(files)
        row = row_of(files, inos[0])
        assert (row.size, row.sha256) == (len(model), hashlib.sha256(model).digest())
        assert await content(files, inos[0]) == model
        await files.volume.hydrator.quiesce()
        with trio.fail_after(5):  # what came in last may be being recorded
            while files.volume.quota.usage.used_bytes != counted(files):
                await trio.sleep(0.01)

    async def last(files: Files, kernel: FakeKernel) -> None:
        await publish(files)
        assert await content(files, inos[0]) == model

    for _ in range(4):
        run_files(settings, body)
        verified(settings)
    run_files(settings, last)
    verified(settings)


def test_sealed_with_parts_and_opened_again(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "budget", timeout_s=10.0)

    async def body(files: Files, kernel: FakeKernel) -> None:
        data = bytearray(data_of(3 * LIMIT))
        ino, fh = await create(files, b"a")
        await write_all(files, kernel, fh, bytes(data))
        await files.release(fh)
        await files.sealer.seal_now()
        assert row_of(files, ino).state == ObjectState.SEALED
        for n in range(3):
            fh = await files.open(ino, os.O_RDWR)
            at = n * LIMIT + 1000
            await write(files, kernel, fh, at, b"over")
            data[at : at + 4] = b"over"
            assert await read_all(files, kernel, fh, len(data)) == data
            await files.release(fh)
            if n:
                await files.sealer.seal_now()
        await publish(files)
        assert row_of(files, ino).sha256 == hashlib.sha256(data).digest()
        await evict(files, ino)
        # A cold file that does not fit is written where it is.
        fh = await files.open(ino, os.O_RDWR)
        await write(files, kernel, fh, 2 * LIMIT + 5, b"cold")
        data[2 * LIMIT + 5 : 2 * LIMIT + 9] = b"cold"
        await files.release(fh)
        await publish(files)
        row = row_of(files, ino)
        assert (row.generation, row.sha256) == (2, hashlib.sha256(data).digest())
        await evict(files, ino)
        assert await content(files, ino) == data
        await files.volume.hydrator.quiesce()
        accounts_add_up(files)

    run_files(settings, body)
    verified(settings)


def test_a_file_is_opened_while_a_chunk_of_it_is_taken(tmp_path: Path) -> None:
    """Nobody had it open when it was read: the channel is not to answer for it all the same."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(4 * CHUNK)
        ino, fh = await create(files, b"a")
        await write_all(files, kernel, fh, data)
        file = files.known.get(ino)
        assert file is not None
        assert await files.parts.make_room(CHUNK) == CHUNK
        await files.release(fh)
        read_it = await files.parts._read(file, 2)
        assert read_it is not None
        fh = await files.open(ino, os.O_RDONLY)
        assert kernel.read(ino, CHUNK, 100) == data[CHUNK : CHUNK + 100]
        assert kernel.read(ino, 2 * CHUNK, 100) is None
        assert await files.parts._upload(read_it)
        assert await read_all(files, kernel, fh, len(data)) == data
        await files.release(fh)
        await publish(files)
        assert await content(files, ino) == data

    run_files(settings_of(tmp_path, "budget", timeout_s=10.0), body)


class Gate(FakeKernel):
    """A kernel that takes its time to let go of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.opened = trio.Event(), trio.Event()

    async def clear(self, nodeid: int, first: int, count: int) -> None:
        self.asked.set()
        await self.opened.wait()
        await super().clear(nodeid, first, count)


def test_a_seal_waits_for_a_chunk_that_is_being_taken(tmp_path: Path) -> None:
    """Closed while the first chunk of it is on its way out: the seal speaks of the file without it, at once."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        assert isinstance(kernel, Gate)
        data = data_of(4 * CHUNK)
        ino, fh = await create(files, b"a")
        await write_all(files, kernel, fh, data)
        lane = files.sealer._lanes[False]
        async with trio.open_nursery() as nursery, trio.open_nursery() as sealing:
            nursery.start_soon(files.parts.make_room, CHUNK)
            await kernel.asked.wait()
            await files.release(fh)
            async with lane, on_behalf_of_another(lane):  # what is to be hashed waits
                sealing.start_soon(files.sealer.seal_now)
                await wait_all_tasks_blocked()
                kernel.opened.set()
                while not files.parts.taken_bytes:
                    await trio.sleep(0.01)
        assert files.parts.taken_bytes == CHUNK
        assert row_of(files, ino).state == ObjectState.SEALED
        await publish(files)
        assert await content(files, ino) == data

    settings = settings_of(tmp_path, "budget", timeout_s=10.0)
    run_files(settings, body, kernel=Gate())
    verified(settings)


@contextlib.asynccontextmanager
async def on_behalf_of_another(limiter: trio.CapacityLimiter) -> AsyncIterator[None]:
    """A task holds one token of a limiter for itself: this one is for another."""
    holder = object()
    await limiter.acquire_on_behalf_of(holder)
    try:
        yield
    finally:
        limiter.release_on_behalf_of(holder)


def test_no_further_chunk_of_a_closed_file_is_taken(tmp_path: Path) -> None:
    """Planned while it was open. Closed, it is the sealer's, and makes room as a whole."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        await write_all(files, kernel, fh, data_of(6 * CHUNK))
        uploads = files.parts._uploads
        for _ in range(parts.UPLOADS):
            await uploads.acquire()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(files.parts.make_room, 4 * CHUNK)
            while not uploads.statistics().tasks_waiting:
                await trio.sleep(0.01)
            await files.release(fh)
            for _ in range(parts.UPLOADS):
                uploads.release()
        assert not parts_of(files, ino)
        await files.sealer.seal_now()
        assert row_of(files, ino).state == ObjectState.SEALED

    run_files(settings_of(tmp_path, "budget", timeout_s=10.0), body)


def test_taking_parts_is_no_write(tmp_path: Path) -> None:
    """What a program says of the times after its last write stands, whatever is fetched and punched for the seal."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        await write_all(files, kernel, fh, data_of(2 * LIMIT))
        await write(files, kernel, fh, 10, b"over")
        await files.release(fh)
        file = files.known.get(ino)
        assert file is not None
        os.utime(file.path, ns=(10**18, 2 * 10**18))
        await publish(files)
        with files.volume.catalog.view() as view:
            row = view.get(stream_of(ino), t.INODES, ino)
        assert row is not None and row.mtime_ns == 2 * 10**18

    run_files(settings_of(tmp_path, "budget", timeout_s=10.0), body)


@pytest.mark.parametrize("when", ["open", "closed", "sealed", "truncated"])
def test_unlink_releases_the_parts(tmp_path: Path, when: str) -> None:
    settings = settings_of(tmp_path, "budget", timeout_s=10.0)

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        await write_all(files, kernel, fh, data_of(2 * LIMIT))
        assert parts_of(files, ino)
        if when == "truncated":
            await files.truncate(ino, 0)
            assert not parts_of(files, ino)
        if when in ("closed", "sealed"):
            await files.release(fh)
        if when == "sealed":
            await files.sealer.seal_now()
        work = partial(namespace.unlink, parent=top(files.volume), name=b"a", is_open=files.known.is_open)
        files.removal.removed(await result_of(files.volume.writer.submit(stream_of(ino), work)))
        if when not in ("closed", "sealed"):
            await files.release(fh)
        await files.volume.evictor.doomed.delete_all()
        assert on_disk(files.volume) == 0
        assert files.volume.quota.usage.used_bytes == 0
        with files.volume.catalog.view() as view:
            assert not [c for c, _ in view.scan(stream_of(ino), t.CHUNKS)]
            assert all(not blob.refs for _, blob in view.scan(stream_of(ino), t.BLOBS))

    run_files(settings, body)
    verified(settings)


@pytest.mark.expects_warnings
def test_a_large_file_outlives_the_remote(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "budget")
    remote = tmp_path / "remote"

    async def body(files: Files, kernel: FakeKernel) -> None:
        data = data_of(3 * LIMIT)
        ino, fh = await create(files, b"a")
        await write_all(files, kernel, fh, data[: 2 * LIMIT])
        await files.volume.replicator.drain()
        remote.rename(tmp_path / "away")
        at = 2 * LIMIT
        began_s = trio.current_time()
        with pytest.raises(OSError):
            while True:
                began_s = trio.current_time()
                await write(files, kernel, fh, at, data[at : at + BLOCK])
                at += BLOCK
        assert trio.current_time() - began_s < 5.0
        assert on_disk(files.volume) <= LIMIT + BLOCK
        (tmp_path / "away").rename(remote)
        while at < len(data):
            await write(files, kernel, fh, at, data[at : at + BLOCK])
            at += BLOCK
        await files.release(fh)
        await publish(files)
        await evict(files, ino)
        assert await content(files, ino) == data
        await files.volume.hydrator.quiesce()
        accounts_add_up(files)

    run_files(settings, body)
    verified(settings)


def test_a_chunk_that_is_written_while_it_is_taken_stays(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "budget", timeout_s=10.0)

    async def body(files: Files, kernel: FakeKernel) -> None:
        data = bytearray(data_of(4 * CHUNK))
        ino, fh = await create(files, b"a")
        await write_all(files, kernel, fh, bytes(data))
        file = files.known.get(ino)
        assert file is not None
        read_it = await files.parts._read(file, 1)
        assert read_it is not None
        assert not kernel.write(ino, CHUNK, b"x")
        await write(files, kernel, fh, CHUNK + 5, b"late")
        data[CHUNK + 5 : CHUNK + 9] = b"late"
        assert not await files.parts._upload(read_it)
        assert not parts_of(files, ino)
        assert kernel.write(ino, CHUNK, bytes(data[CHUNK : CHUNK + 1]))
        assert await files.parts.make_room(CHUNK) == CHUNK
        assert parts_of(files, ino) == 1
        assert await read_all(files, kernel, fh, len(data)) == data
        await files.release(fh)
        await publish(files)
        assert await content(files, ino) == data
        accounts_add_up(files)

    run_files(settings, body)
    verified(settings)


class Braked(FakeKernel):
    """A kernel that holds passthrough writers off what is claimed; the test writes only where it may."""

    def __init__(self) -> None:
        super().__init__()
        self.claimed: set[int] = set()

    async def claim(self, nodeid: int, first: int, count: int) -> bool:
        await trio.lowlevel.checkpoint()
        self.claimed |= set(range(first, first + count))
        return True

    def unclaim(self, nodeid: int, first: int, count: int) -> None:
        self.claimed -= set(range(first, min(first + count, 1 << 16)))

    def watch(self, nodeid: int, *, append: bool) -> None: ...

    def expect(self, nodeid: int, more_bytes: int) -> None: ...

    def room(self, stream_id: int, more_bytes: int) -> None: ...

    async def grown(self, stream_id: int, *, take: bool = False) -> Grown:
        await trio.lowlevel.checkpoint()
        return Grown(0, 0, ())


@pytest.mark.parametrize("reported", [True, False])
def test_a_chunk_that_is_taken_before_it_is_finished(tmp_path: Path, reported: bool) -> None:
    """It goes up as it is, comes back to its writer block by block, and goes up again. What is behind its end is the
    file's own, even where a write came that no report told of."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        assert isinstance(kernel, Braked)
        files.room.brake.on = True
        data, cut = data_of(2 * CHUNK), 2 * BLOCK + 5000
        row, fh = await files.create(top(files.volume), b"a", os.O_WRONLY, mode=0o644, uid=0, gid=0)
        file = files.known.get(row.ino)
        assert file is not None
        scribble(files, row.ino, data[:cut])
        files.charges.charge(file)
        assert await files.parts.make_room(1) == cut
        assert file.absent_mask(0, CHUNK // BLOCK, BLOCK) == 0b111
        if reported:
            await files.make_present(row.ino, cut, 100)
            assert 2 not in kernel.claimed and 1 in kernel.claimed
        scribble(files, row.ino, data[cut : CHUNK + 10], cut)
        assert await files.parts.make_room(1) == CHUNK
        kernel.claimed.clear()
        scribble(files, row.ino, data[CHUNK + 10 :], CHUNK + 10)
        await files.release(fh)
        await publish(files)
        assert row_of(files, row.ino).sha256 == hashlib.sha256(data).digest()
        await evict(files, row.ino)
        assert await content(files, row.ino) == data

    settings = settings_of(tmp_path, "passthrough", timeout_s=10.0)
    run_files(settings, body, kernel=Braked())
    verified(settings)


def test_a_chunk_is_not_the_writers_again_while_it_is_being_taken(tmp_path: Path) -> None:
    """It is claimed anew while the blocks of a held write are on their way back: that write waits until it is taken.
    What it wrote after the chunk was read would go with the punch."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        assert isinstance(kernel, Braked)
        files.room.brake.on = True
        data, cut = data_of(CHUNK), 2 * BLOCK + 5000
        row, fh = await files.create(top(files.volume), b"a", os.O_WRONLY, mode=0o644, uid=0, gid=0)
        file = files.known.get(row.ino)
        assert file is not None
        scribble(files, row.ino, data[:cut])
        files.charges.charge(file)
        assert await files.parts.make_room(1) == cut
        asked, go_on, fetch = trio.Event(), trio.Event(), files.content.fetch

        async def slow_fetch(*args: Any) -> dict[int, bytes]:
            pages = await fetch(*args)
            asked.set()
            await go_on.wait()
            return pages

        async def held_write() -> None:
            await files.make_present(row.ino, cut, 100)
            assert not file.clearing and 2 not in kernel.claimed
            scribble(files, row.ino, data[cut:], cut)

        files.content.fetch = slow_fetch  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(held_write)
            await asked.wait()
            nursery.start_soon(files.parts.make_room, 1)
            while not file.clearing:
                await trio.sleep(0.001)
            await wait_all_tasks_blocked()
            go_on.set()
        await files.release(fh)
        await publish(files)
        await evict(files, row.ino)
        assert await content(files, row.ino) == data

    settings = settings_of(tmp_path, "passthrough", timeout_s=10.0)
    run_files(settings, body, kernel=Braked())


def test_a_stopped_file_keeps_no_other_from_being_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the channel stopped is immutable: the next file's chunk goes instead."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        files.room.brake.on = True
        paths = []
        for name, size in ((b"stopped", CHUNK + 10), (b"other", CHUNK + 5)):
            row, _ = await files.create(top(files.volume), name, os.O_WRONLY, mode=0o644, uid=0, gid=0)
            scribble(files, row.ino, data_of(size))
            file = files.known.get(row.ino)
            assert file is not None
            files.charges.charge(file)
            paths.append(file.path)
        wait = extents.wait_for_direct_writes

        def refused(path: Path, offset: int) -> None:
            if path == paths[0]:
                raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
            wait(path, offset)

        monkeypatch.setattr(extents, "wait_for_direct_writes", refused)
        assert await files.parts.make_room(1) == CHUNK

    run_files(settings_of(tmp_path, "passthrough", timeout_s=10.0), body, kernel=Braked())
