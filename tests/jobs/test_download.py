"""DownloadCheckpoint: everything here before anybody asks, or a reason why not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from aof2.engine.catalog.rows import JobState, JobType
from aof2.engine.jobs.errors import JobFailedError
from aof2.engine.objects import on_disk
from aof2.engine.remote.errors import RemoteUnavailableError
from tests.engine.helpers import read_object, small_settings

from .helpers import CHUNK, TENANT, Clock, World, run_world


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def test_everything_comes_back(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    data = {i: content(i, 2 * CHUNK + i) for i in range(3)}
    keys: dict[int, tuple[int, int, int]] = {}

    async def body(w: World) -> None:
        for i, piece in data.items():
            keys[i] = await w.put(f"f{i}", piece)
        await w.jobs.checkpoint(TENANT)
        await w.v.evict(list(keys.values()))
        assert w.v.quota.usage.used_bytes == 0
        job_id = await w.jobs.download(TENANT)
        row = await w.wait(TENANT, job_id)
        assert (row.done, row.total) == (8, 8)
        assert w.v.quota.usage.used_bytes == sum(on_disk(len(d)) for d in data.values())
        assert w.quota_is_even()
        w.remote.calls.clear()
        again = await w.jobs.download(TENANT)
        assert again != job_id
        await w.wait(TENANT, again)
        assert w.remote.calls == []

    async def later(w: World) -> None:
        for i, piece in data.items():
            assert await read_object(w.v, keys[i], 0, len(piece)) == piece
        assert w.remote.calls == []  # it was recorded

    run_world(settings, body)
    run_world(settings, later)


def test_one_checkpoint_or_named_objects(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        keys = []
        for i in range(3):
            keys.append(await w.put(f"f{i}", content(i, CHUNK)))
            await w.jobs.checkpoint(TENANT)
        await w.v.evict(keys)
        await w.wait(TENANT, await w.jobs.download(TENANT, checkpoint_id=2))
        assert [bool(w.v.evictor.hot_bytes_of(key)) for key in keys] == [False, True, False]
        await w.wait(TENANT, await w.jobs.download(TENANT, objects=[keys[2][1:]]))
        assert [bool(w.v.evictor.hot_bytes_of(key)) for key in keys] == [False, True, True]

    run_world(tmp_path, body)


def test_more_than_may_be_here_is_refused(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        keys = []
        for i in range(6):
            keys.append(await w.put(f"f{i}", content(i, CHUNK)))
            await w.jobs.checkpoint(TENANT)
        await w.v.evict(keys)
        w.remote.calls.clear()
        job_id = await w.jobs.download(TENANT)
        with pytest.raises(JobFailedError, match="no room for 1536KiB within the 1MiB of the volume"):
            await w.wait(TENANT, job_id)
        assert w.remote.calls == []

    run_world(small_settings(tmp_path, hot_bytes=4 * CHUNK), body)


def test_an_interrupted_download_goes_on(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        keys = []
        for i in range(8):
            keys.append(await w.put(f"f{i}", content(i, CHUNK)))
            await w.jobs.checkpoint(TENANT)  # together they would share one object
        await w.v.evict(keys)
        seen: set[str] = set()

        def fail(op: str, key: str) -> Exception | None:
            seen.add(key)
            return RemoteUnavailableError("away") if len(seen) > 5 else None

        w.remote.fail = fail
        job_id = await w.jobs.download(TENANT)
        await w.until(lambda: w.job(job_id).attempts == 1)
        row = w.job(job_id)
        assert (row.state, row.reason, row.done, row.total) == (JobState.QUEUED, "away", 5, 8)
        assert w.v.quota.usage.reserved_bytes == 0
        w.remote.fail = lambda op, key: None
        w.remote.calls.clear()
        await w.jobs.runner.retry(TENANT, job_id)
        row = await w.wait(TENANT, job_id)
        assert (row.done, row.total) == (8, 8)
        assert len(set(w.remote.keys("get"))) == 3

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_what_is_lost_is_named_and_the_rest_comes(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        keys = [await w.put(f"f{i}", content(i, CHUNK)) for i in range(3)]
        await w.jobs.checkpoint(TENANT)
        await w.v.evict(keys)
        (tmp_path / "remote" / w.remote_blobs()[1]).unlink()
        job_id = await w.jobs.download(TENANT)
        with pytest.raises(JobFailedError, match="1 of 3 objects cannot be had"):
            await w.wait(TENANT, job_id)
        assert w.job(job_id).reason_code == 4
        assert [bool(w.v.evictor.hot_bytes_of(key)) for key in keys].count(True) == 2

    run_world(tmp_path, body)


def test_truncation_is_refused_with_a_reason(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        job_id = await w.jobs.runner.enqueue(TENANT, JobType.TRUNCATE_APPEND_ONLY, "truncate")
        with pytest.raises(JobFailedError, match="append streams cannot be truncated yet; nothing was changed"):
            await w.wait(TENANT, job_id)

    run_world(tmp_path, body)
