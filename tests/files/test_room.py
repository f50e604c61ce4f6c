"""hot_bytes holds against writers: budgets, waiting for uploads, ENOSPC, writers that are stopped."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine import namespace
from aof2.engine.aio import result_of
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.files import Files, Mode, stream_of
from aof2.engine.files.extents import data_bytes
from aof2.engine.files.recover import set_immutable
from aof2.engine.files.watch import WATCH_S
from aof2.engine.kinds.kernel import Grown, Short
from aof2.engine.settings import Settings
from aof2.engine.settings.model import FilesTenant
from aof2.engine.volume import Volume
from tests.engine.helpers import KIB, MIB, small_settings
from tests.files.helpers import FakeKernel, content, make, on_disk, publish, row_of, run_files, scribble, top, write

BLOCK = 16 * KIB
CHUNK = 256 * KIB
LIMIT = 4 * MIB


def data_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def settings_of(
    root: Path,
    mode: str = "auto",
    *,
    hot_bytes: int = LIMIT,
    quota: int | None = None,
    timeout_s: float = 1.0,
    compression: str = "none",
) -> Settings:
    settings = small_settings(root, hot_bytes=hot_bytes, timeout_s=timeout_s)
    tenant = FilesTenant(compression=compression, write_mode=mode, quota_bytes=quota)
    return msgspec.structs.replace(settings, tenants={"default": tenant})


async def create(files: Files, name: bytes) -> tuple[int, int]:
    row, fh = await files.create(top(files.volume), name, os.O_RDWR, mode=0o644, uid=0, gid=0)
    return row.ino, fh


async def write_all(files: Files, kernel: FakeKernel, fh: int, data: bytes, step: int = 40_000) -> None:
    for at in range(0, len(data), step):
        await write(files, kernel, fh, at, data[at : at + step])
        await trio.lowlevel.checkpoint()


class Watching:
    """Looks at what hot_cache takes while something runs."""

    def __init__(self, files: Files, bound: int) -> None:
        self._files, self._bound = files, bound
        self.most = 0

    async def run(self) -> None:
        while True:
            self.most = max(self.most, on_disk(self._files.volume))
            assert self.most <= self._bound
            await trio.sleep(0.005)


async def watched(files: Files, bound: int, body: Callable[[], object]) -> int:
    watching = Watching(files, bound)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watching.run)
        await body()  # type: ignore[misc]
        nursery.cancel_scope.cancel()
    return watching.most


def accounts_add_up(files: Files) -> None:
    """Nothing is promised to anybody, and what counts is what is there."""
    assert not any(file.channel.budget or file.pending_bytes for file in files.known.all())
    assert files.volume.quota.usage.reserved_bytes == 0
    used = files.volume.quota.usage.used_bytes
    # A file in many pieces takes a block for its map, too, which is counted only while it is written.
    assert used == on_disk(files.volume) or used == data_on_disk(files.volume)


def data_on_disk(volume: Volume) -> int:
    return sum(data_bytes(path) for path in volume.hot.root.rglob("*") if path.is_file())


def test_a_budget_is_written_without_asking(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        assert kernel.modes[ino] == Mode.RANGED and not kernel.flags[ino]
        data = data_of(MIB)
        await write_all(files, kernel, fh, data, 4096)
        assert kernel.answered > 230  # of 256
        used = files.volume.quota.usage.used_bytes
        assert MIB <= used <= MIB + LIMIT // 8 + BLOCK
        await files.release(fh)
        accounts_add_up(files)
        await publish(files)
        assert await content(files, ino) == data
        accounts_add_up(files)

    run_files(settings_of(tmp_path, "budget"), body)


def test_overwriting_takes_no_room(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        for n in range(20):
            await write_all(files, kernel, fh, data_of(MIB, n))
        assert files.volume.quota.usage.used_bytes <= MIB + LIMIT // 8 + 4 * BLOCK
        await files.release(fh)
        accounts_add_up(files)
        await publish(files)
        assert await content(files, ino) == data_of(MIB, 19)

    run_files(settings_of(tmp_path, "budget"), body)


def test_clean_data_makes_way_for_writers(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        inos = []
        for n in range(12):  # three times the cache

            async def one(n: int = n) -> None:
                ino, fh = await create(files, b"%d" % n)
                inos.append(ino)
                await write_all(files, kernel, fh, data_of(MIB, n))
                await files.release(fh)

            await watched(files, LIMIT + BLOCK, one)
            await publish(files)
        for n, ino in enumerate(inos):
            assert await content(files, ino) == data_of(MIB, n)
        await files.volume.hydrator.quiesce()
        accounts_add_up(files)

    run_files(settings_of(tmp_path, "budget"), body)


def test_writers_wait_for_uploads(tmp_path: Path) -> None:
    """Closed files fill the quota with dirty data: whoever writes next has them sealed and uploaded at once."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        inos = []

        async def fill() -> None:
            for n in range(20):
                ino, fh = await create(files, b"%d" % n)
                inos.append(ino)
                await write_all(files, kernel, fh, data_of(MIB, n))
                await files.release(fh)

        await watched(files, LIMIT + BLOCK, fill)
        await publish(files)
        for n, ino in enumerate(inos):
            assert await content(files, ino) == data_of(MIB, n)
        await files.volume.hydrator.quiesce()
        accounts_add_up(files)

    run_files(settings_of(tmp_path, "budget", timeout_s=10.0), body)


