"""Bad weather beyond a whole volume: a real S3 server that stops, lies and refuses. What is asked of each: no wrong
byte, a typed error where there must be one, and work that goes on by itself; and nothing is
sent where there is nothing to do.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from aof2.engine import volume
from aof2.engine.catalog.rows import JobState, ObjectState
from aof2.engine.errors import Aof2Error, TransientError
from aof2.engine.local.handles import Key
from aof2.engine.manifest import payloads as p
from aof2.engine.manifest.reader import Stream
from aof2.engine.settings import Settings
from aof2.engine.volume import Volume
from tests.engine.helpers import object_row, put_object, read_object
from tests.support.seaweed import Fault, FaultProxy, Seaweed, Seen, of, running_seaweed

from .helpers import run_volume, small_settings
from .test_tiers import BLOCK, CHUNK, SIZES, content
from .weather import check, is_clean, published, put_some, until

BLOBS = "checkpoints/"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def server(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    """The server, whose keys the credential chain finds; the test may stop it."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in seaweed.environ().items():
        monkeypatch.setenv(name, value)
    yield seaweed
    seaweed.start()


@pytest.fixture
def proxy(server: Seaweed) -> Iterator[FaultProxy]:
    between = FaultProxy(server.port)
    yield between
    between.clear()
    between.down()


@pytest.fixture
def settings(server: Seaweed, proxy: FaultProxy, tmp_path: Path) -> Settings:
    """A volume in a fresh prefix, behind the proxy, that does not wait long."""
    return s3_settings(server, tmp_path, proxy.endpoint_url)


def s3_settings(server: Seaweed, root: Path, endpoint_url: str, *, bucket: str = "") -> Settings:
    return small_settings(
        root,
        compression="none",
        remote_url=f"s3://{bucket or server.bucket}/vol{next(_numbers)}",
        endpoint_url=endpoint_url,
        timeout_s=3.0,
        retries=2,
        parallel=4,
    )


def of_blob(method: str) -> Callable[[Seen], bool]:
    return of(method, BLOBS)


def records(v: Volume, tenant_id: int) -> list[p.Payload]:
    v.writer.flush()
    return [record.decoded() for record in Stream(v.manifest_dir / str(tenant_id)).records()]


def failures(v: Volume, tenant_id: int) -> list[int]:
    """Reasons of the hydrations that failed."""
    return [r.reason_code for r in records(v, tenant_id) if isinstance(r, p.HydrationFailed)]


# -- the server ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_round_trip_on_s3_with_restarts(server: Seaweed, tmp_path: Path, compression: str) -> None:
    settings = small_settings(
        tmp_path,
        compression=compression,
        remote_url=f"s3://{server.bucket}/vol{next(_numbers)}",
        endpoint_url=server.endpoint_url,
    )
    data: dict[Key, bytes] = {}

    async def write(v: Volume) -> None:
        for size in SIZES:
            piece = content(size, size, dull=size % 2 == 0)
            data[await put_object(v, "default", b"f%d" % size, piece)] = piece
        assert await v.checkpoint("default") == len(SIZES)
        freed, skipped = await v.evict(list(data))
        assert freed >= sum(SIZES)
        assert skipped == []

    async def by_ranges(v: Volume) -> None:
        assert v.quota.usage.used_bytes == 0
        rng = random.Random(1)
        for key, piece in data.items():
            for _ in range(5 if piece else 0):
                offset, length = rng.randrange(len(piece)), rng.randrange(1, len(piece) + 1)
                assert await read_object(v, key, offset, length) == piece[offset : offset + length]

    async def whole(v: Volume) -> None:
        await check(v, data)
        await v.evict(list(data))
        await check(v, data)

    for body in (write, by_ranges, whole):
        run_volume(settings, body)
    is_clean(settings)


@pytest.mark.expects_warnings
def test_the_server_stops_in_the_middle_of_a_checkpoint(server: Seaweed, proxy: FaultProxy, settings: Settings) -> None:
    data: dict[Key, bytes] = {}

    async def body(v: Volume) -> None:
        stopped = threading.Event()

        def stop() -> None:
            server.stop()
            stopped.set()

        proxy.add(Fault(_nth(of_blob("PUT"), 5), call=stop, drop=True))
        data.update(await put_some(v, 10))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(v.checkpoint, "default")
            await until(stopped.is_set)
            await check(v, data)
            more = await put_object(v, "default", b"meanwhile", b"written while the server is away")
            data[more] = b"written while the server is away"
            assert any(object_row(v, key).state == ObjectState.SEALED for key in data)
            await trio.sleep(0.5)
            await trio.to_thread.run_sync(server.start)
        await published(v, list(data))
        await v.checkpoint("default")  # evicted is what the remote alone restores: its log, too
        assert (await v.evict(list(data)))[1] == []
        await check(v, data)
        await v.replicator.drain()

    run_volume(settings, body)
    is_clean(settings)


