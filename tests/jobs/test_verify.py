"""VerifyManifest: finds what is wrong in the remote, and puts right what it can from local bytes."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.fold import load_index
from aof2.engine.catalog.rows import JobState, JobType
from aof2.engine.jobs import queue
from aof2.engine.jobs.errors import JobFailedError
from aof2.engine.remote.errors import RemoteUnavailableError
from tests.engine.helpers import backing_path, read_object, small_settings

from .helpers import CHUNK, TENANT, Clock, World, run_world


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def flip(path: Path, at: int = 100) -> None:
    """Damages a byte as a disk would: nobody is told."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def needs_repair(w: World) -> list[int]:
    with w.v.catalog.view() as view:
        return load_index(view, TENANT).needs_repair


async def verified(w: World, **scope: int) -> dict[str, object]:
    job_id = await w.jobs.verify(TENANT, **scope)
    row = await w.wait(TENANT, job_id)
    return queue.report(row)


@pytest.mark.parametrize("compression", ["zstd", "none"])
def test_good_blobs_are_marked(tmp_path: Path, compression: str) -> None:
    async def body(w: World) -> None:
        await w.put("a", content(1, 3 * CHUNK + 7))
        await w.put("b", bytes(CHUNK))
        await w.jobs.checkpoint(TENANT)
        used = w.v.quota.usage
        report = await verified(w)
        assert (report["blobs"], report["good"], report["lost"]) == (5, 5, 0)
        assert all(blob.verified_ms for blob in w.rows(t.BLOBS).values())
        assert w.v.quota.usage == used
        job = next(row for row in w.all_jobs() if row.type == JobType.VERIFY_MANIFEST)
        assert (job.state, job.done, job.total) == (JobState.DONE, 5, 5)

    run_world(small_settings(tmp_path, compression=compression), body)


def test_one_checkpoint_alone(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        for i in range(3):
            await w.put(f"f{i}", content(i, 2 * CHUNK))
            await w.jobs.checkpoint(TENANT)
        report = await verified(w, checkpoint_id=2)
        assert (report["blobs"], report["good"]) == (2, 2)
        assert sum(blob.verified_ms > 0 for blob in w.rows(t.BLOBS).values()) == 2

    run_world(tmp_path, body)


@pytest.mark.expects_warnings
@pytest.mark.parametrize("compression", ["zstd", "none"])
@pytest.mark.parametrize("harm", ["flip", "remove", "cut", "grow", "swap"])
def test_what_is_damaged_is_rebuilt_from_local_bytes(tmp_path: Path, harm: str, compression: str) -> None:
    async def body(w: World) -> None:
        data = content(1, 3 * CHUNK)
        key = await w.put("a", data)
        await w.jobs.checkpoint(TENANT)
        blobs = [tmp_path / "remote" / name for name in w.remote_blobs()]
        good = blobs[1].read_bytes()
        match harm:
            case "flip":
                flip(blobs[1])
            case "remove":
                blobs[1].unlink()
            case "cut":
                blobs[1].write_bytes(good[:-10])
            case "grow":
                blobs[1].write_bytes(good + b"x")
            case "swap":
                blobs[1].write_bytes(blobs[0].read_bytes())
        report = await verified(w)
        assert (report["good"], report["rebuilt"], report["lost"]) == (2, 1, 0)
        assert report["missing" if harm == "remove" else "damaged"] == 1
        assert blobs[1].read_bytes() == good
        assert needs_repair(w) == []
        assert (await verified(w))["good"] == 3
        await w.v.evict([key])
        assert await read_object(w.v, key, 0, len(data)) == data

    run_world(small_settings(tmp_path, compression=compression), body)


@pytest.mark.expects_warnings
def test_what_has_no_good_copy_left_is_named(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        data = content(1, 2 * CHUNK)
        key = await w.put("a", data)
        await w.jobs.checkpoint(TENANT)
        await w.v.evict([key])
        path = tmp_path / "remote" / w.remote_blobs()[0]
        flip(path)
        with pytest.raises(
            JobFailedError, match="1 of 2 blobs are lost and need repair: checkpoints/default/1/chunk-1"
        ):
            await verified(w)
        assert needs_repair(w) == [1]
        job = next(row for row in w.all_jobs() if row.type == JobType.VERIFY_MANIFEST)
        assert (job.state, job.reason_code) == (JobState.FAILED, 4)
        assert queue.report(job)["lost_keys"] == [w.remote_blobs()[0]]
        flip(path)  # somebody brought it back
        assert await w.jobs.runner.retry(TENANT, job.job_id)
        row = await w.wait(TENANT, job.job_id)
        assert queue.report(row)["good"] == 2

    run_world(tmp_path, body)


@pytest.mark.expects_warnings
def test_a_damaged_local_copy_rebuilds_nothing(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        key = await w.put("a", content(1, CHUNK))
        await w.jobs.checkpoint(TENANT)
        flip(backing_path(w.v, key))
        path = tmp_path / "remote" / w.remote_blobs()[0]
        flip(path)
        before = path.read_bytes()
        with pytest.raises(JobFailedError, match="lost"):
            await verified(w)
        assert path.read_bytes() == before  # not deleted on the strength of bytes that are no better

    run_world(tmp_path, body)


@pytest.mark.expects_warnings
def test_a_twin_stands_in(tmp_path: Path) -> None:
    """The blob was uploaded for one object; another with the same content still has its bytes here."""

    async def body(w: World) -> None:
        data = content(1, CHUNK)
        first = await w.put("a", data)
        await w.jobs.checkpoint(TENANT)
        await w.put("b", data)
        await w.jobs.checkpoint(TENANT)
        await w.v.evict([first])
        (name,) = w.remote_blobs()
        flip(tmp_path / "remote" / name)
        assert (await verified(w))["rebuilt"] == 1
        assert (await verified(w))["good"] == 1
        assert await read_object(w.v, first, 0, CHUNK) == data

    run_world(tmp_path, body)


@pytest.mark.usefixtures("blobs_alone")
def test_a_remote_that_is_away_damages_nothing(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        for i in range(40):
            await w.put(f"f{i}", content(i, 100))
        await w.jobs.checkpoint(TENANT)
        await w.until(lambda: all(row.state == JobState.DONE for row in w.all_jobs()))
        fine: set[str] = set()

        def fail(op: str, key: str) -> Exception | None:
            fine.add(key)
            return RemoteUnavailableError("away") if len(fine) > 35 else None

        w.remote.fail = fail
        job_id = await w.jobs.verify(TENANT)
        await w.until(lambda: w.job(job_id).attempts == 1)
        row = w.job(job_id)
        assert (row.state, row.done, row.total) == (JobState.QUEUED, 32, 40)
        assert needs_repair(w) == []
        w.remote.fail = lambda op, key: None
        w.remote.calls.clear()
        await w.jobs.runner.retry(TENANT, job_id)
        row = await w.wait(TENANT, job_id)
        assert (row.done, row.total) == (40, 40)
        assert len(set(w.remote.keys("get"))) == 8  # it went on where it was

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())
