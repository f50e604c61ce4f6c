"""Bad weather on the machine of a whole volume: a state folder that is taken or read-only, a disk that is full, a
clock that jumps. What is asked of each: no wrong byte, a typed error where there must be one, and work that
goes on by itself.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import trio

from aof2.engine import volume
from aof2.engine.catalog.rows import JobState, ObjectState
from aof2.engine.env import Env, Files
from aof2.engine.errors import Aof2Error, ReadOnlyError
from aof2.engine.local import reserve
from aof2.engine.local.handles import Key
from aof2.engine.volume import Volume, open_volume
from tests.engine.helpers import object_row, put_object, read_object, unlink_object

from .helpers import run_volume, small_settings
from .test_tiers import BLOCK, CHUNK, content
from .weather import check, is_clean, published, put_some, until

# -- the state folder --------------------------------------------------------------------------------------------


def test_two_volumes_on_one_state_dir(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)

    async def body(v: Volume) -> None:
        with pytest.raises(ReadOnlyError, match="another aof2 process has this volume open") as e:
            async with open_volume(settings):
                pass
        assert "\n" not in str(e.value)
        key = await put_object(v, "default", b"a", b"still mine")
        await v.checkpoint("default")
        assert await read_object(v, key, 0, 100) == b"still mine"

    run_volume(settings, body)


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives its rights up for this")
@pytest.mark.parametrize("used", [False, True])
def test_a_state_dir_that_is_read_only(tmp_path: Path, used: bool) -> None:
    settings = small_settings(tmp_path)

    async def write(v: Volume) -> None:
        await put_object(v, "default", b"a", b"x")

    if used:
        run_volume(settings, write)
    settings.volume.state_dir.mkdir(exist_ok=True)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder.is_relative_to(tmp_path.parents[1]):
            folder.chmod(0o755)
    for path in (settings.volume.state_dir, *settings.volume.state_dir.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    said = _as_nobody(lambda: run_volume(settings, write))
    assert said.startswith(("expected PermissionError", "expected ReadOnlyError")), said
    assert str(settings.volume.state_dir) in said


def _as_nobody(work: Callable[[], None]) -> str:
    """What a child without rights meets."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        text = "no error"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            work()
        except (OSError, Aof2Error) as e:
            text = f"expected {type(e).__name__}: {e}"
        except BaseException as e:
            text = f"surprise {type(e).__name__}: {e!r}"
        finally:
            os.write(write_fd, text.encode()[:4000])
            os._exit(0)
    os.close(write_fd)
    with open(read_fd, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(pid, 0)
    return text


# -- the disk ----------------------------------------------------------------------------------------------------


class SmallDisk(Files):
    """No room below these folders, from now on or no more."""

    def __init__(self) -> None:
        self.full: tuple[Path, ...] = ()
        self.refused = 0

    def _check(self, path: Path) -> None:
        if any(path.is_relative_to(folder) for folder in self.full):
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def create(self, path: Path, mode: int = 0o600) -> int:
        self._check(path)
        return super().create(path, mode)

    def preallocate(self, fd: int, offset: int, length: int) -> None:
        self._check(Path(f"/proc/self/fd/{fd}").readlink())
        super().preallocate(fd, offset, length)

    def pwrite(self, fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
        if os.fstat(fd).st_blocks * 512 < offset + len(data):  # what was allocated before is there
            self._check(Path(f"/proc/self/fd/{fd}").readlink())
        super().pwrite(fd, data, offset)

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int) -> None:
        for data in buffers:
            self.pwrite(fd, data, offset)
            offset += len(data)


class _OnlyPwrite(SmallDisk):
    """Names fit, bytes do not."""

    def create(self, path: Path, mode: int = 0o600) -> int:
        return Files.create(self, path, mode)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("kind", [SmallDisk, _OnlyPwrite])
def test_disk_full_while_hydrating(tmp_path: Path, kind: type[SmallDisk]) -> None:
    settings = small_settings(tmp_path, compression="none")
    disk = kind()
    data: dict[Key, bytes] = {}

    async def body(v: Volume) -> None:
        data.update(await put_some(v, 3))
        await v.checkpoint("default")
        await v.evict(list(data))
        disk.full = (v.hot.root,)
        await check(v, data)
        assert disk.refused
        await v.hydrator.quiesce()
        assert v.quota.usage.reserved_bytes == v.quota.usage.used_bytes == 0
        assert not any(v.evictor.hot_bytes_of(key) for key in data)
        disk.full = ()
        for key in data:
            v.pages.drop_object(key[1], key[2])
        await check(v, data)
        await v.hydrator.quiesce()
        assert v.quota.usage.used_bytes >= sum(map(len, data.values()))

    async def again(v: Volume) -> None:
        fetched = v.hydrator.fetched_bytes
        await check(v, data)
        assert v.hydrator.fetched_bytes == fetched

    run_volume(settings, body, env=Env(files=disk))
    is_clean(settings)
    run_volume(settings, again)


@pytest.mark.expects_warnings
def test_disk_full_at_the_log(tmp_path: Path, small_reserve: None) -> None:
    settings = small_settings(tmp_path)
    disk = SmallDisk()
    data: dict[Key, bytes] = {}

    async def body(v: Volume) -> None:
        data.update(await put_some(v, 3))
        await v.checkpoint("default")
        await v.evict(list(data)[:1])
        disk.full = _of_the_log(v)
        data.update(await _fill(v))
        used_bytes = v.quota.usage.used_bytes
        with pytest.raises(OSError, match="No space left"):
            await put_object(v, "default", b"no", b"there is no room for this")
        assert v.quota.usage.used_bytes == used_bytes
        await _served_or_said(lambda: check(v, data))
        await trio.sleep(1.5)  # the background meets it too: settling, planning
        assert disk.refused
        disk.full = ()
        more = await put_object(v, "default", b"more", content(5, BLOCK + 1))
        data[more] = content(5, BLOCK + 1)
        await v.checkpoint("default")
        await check(v, data)
        await v.evict(list(data))
        await check(v, data)

    run_volume(settings, body, env=Env(files=disk))
    is_clean(settings)
    run_volume(settings, lambda v: check(v, data))


@pytest.mark.expects_warnings
def test_disk_full_at_the_log_while_a_checkpoint_runs(tmp_path: Path, small_reserve: None) -> None:
    settings = small_settings(tmp_path)
    disk = SmallDisk()
    data: dict[Key, bytes] = {}

    async def body(v: Volume) -> None:
        data.update(await put_some(v, 3))
        disk.full = _of_the_log(v)
        data.update(await _fill(v))
        await trio.sleep(1)
        assert any(object_row(v, key).state == ObjectState.SEALED for key in data)
        disk.full = ()
        await published(v, list(data))
        await check(v, data)

    run_volume(settings, body, env=Env(files=disk))
    is_clean(settings)


@pytest.mark.expects_warnings
def test_disk_full_at_the_log_when_a_job_is_due(tmp_path: Path, small_reserve: None) -> None:
    settings = small_settings(tmp_path)
    disk = SmallDisk()

    async def body(v: Volume) -> None:
        data = await put_some(v, 3)
        tenant_id = next(iter(data))[0]
        assert await v.jobs.plan(tenant_id)
        disk.full = _of_the_log(v)
        await _fill(v)
        refused = disk.refused
        async with trio.open_nursery() as nursery:
            await nursery.start(v.jobs.run)
            await until(lambda: disk.refused > refused)
            await trio.sleep(0.3)
            assert v.jobs.runner.jobs(tenant_id)[0].state == JobState.QUEUED
            disk.full = ()
            await published(v, list(data))
            nursery.cancel_scope.cancel()

    run_volume(settings, body, env=Env(files=disk), parts=("replicator",))
    is_clean(settings)


@pytest.fixture
def small_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of log, where a volume keeps sixteen at least: they are used up sooner."""
    monkeypatch.setattr(reserve, "UNITS_MIN", 2)
    monkeypatch.setattr(reserve, "UNITS_MAX", 2)


def _of_the_log(v: Volume) -> tuple[Path, ...]:
    """Where the log gets its room from: its folder, and the reserve, which must not grow again meanwhile."""
    return (v.manifest_dir, v.state_dir / "reserve")


async def _fill(v: Volume) -> dict[Key, bytes]:
    """Puts until the log's chunk and the reserve are full and there is no room for the next one."""
    data: dict[Key, bytes] = {}
    for i in range(1000):
        try:
            data[await put_object(v, "default", b"some%d" % i, b"%d" % i)] = b"%d" % i
        except OSError as e:
            assert e.errno == errno.ENOSPC
            return data
    raise AssertionError("the log has room for ever")


async def _served_or_said(work: Callable[[], Awaitable[None]]) -> None:
    with contextlib.suppress(Aof2Error, OSError):
        await work()


# -- the clock ---------------------------------------------------------------------------------------------------


def test_the_clock_goes_back_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume, "DRAIN_MAX_S", 1.0)  # the next test says what it would wait for
    settings = small_settings(tmp_path)
    off_ms = [0]
    env = Env(now_ms=lambda: time.time_ns() // 1_000_000 + off_ms[0])
    data: dict[Key, bytes] = {}

    async def body(v: Volume) -> None:
        data.update(await put_some(v, 2))
        off_ms[0] -= 3_600_000
        with trio.fail_after(30):
            new = await put_object(v, "default", b"after", content(9, CHUNK))
            data[new] = content(9, CHUNK)
            assert await v.checkpoint("default") >= 1
            assert (await v.evict(list(data)))[1] == []
            await check(v, data)
            await unlink_object(v, "default", b"after")
            del data[new]
            off_ms[0] -= 3_600_000
            last = await put_object(v, "default", b"last", content(10, CHUNK))
            data[last] = content(10, CHUNK)
            await published(v, [last])

    async def again(v: Volume) -> None:
        await check(v, data)
        await v.evict(list(data))
        await check(v, data)

    run_volume(settings, body, env=env)
    off_ms[0] -= 3_600_000
    run_volume(settings, again, env=env)
    is_clean(settings)


def test_the_log_is_sent_after_the_clock_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume, "DRAIN_MAX_S", 0.2)
    off_ms = [0]
    env = Env(now_ms=lambda: time.time_ns() // 1_000_000 + off_ms[0])

    async def body(v: Volume) -> None:
        await put_some(v, 2)
        off_ms[0] -= 3_600_000
        with trio.fail_after(30):
            await v.replicator.drain()

    run_volume(small_settings(tmp_path), body, env=env, parts=("replicator",))