def _nth(matches: Callable[[Seen], bool], n: int) -> Callable[[Seen], bool]:
    """The n-th of those requests, and all after it."""
    count = itertools.count(1)
    return lambda seen: matches(seen) and next(count) >= n


@pytest.mark.expects_warnings
def test_the_server_stops_while_objects_are_read(server: Seaweed, proxy: FaultProxy, settings: Settings) -> None:
    async def body(v: Volume) -> None:
        data = await put_some(v, 4)
        await v.checkpoint("default")
        keys = list(data)
        away, here = keys[:2], keys[2:]
        assert (await v.evict(away))[1] == []
        # In the middle of a hydration, not before it.
        proxy.add(Fault(of_blob("GET"), call=server.stop, drop=True))
        for key in away:
            with trio.fail_after(20), pytest.raises(TransientError):
                await read_object(v, key, 0, len(data[key]))
        for key in here:
            assert await read_object(v, key, 0, len(data[key])) == data[key]
        assert v.quota.usage.reserved_bytes == 0
        await trio.to_thread.run_sync(server.start)
        with trio.fail_after(40):
            for key in away:
                assert await _read_when_it_works(v, key, len(data[key])) == data[key]
        assert await trio.to_thread.run_sync(failures, v, keys[0][0])

    run_volume(settings, body)
    is_clean(settings)


async def _read_when_it_works(v: Volume, key: Key, length: int) -> bytes:
    """As a patient user would. The breaker may be open for a moment after the server is back."""
    while True:
        try:
            return await read_object(v, key, 0, length)
        except TransientError:
            await trio.sleep(0.1)


@pytest.mark.expects_warnings
def test_opened_while_the_remote_is_away(proxy: FaultProxy, settings: Settings) -> None:
    data: dict[Key, bytes] = {}

    async def before(v: Volume) -> None:
        data.update(await put_some(v, 3))
        await v.checkpoint("default")
        await v.evict(list(data)[:1])

    async def during(v: Volume) -> None:
        away, *here = data
        for key in here:
            assert await read_object(v, key, 0, CHUNK) == data[key][:CHUNK]
        with trio.fail_after(20), pytest.raises(TransientError):
            await read_object(v, away, 0, CHUNK)
        new = await put_object(v, "default", b"new", content(77, 3 * BLOCK))
        data[new] = content(77, 3 * BLOCK)
        assert await read_object(v, new, 0, CHUNK) == data[new]
        await until(lambda: v.jobs.runner.jobs(new[0])[-1].reason)
        job = v.jobs.runner.jobs(new[0])[-1]
        assert job.state in (JobState.QUEUED, JobState.RUNNING)
        assert job.reason_code == 3
        proxy.up()
        await published(v, [new])
        assert await _read_when_it_works(v, away, CHUNK) == data[away][:CHUNK]
        with trio.fail_after(40):
            await v.replicator.drain()
        assert not v.replicator.fenced

    run_volume(settings, before)
    proxy.down()
    run_volume(settings, during)
    is_clean(settings)


# -- answers that are no good ------------------------------------------------------------------------------------


@pytest.mark.expects_warnings
def test_slow_down_passes(proxy: FaultProxy, settings: Settings) -> None:
    async def body(v: Volume) -> None:
        slow = proxy.add(Fault(of("PUT"), times=5, status=503, code="SlowDown"))
        data = await put_some(v, 3)
        with trio.fail_after(40):
            await v.checkpoint("default")
        assert slow.used == 5
        await v.evict(list(data))
        proxy.add(Fault(of("GET"), times=2, status=503, code="SlowDown"))
        with trio.fail_after(40):
            for key, piece in data.items():
                assert await _read_when_it_works(v, key, len(piece)) == piece
        assert v.bare_remote.stats().throttled >= 5

    run_volume(settings, body)
    is_clean(settings)


