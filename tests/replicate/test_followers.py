"""A volume that follows another one, in one process: rows, what is its own, heartbeats, and becoming the writer."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio

from aof2.engine import pins
from aof2.engine.aio import result_of
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.errors import ReadOnlyError
from aof2.engine.follow import takeover
from aof2.engine.follow.heartbeat import FORMAT_VERSION, Followers, Heartbeat, StreamBeat, put_heartbeat
from aof2.engine.follow.mark import load_mark
from aof2.engine.follow.ownlog import CRASH_POINTS as OWN_POINTS
from aof2.engine.follow.ownrows import is_own
from aof2.engine.jobs import prune
from aof2.engine.namespace import root_ino, set_attributes
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.settings import Settings
from aof2.engine.verify.findings import Kind, Severity
from aof2.engine.verify.run import verify
from aof2.engine.volume import Volume, open_volume
from tests.engine.helpers import KIB, job_over, put_object, read_object, small_settings, unlink_object

from .helpers import Weather

TENANT = 1
Body = Callable[[Volume, Volume], Awaitable[None]]


def machine(root: Path, name: str) -> Settings:
    settings = small_settings(root, remote_url=f"file://{root / 'remote'}", retries=0)
    settings = msgspec.structs.replace(
        settings, retention=msgspec.structs.replace(settings.retention, purge_after_s=0.0, undelete_window_s=0.0)
    )
    return msgspec.structs.replace(
        settings,
        volume=msgspec.structs.replace(settings.volume, state_dir=root / name, mountpoint=root / f"{name}-mnt"),
    )


@contextlib.asynccontextmanager
async def writer(root: Path) -> AsyncIterator[Volume]:
    async with open_volume(machine(root, "writer")) as volume:
        yield volume


@contextlib.asynccontextmanager
async def follower(root: Path, env: Env | None = None) -> AsyncIterator[Volume]:
    async with open_volume(machine(root, "follower"), env=env, follow=True) as volume:
        yield volume


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(120):
            await body()

    trio.run(main)


async def durable(w: Volume) -> None:
    await w.checkpoint("default")


async def caught_up(w: Volume, f: Volume) -> None:
    await durable(w)
    assert f.following is not None
    assert await f.following.at_end(TENANT)


def writers_rows(view: View) -> dict[tuple[str, bytes], bytes]:
    """Rows of the tenant that a follower has as the writer has them."""
    prefix = t.STREAM.pack(TENANT)
    found: dict[tuple[str, bytes], bytes] = {}
    for name, number in t.DB_NUMBER.items():
        for key, value in view.raw_scan(name, prefix):
            if name in t.DERIVED or is_own(number, key[4:]):
                continue
            if (number, key[4:5]) == (t.OBJECTS.number, t.OBJECTS.tag):
                value = t.encode(msgspec.structs.replace(t.OBJECTS.decode(value), backing=None))
            found[name, key] = value
    return found


async def follows(w: Volume, f: Volume) -> None:
    """The follower has the writer's rows, once the writer's jobs are over and their commits are there."""
    for attempt in range(100):
        await caught_up(w, f)
        await w.replicated(w.log_ends([TENANT]))
        assert f.following is not None
        await f.following.at_end(TENANT)
        with w.catalog.view() as ours, f.catalog.view() as theirs:
            if writers_rows(theirs) == writers_rows(ours):
                return
            assert attempt < 99 or writers_rows(theirs) == writers_rows(ours)
        await trio.sleep(0.05)


def residency(volume: Volume) -> dict[int, int]:
    with volume.catalog.view() as view:
        return {chunk_id: row.mask for chunk_id, row in view.scan(TENANT, t.RESIDENCY) if row.mask}


def names_of(volume: Volume) -> set[bytes]:
    with volume.catalog.view() as view:
        return {name for (_, name), _ in view.scan(TENANT, t.DENTRIES)}


async def settled(f: Volume) -> None:
    await f.hydrator.quiesce()


def counters(volume: Volume) -> int:
    with volume.catalog.view() as view:
        return view.get(TENANT, t.COUNTERS, "hot_bytes") or 0


# -- following -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_rows_are_the_writers_and_the_cache_is_its_own(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)

    async def body() -> None:
        async with writer(tmp_path) as w:
            contents: dict[bytes, tuple[tuple[int, int, int], bytes]] = {}

            async def put(name: bytes) -> None:
                data = rng.randbytes(rng.choice([0, 1, 5 * KIB, 300 * KIB]))
                contents[name] = (await put_object(w, "default", name, data), data)

            await put(b"first")
            await durable(w)
            async with follower(tmp_path) as f:
                for step in range(12):
                    match rng.choice(("put", "put", "unlink", "evict", "snapshot", "read", "prune")):
                        case "put":
                            await put(b"f%d" % step)
                        case "unlink" if len(contents) > 1:
                            name = rng.choice(sorted(contents))
                            await unlink_object(w, "default", name)
                            del contents[name]
                        case "evict":
                            await durable(w)
                            await w.evict([key for key, _ in contents.values()])
                        case "snapshot":
                            await w.log_snapshots.take_all([TENANT])
                        case "prune":
                            await durable(w)
                            await job_over(w.jobs, TENANT, await w.jobs.prune(TENANT))
                    await follows(w, f)
                    key, data = contents[rng.choice(sorted(contents))]
                    assert await read_object(f, key, 0, len(data) + 1) == data
                    if rng.random() < 0.3:
                        await f.evict([key])
                await settled(f)
                assert f.following is not None
                assert f.following.lists == 0
                had = residency(f)
                assert counters(f) == f.quota.usage.used_bytes
            async with follower(tmp_path) as f:
                assert residency(f) == had
                assert counters(f) == f.quota.usage.used_bytes
            shutil.rmtree(tmp_path / "follower" / "catalog")  # as after a loss of power
            async with follower(tmp_path) as f:
                assert residency(f) == had
                await follows(w, f)
                for key, data in contents.values():
                    assert await read_object(f, key, 0, len(data) + 1) == data
            report = await trio.to_thread.run_sync(verify, machine(tmp_path, "follower"))
            assert [str(one) for one in report.findings if one.severity is not Severity.NOTE] == []

    run(body)


def test_verify_of_one_that_is_behind_says_so(tmp_path: Path) -> None:
    async def body() -> None:
        async with writer(tmp_path) as w:
            await put_object(w, "default", b"stays", b"stays" * KIB)
            await put_object(w, "default", b"goes", b"goes" * KIB)
            await durable(w)
            async with follower(tmp_path) as f:
                await follows(w, f)
            await unlink_object(w, "default", b"goes")
            await durable(w)
            await job_over(w.jobs, TENANT, await w.jobs.prune(TENANT))
            await durable(w)
            report = await trio.to_thread.run_sync(verify, machine(tmp_path, "follower"))
            said = [one for one in report.findings if one.kind is Kind.REMOTE_MISSING]
            assert [one.severity for one in said] == [Severity.NOTE]
            assert "goes on behind what this follower has" in said[0].message
            assert report.exit_code == 0
            async with follower(tmp_path) as f:
                await follows(w, f)
            report = await trio.to_thread.run_sync(verify, machine(tmp_path, "follower"))
            assert not report.findings

    run(body)


def test_nothing_but_what_is_its_own_changes_here(tmp_path: Path) -> None:
    async def body() -> None:
        async with writer(tmp_path) as w:
            key = await put_object(w, "default", b"file", b"x")
            await durable(w)
            async with follower(tmp_path) as f:
                before = f.catalog.get(TENANT, t.INODES, root_ino(TENANT))
                with pytest.raises(ReadOnlyError, match="follows"):
                    await result_of(f.writer.submit(TENANT, lambda b: set_attributes(b, root_ino(TENANT), mode=0o700)))
                assert f.catalog.get(TENANT, t.INODES, root_ino(TENANT)) == before
                with pytest.raises(ReadOnlyError, match="follows"):
                    f.check_writable(TENANT)
                await result_of(f.writer.submit(TENANT, lambda b: pins.pin(b, [key[1]])))
                await caught_up(w, f)
                with f.catalog.view() as view:
                    assert pins.is_pinned(view, TENANT, key[1])
                with w.catalog.view() as view:
                    assert not pins.is_pinned(view, TENANT, key[1])

    run(body)


def test_all_who_wait_share_a_walk(tmp_path: Path) -> None:
    async def body() -> None:
        async with writer(tmp_path) as w:
            await put_object(w, "default", b"file", b"x")
            await durable(w)
            async with follower(tmp_path) as f:
                assert f.following is not None
                await f.following.at_end(TENANT)
                before = f.following.requests
                async with trio.open_nursery() as nursery:
                    for _ in range(100):
                        nursery.start_soon(f.following.at_end, TENANT)
                # Two walks at most, of a GET and a HEAD each; and what the periods in between asked by themselves.
                assert f.following.requests - before <= 10

    run(body)


def test_chunks_that_went_behind_a_snapshot_are_jumped_and_the_cache_stays(tmp_path: Path) -> None:
    async def body() -> None:
        async with writer(tmp_path) as w:
            key = await put_object(w, "default", b"file", b"x" * 300 * KIB)
            gone = await put_object(w, "default", b"gone", b"y" * 300 * KIB)
            await durable(w)
            async with follower(tmp_path) as f:
                assert await read_object(f, key, 0, 1) == b"x"
                assert await read_object(f, gone, 0, 1) == b"y"
                await settled(f)
                had = residency(f)
            await unlink_object(w, "default", b"gone")
            await durable(w)
            await job_over(w.jobs, TENANT, await w.jobs.prune(TENANT))
            await job_over(w.jobs, TENANT, await w.jobs.prune(TENANT))
            await durable(w)
            await w.log_snapshots.take_all([TENANT])
            await durable(w)
            await w.replicator.drain()
            chunks = sorted((tmp_path / "remote" / "manifest" / str(TENANT)).glob("*.mlog"), key=lambda x: int(x.stem))
            for chunk in chunks[:-1]:
                chunk.unlink()
            async with follower(tmp_path) as f:
                await follows(w, f)
                kept = residency(f)
                assert kept
                assert kept.items() < had.items()
                assert counters(f) == f.quota.usage.used_bytes

    run(body)


@pytest.mark.expects_warnings
def test_a_volume_that_was_restored_to_an_earlier_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with writer(tmp_path) as w:
            key = await put_object(w, "default", b"file", b"x" * 100)
            await durable(w)
            await w.log_snapshots.take_all([0, TENANT])
            await durable(w)
            await w.replicator.drain()
            shutil.copytree(tmp_path / "remote", tmp_path / "earlier")
            await put_object(w, "default", b"later", b"y")
            await durable(w)
            async with follower(tmp_path) as f:
                assert await read_object(f, key, 0, 100) == b"x" * 100
                await settled(f)
                had = residency(f)
                for folder in ("manifest", "checkpoints"):
                    shutil.rmtree(tmp_path / "remote" / folder)
                    shutil.copytree(tmp_path / "earlier" / folder, tmp_path / "remote" / folder)
                assert f.following is not None
                f.following.look_around()
                while names_of(f) != {b"file"}:
                    await trio.sleep(0.05)
                assert residency(f) == had
                assert await read_object(f, key, 0, 100) == b"x" * 100

    run(body)
    assert "another one now" in caplog.text


def test_where_there_is_no_volume(tmp_path: Path) -> None:
    async def body() -> None:
        with pytest.raises(RemoteMissingError, match="right url"):
            async with follower(tmp_path):
                pass

    run(body)


# -- heartbeats ----------------------------------------------------------------------------------------------------


def test_what_a_follower_may_read_is_not_deleted(tmp_path: Path) -> None:
    async def body() -> None:
        async with writer(tmp_path) as w:
            key = await put_object(w, "default", b"file", b"x" * 300 * KIB)
            await durable(w)
            blobs = lambda: sorted((tmp_path / "remote" / "checkpoints").rglob("*.blob"))  # noqa: E731
            async with follower(tmp_path) as f:
                assert f.following is not None
                handle = await f.hydrator.open(key, "default")
                f.following.opened(7, TENANT)
                await trio.to_thread.run_sync(put_heartbeat, f.bare_remote, f.following.beat())
                await trio.sleep(0.01)  # what goes now goes later than what was seen
                await unlink_object(w, "default", b"file")
                for _ in range(3):
                    await caught_up(w, f)
                    await job_over(w.jobs, TENANT, await w.jobs.prune(TENANT))
                assert blobs()
                assert await f.hydrator.read(handle, 0, 10) == b"x" * 10
                f.hydrator.close(handle)
                f.following.closed(7)
                await caught_up(w, f)
                await trio.to_thread.run_sync(put_heartbeat, f.bare_remote, f.following.beat())
                for _ in range(3):
                    await durable(w)
                    await job_over(w.jobs, TENANT, await w.jobs.prune(TENANT))
                assert not blobs()
            assert not list((tmp_path / "remote").glob("followers/*"))

    run(body)


class Clock(Env):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.monotonic_s = lambda: self.now_s


def beat_of(follower_id: str, oldest_ms: int) -> Heartbeat:
    stream = StreamBeat(position=(3, 64, 100), seen_ms=oldest_ms + 5, oldest_ms=oldest_ms)
    return Heartbeat(
        format_version=FORMAT_VERSION, id=follower_id, host="h", volume_uuid="u", at_ms=1, streams={TENANT: stream}
    )


def test_a_heartbeat_counts_for_ten_minutes_and_is_forgotten_after_a_day(tmp_path: Path) -> None:
    from .helpers import keys_of, open_directory

    clock = Clock()
    store = Weather(open_directory(tmp_path))
    followers = Followers(clock, store)
    assert followers.kept_since_ms(TENANT) is None
    put_heartbeat(store, beat_of("0" * 16, 1000))
    put_heartbeat(store, beat_of("1" * 16, 500))
    followers.look()
    assert followers.kept_since_ms(TENANT) == 500
    assert followers.kept_since_ms(2) == 0  # it does not say how far it is there
    assert prune.before(10_000, prune.Retention(1, 1000, 0), 500) == 500
    clock.now_s = 500.0
    put_heartbeat(store, beat_of("0" * 16, 2000))
    followers.look()
    clock.now_s = 700.0
    assert followers.kept_since_ms(TENANT) == 2000
    assert [(one.id[0], one.live, one.lag_records) for one in followers.facts({TENANT: 107})] == [
        ("0", True, 7),
        ("1", False, 7),
    ]
    clock.now_s = 86_400.0 + 1
    followers.look()
    assert keys_of(store, "followers/") == [f"followers/{'0' * 16}.json"]


# -- becoming the writer -------------------------------------------------------------------------------------------


class StoppedError(Exception):
    """The process ends here."""


class StopsAt(Env):
    def __init__(self, point: str) -> None:
        super().__init__()
        self.point = point

    def failpoint(self, name: str) -> None:
        if name == self.point:
            self.point = ""
            raise StoppedError(name)


CRASHES = (
    "replicate.follow.chunk",
    "replicate.follow.replayed",
    "hydrate.recorded",
    "hydrate.synced",
    *OWN_POINTS,
)


@pytest.mark.expects_warnings  # where the catalog was left open by what stopped, it is rebuilt
@pytest.mark.parametrize("catalog_lost", [False, True])
@pytest.mark.parametrize("point", CRASHES)
def test_a_follower_goes_on_after_a_crash(tmp_path: Path, point: str, catalog_lost: bool) -> None:
    env = StopsAt("")

    async def crash(w: Volume) -> None:
        async with follower(tmp_path, env) as f:
            env.point = point
            for number in range(4):
                key = await put_object(w, "default", b"file%d" % number, b"x" * 300 * KIB)
                await caught_up(w, f)
                assert await read_object(f, key, 0, 300 * KIB) == b"x" * 300 * KIB
                await settled(f)

    async def body() -> None:
        async with writer(tmp_path) as w:
            await put_object(w, "default", b"first", b"x")
            await durable(w)
            with pytest.RaisesGroup(StoppedError, allow_unwrapped=True, flatten_subgroups=True):
                await crash(w)
            if catalog_lost:
                shutil.rmtree(tmp_path / "follower" / "catalog")
            async with follower(tmp_path) as f:
                await follows(w, f)
                for key in [k for k, row in rows_of_objects(f)]:
                    assert await read_object(f, (TENANT, *key), 0, 1) == b"x"
                await settled(f)
                assert counters(f) == f.quota.usage.used_bytes

    run(body)


def rows_of_objects(volume: Volume) -> list[tuple[tuple[int, int], object]]:
    with volume.catalog.view() as view:
        return list(view.scan(TENANT, t.OBJECTS))


@pytest.mark.parametrize("point", ["", *takeover.CRASH_POINTS])
def test_a_follower_becomes_the_writer_whatever_interrupts_it(tmp_path: Path, point: str) -> None:
    async def body() -> None:
        async with writer(tmp_path) as w:
            key = await put_object(w, "default", b"file", b"x" * 300 * KIB)
            await durable(w)
            async with follower(tmp_path) as f:
                assert await read_object(f, key, 0, 300 * KIB) == b"x" * 300 * KIB
                await settled(f)
                await result_of(f.writer.submit(TENANT, lambda b: pins.pin(b, [key[1]])))
                had = residency(f)
            await put_object(w, "default", b"late", b"written after it stopped following")
            await durable(w)
        settings = machine(tmp_path, "follower")
        if point:
            with pytest.raises(StoppedError):
                async with open_volume(settings, env=StopsAt(point)):
                    pass
        async with open_volume(settings) as now:
            assert residency(now).items() >= had.items()
            with now.catalog.view() as view:
                assert pins.is_pinned(view, TENANT, key[1])
            assert names_of(now) == {b"file", b"late"}
            assert load_mark(settings.volume.state_dir) is None
            await put_object(now, "default", b"mine", b"z")
            await durable(now)
            assert counters(now) == now.quota.usage.used_bytes
        shutil.rmtree(settings.volume.state_dir / "catalog")
        async with open_volume(settings) as now:
            assert residency(now).items() >= had.items()
        report = await trio.to_thread.run_sync(lambda: verify(settings, deep_remote=True))
        assert [str(one) for one in report.findings if one.severity is not Severity.NOTE] == []

    run(body)


@pytest.mark.expects_warnings
def test_a_writer_that_has_not_left_is_taken_from_only_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(takeover, "SETTLE_S", 0.1)
    monkeypatch.setattr(takeover, "SETTLE_LOOK_S", 0.05)

    async def body() -> None:
        async with writer(tmp_path) as w:
            await put_object(w, "default", b"file", b"x" * 300 * KIB)
            await durable(w)
            async with follower(tmp_path):
                pass
            settings = machine(tmp_path, "follower")
            with pytest.raises(ReadOnlyError, match="--take"):
                async with open_volume(settings):
                    pass
            async with open_volume(settings, take=True) as now:
                await put_object(now, "default", b"mine", b"z")
                await durable(now)
                await put_object(w, "default", b"too late", b"z")
                with trio.move_on_after(5):
                    await durable(w)
                assert w.fenced

    run(body)