def test_many_writers_share_what_there_is(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        inos: dict[int, int] = {}

        async def one(n: int) -> None:
            for turn in range(4):
                ino, fh = await create(files, b"%d-%d" % (n, turn))
                inos[ino] = 10 * n + turn
                await write_all(files, kernel, fh, data_of(400 * KIB, 10 * n + turn), 8192)
                await files.release(fh)

        async def everybody() -> None:
            async with trio.open_nursery() as nursery:
                for n in range(6):
                    nursery.start_soon(one, n)

        await watched(files, LIMIT + 6 * BLOCK, everybody)
        await publish(files)
        for ino, seed in inos.items():
            assert await content(files, ino) == data_of(400 * KIB, seed)
        await files.volume.hydrator.quiesce()
        accounts_add_up(files)

    run_files(settings_of(tmp_path, "budget", timeout_s=10.0), body)


@pytest.mark.expects_warnings
def test_no_room_and_no_remote_is_enospc_in_time(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, "budget")
    remote = tmp_path / "remote"

    async def body(files: Files, kernel: FakeKernel) -> None:
        await files.volume.replicator.drain()
        remote.rename(tmp_path / "away")
        kept = []
        with pytest.raises(OSError) as error:
            for n in range(20):
                ino, fh = await create(files, b"%d" % n)
                began_s = trio.current_time()
                try:
                    await write_all(files, kernel, fh, data_of(MIB, n))
                finally:
                    await files.release(fh)
                kept.append(ino)
        assert error.value.errno == errno.ENOSPC
        assert len(kept) == 3 and trio.current_time() - began_s < 60.0, "the deadline is a second"
        assert on_disk(files.volume) <= LIMIT + BLOCK
        for n, ino in enumerate(kept):
            assert await content(files, ino) == data_of(MIB, n)
        (tmp_path / "away").rename(remote)
        ino, fh = await create(files, b"again")
        await write_all(files, kernel, fh, data_of(2 * MIB))
        await files.release(fh)
        await publish(files)
        for n, kept_ino in enumerate(kept):
            assert await content(files, kept_ino) == data_of(MIB, n)
        assert await content(files, ino) == data_of(2 * MIB)
        await files.volume.hydrator.quiesce()
        accounts_add_up(files)

    run_files(settings, body)


def test_what_can_never_fit_is_refused_at_once(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        with pytest.raises(OSError) as error, trio.fail_after(1):
            await files.handle(fh).allocate(0, 0, 2 * LIMIT)
        assert error.value.errno == errno.ENOSPC
        with pytest.raises(OSError) as error, trio.fail_after(1):
            await files.handle(fh).allocate(0, 0, LIMIT // 2 + 4096)
        assert error.value.errno == errno.EDQUOT
        await files.handle(fh).allocate(0, 0, MIB)
        budget = kernel.budget[ino]
        assert files.volume.quota.usage.used_bytes == on_disk(files.volume) + budget
        await files.release(fh)
        accounts_add_up(files)

    run_files(settings_of(tmp_path, "budget", quota=LIMIT // 2), body)


def test_a_tenants_own_clean_data_makes_way_within_its_quota(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        for n in range(6):
            ino, fh = await create(files, b"%d" % n)
            await write_all(files, kernel, fh, data_of(900 * KIB, n))
            await files.release(fh)
            await publish(files)
            assert files.volume.quota.tenant_usage("default").used_bytes <= 2 * MIB
        assert await content(files, ino) == data_of(900 * KIB, 5)

    run_files(settings_of(tmp_path, "budget", quota=2 * MIB), body)


def test_extending_costs_nothing_until_it_is_written(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        await files.truncate(ino, 100 * LIMIT)
        assert files.volume.quota.usage.used_bytes == 0
        await write(files, kernel, fh, 50 * LIMIT, b"x" * BLOCK)
        await files.truncate(ino, 0)
        await files.release(fh)
        accounts_add_up(files)

    run_files(settings_of(tmp_path, "budget"), body)


def test_small_strides_take_what_they_take(tmp_path: Path) -> None:
    """A byte a page takes 4,096 times what the budget says: the watch sees it."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")

        async def stride() -> None:
            for n in range(2 * LIMIT // 4096):
                await write(files, kernel, fh, n * 4096, b"x")
                if not n % 16:
                    await trio.sleep(0.02)

        await watched(files, LIMIT + int(16 * 4096 * WATCH_S / 0.02) + 4096, stride)
        await files.release(fh)
        accounts_add_up(files)
        assert await content(files, ino) == (b"x" + bytes(4095)) * (2 * LIMIT // 4096 - 1) + b"x"

    run_files(settings_of(tmp_path, "budget"), body)


# -- passthrough -------------------------------------------------------------------------------------------------


def test_room_decides_who_passes(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        assert files.room.watch.can_stop
        opened = [await create(files, b"%d" % n) for n in range(9)]
        modes = [kernel.modes[ino] for ino, _ in opened]
        assert modes == [Mode.PASSTHROUGH] * 8 + [Mode.RANGED]  # an eighth each
        for _, fh in opened[1:]:
            await files.release(fh)
        scribble(files, opened[0][0], data_of(LIMIT // 2 + BLOCK))
        await trio.sleep(2 * WATCH_S)
        ino, fh = await create(files, b"ranged")
        assert kernel.modes[ino] == Mode.RANGED
        await files.release(fh)
        await files.release(opened[0][1])
        await publish(files)
        await trio.sleep(2 * WATCH_S)
        ino, fh = await create(files, b"passes")
        assert kernel.modes[ino] == Mode.PASSTHROUGH
        await files.release(fh)

    run_files(settings_of(tmp_path), body)


def test_only_who_can_be_stopped_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        assert kernel.modes[ino] == Mode.RANGED
        await files.release(fh)

    monkeypatch.setattr("aof2.engine.files.watch.set_immutable", lambda path, on: False)
    run_files(settings_of(tmp_path), body)


def test_clean_data_makes_way_ahead_of_a_passthrough_writer(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        for n in range(3):
            await make(files, b"%d" % n, data_of(MIB, n))
        await publish(files)
        ino, fh = await create(files, b"a")
        assert kernel.modes[ino] == Mode.PASSTHROUGH
        data = data_of(3 * MIB)
        step = 64 * KIB

        async def grow() -> None:
            for at in range(0, len(data), step):
                scribble(files, ino, data[at : at + step], at)
                await trio.sleep(0.03)

        await watched(files, LIMIT + int(4 * WATCH_S / 0.03) * step, grow)
        await files.release(fh)
        await publish(files)
        assert await content(files, ino) == data
        await trio.sleep(2 * WATCH_S)
        accounts_add_up(files)

    run_files(settings_of(tmp_path), body)


@pytest.mark.expects_warnings
def test_a_passthrough_writer_that_outruns_everything_is_stopped(tmp_path: Path) -> None:
    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        written = 0
        step = 64 * KIB
        with pytest.raises(PermissionError):
            while True:
                os.pwrite(kernel.fds[ino], data_of(step, written), written)
                written += step
                await trio.sleep(0.02)
        assert on_disk(files.volume) <= LIMIT + int(2 * WATCH_S / 0.02) * step
        assert ino in files.room.watch.stopped
        # What frees room is not stopped, and frees the writer.
        await files.truncate(ino, MIB)
        await trio.sleep(2 * WATCH_S)
        os.pwrite(kernel.fds[ino], b"on", MIB)
        await files.release(fh)
        await publish(files)
        expected = b"".join(data_of(step, at) for at in range(0, MIB, step)) + b"on"
        assert await content(files, ino) == expected
        accounts_add_up(files)

    run_files(settings_of(tmp_path, "passthrough"), body)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("end", ["release", "unlink", "crash"])
def test_a_stopped_file_is_let_go(tmp_path: Path, end: str) -> None:
    settings = settings_of(tmp_path, "passthrough")
    inos: list[int] = []
    paths: list[Path] = []

    async def body(files: Files, kernel: FakeKernel) -> None:
        ino, fh = await create(files, b"a")
        inos.append(ino)
        scribble(files, ino, data_of(LIMIT + MIB))
        file = files.known.get(ino)
        assert file is not None
        with trio.fail_after(5):
            while ino not in files.room.watch.stopped:
                await trio.sleep(WATCH_S)
        if end == "crash":
            paths.append(file.path)
            return
        file.unlinked = end == "unlink"
        if end == "unlink":
            work = partial(namespace.unlink, parent=top(files.volume), name=b"a", is_open=files.known.is_open)
            files.removal.removed(await result_of(files.volume.writer.submit(stream_of(ino), work)))
        await files.release(fh)
        if end == "unlink":
            await files.volume.evictor.doomed.delete_all()
            assert not file.path.exists()
        else:
            await publish(files)
            assert await content(files, ino) == data_of(LIMIT + MIB)
        accounts_add_up(files)

    async def after(files: Files, kernel: FakeKernel) -> None:
        await publish(files)
        assert row_of(files, inos[0]).state == ObjectState.PUBLISHED
        assert await content(files, inos[0]) == data_of(LIMIT + MIB)

    run_files(settings, body)
    if end == "crash":
        set_immutable(paths[0], on=True)  # a crash undoes nothing
        run_files(settings, after)


class Granting(FakeKernel):
    """Writers of files that the channel made take all they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.given = self.denied = 0
        self.took: dict[int, int] = {}
        self.news: set[int] = set()

    def take(self, ino: int) -> None:
        """One of them takes what is left."""
        self.took[ino] = self.took.get(ino, 0) + self.given - sum(self.took.values())
        self.news.add(ino)

    def room(self, stream_id: int, more_bytes: int) -> None:
        self.given += more_bytes

    def deny(self, stream_id: int, code: int) -> None:
        self.denied += 1

    def stop_silent(self, stream_id: int) -> None: ...

    async def grown(self, stream_id: int, *, take: bool = False) -> Grown:
        await trio.lowlevel.checkpoint()
        news, self.news = self.news, set()
        return Grown(self.given - sum(self.took.values()), 1, tuple((ino, self.took[ino]) for ino in news))


def test_what_the_table_does_not_know_yet_takes_room(tmp_path: Path) -> None:
    """Files that the channel made are taken over a moment later; until then what they took stays reserved."""

    async def body(files: Files, kernel: FakeKernel) -> None:
        assert isinstance(kernel, Granting)
        brake, volume, first = files.room.brake, files.volume, 1 << 40 | 1 << 20
        stream_id, limit = stream_of(first), files.volume.quota.usage.limit_bytes
        volume.unborn_from[stream_id] = first
        async with trio.open_nursery() as nursery:
            await nursery.start(brake.tasks.run)
            while not kernel.denied:
                given = kernel.given
                brake.short(Short(stream_id, 0, 4096, first, 0, 1))
                with trio.move_on_after(1):
                    while kernel.given == given and not kernel.denied:
                        await trio.sleep(0.01)
                kernel.take(first + (given > 0))
                assert limit is not None and sum(kernel.took.values()) <= limit
            assert brake.window_bytes() == 0
            assert volume.quota.usage.reserved_bytes == sum(kernel.took.values()) > limit // 2
            brake.born(first)
            assert volume.quota.usage.reserved_bytes == kernel.took[first + 1]
            brake.born(first + 1)
            assert volume.quota.usage.reserved_bytes == 0
            nursery.cancel_scope.cancel()

    run_files(settings_of(tmp_path, "passthrough", timeout_s=0.5), body, kernel=Granting())