@pytest.mark.expects_warnings
def test_denied_is_asked_again_by_itself(proxy: FaultProxy, settings: Settings) -> None:
    async def body(v: Volume) -> None:
        denied = proxy.add(Fault(of_blob("PUT"), times=None, status=403, code="AccessDenied"))
        data = await put_some(v, 2)
        tenant_id = next(iter(data))[0]
        await v.jobs.plan(tenant_id)
        while (job := v.jobs.runner.jobs(tenant_id)[0]).attempts < 2:
            await trio.sleep(0.01)
        assert denied.used >= 2
        assert (job.state in (JobState.QUEUED, JobState.RUNNING), job.reason_code) == (True, 2)
        refusal = v.remote.stats().refusal
        assert refusal is not None
        assert "AccessDenied" in refusal.why
        await check(v, data)
        proxy.clear()
        await published(v, list(data))
        assert v.remote.stats().refusal is None
        await v.checkpoint("default")
        assert (await v.evict(list(data)))[1] == []
        await check(v, data)

    run_volume(settings, body)
    is_clean(settings)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("harm", [{"cut_at": 0}, {"cut_at": 1000}, {"flip_at": 0}, {"flip_at": 777}])
def test_damage_on_the_way_down_is_never_served(proxy: FaultProxy, settings: Settings, harm: dict[str, int]) -> None:
    async def body(v: Volume) -> None:
        data = await put_some(v, 3)
        await v.checkpoint("default")
        keys = list(data)
        await v.evict(keys)
        passing = proxy.add(Fault(of_blob("GET"), times=1, **harm))
        assert await read_object(v, keys[0], 0, CHUNK + 100) == data[keys[0]]
        assert passing.used == 1
        assert 4 not in await trio.to_thread.run_sync(failures, v, keys[0][0])
        lasting = proxy.add(Fault(of_blob("GET"), times=None, **harm))
        with trio.fail_after(20), pytest.raises(Aof2Error) as e:
            await read_object(v, keys[1], 0, CHUNK + 100)
        assert lasting.used > 1
        assert "\n" not in str(e.value)
        reasons = await trio.to_thread.run_sync(failures, v, keys[0][0])
        assert (4 in reasons) == ("flip_at" in harm), reasons
        assert v.quota.usage.reserved_bytes == 0
        proxy.clear()
        with trio.fail_after(40):
            for key in keys:
                assert await _read_when_it_works(v, key, CHUNK + 100) == data[key]

    run_volume(settings, body)
    is_clean(settings)


@pytest.mark.expects_warnings
def test_a_bucket_that_is_missing(
    server: Seaweed, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume, "DRAIN_MAX_S", 0.5)
    settings = s3_settings(server, tmp_path, proxy.endpoint_url, bucket="no-such-bucket")

    async def body(v: Volume) -> None:
        data = await put_some(v, 2)
        tenant_id = next(iter(data))[0]
        await v.checkpoint("default", wait=False)
        await until(lambda: v.jobs.runner.jobs(tenant_id)[0].reason)
        job = v.jobs.runner.jobs(tenant_id)[0]
        assert "not exist" in job.reason
        assert job.reason_code == 3
        assert (await v.evict(list(data))) == (0, list(data))
        await check(v, data)

    run_volume(settings, body)
    is_clean(settings, deep_remote=False)


# -- nothing to do -------------------------------------------------------------------------------------------------


def test_an_idle_volume_writes_nothing(server: Seaweed, proxy: FaultProxy, settings: Settings) -> None:
    async def body(v: Volume) -> None:
        data = await put_some(v, 3)
        await v.checkpoint("default")
        await v.evict(list(data)[:1])
        await check(v, data)
        await v.hydrator.quiesce()
        await trio.sleep(1.5)  # read-ahead, the settling after it and the last rotation
        await v.replicator.drain()
        before = await trio.to_thread.run_sync(_everything, v)
        proxy.clear()
        groups = v.writer.groups
        await trio.sleep(3)
        assert v.writer.groups == groups
        assert proxy.seen == []
        assert await trio.to_thread.run_sync(_everything, v) == before

    run_volume(settings, body)


def _everything(v: Volume) -> tuple[list[tuple[str, int, int]], list[tuple[str, int]]]:
    """Every file of the logs and every remote object, with what tells whether it changed."""
    files = [
        (str(path), stat.st_size, stat.st_mtime_ns)
        for path in sorted(v.manifest_dir.rglob("*"))
        for stat in [path.stat()]
    ]
    return files, sorted((blob.key, blob.size) for blob in v.bare_remote.list())
