"""CreateCheckpoint: planned once, published in order, resumed where it stopped."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import JobState, JobType, ObjectState
from aof2.engine.jobs import checkpoint, prune
from aof2.engine.jobs.errors import JobFailedError
from aof2.engine.observe.metrics import StorageMetrics
from aof2.engine.remote.errors import RemoteAuthError, RemoteUnavailableError
from tests.engine.helpers import backing_path, object_row, read_object, small_settings

from .helpers import CHUNK, KEEP, TENANT, Clock, World, run_world


def content(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, set[str]]]:
    """The events of checkpoints, with the names of their fields."""
    events = [vars(r) for r in caplog.records if r.getMessage().startswith("checkpoint.")]
    return [(event["aof2_event"], set(event["aof2_fields"])) for event in events]


def test_everything_sealed_is_published(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    metrics = StorageMetrics()

    async def body(w: World) -> None:
        keys = [await w.put(f"f{i}", content(i, size)) for i, size in enumerate([0, 1, CHUNK, 3 * CHUNK + 5])]
        assert await w.jobs.checkpoint(TENANT) == 4
        assert all(object_row(w.v, key).state == ObjectState.PUBLISHED for key in keys)
        (job,) = w.all_jobs()
        await w.until_state(job.job_id, JobState.DONE)
        job = w.job(job.job_id)
        assert (job.type, job.done, job.total) == (JobType.CREATE_CHECKPOINT, 6, 6)
        assert w.remote.count("put") == 6
        assert w.quota_is_even()
        assert await w.jobs.checkpoint(TENANT) == 0
        assert metrics.checkpoint_bytes_written_remote.value == w.v.publisher.uploaded_bytes
        while not metrics.checkpoint_duration_seconds.count:  # a moment after its commit
            await trio.sleep(0.001)
        assert metrics.checkpoint_duration_seconds.count == 1
        assert metrics.checkpoint_queue_depth.value == 0

    run_world(tmp_path, body, metrics=metrics)
    assert told(caplog) == [
        ("checkpoint.started", {"job_id", "tenant", "plan_size_bytes", "wal_range"}),
        ("checkpoint.staged", {"job_id", "staged_chunks", "staged_bytes", "duration_ms"}),
        ("checkpoint.uploaded", {"job_id", "uploaded_blobs", "uploaded_bytes", "duration_ms"}),
        ("checkpoint.published", {"job_id", "manifest_generation", "checkpoint_id"}),
        ("checkpoint.cleaned_up", {"job_id", "quota_released_bytes"}),
    ]


def test_a_seal_is_enough(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        key = await w.put("a", content(1, 1000))
        w.jobs.sealed(TENANT, 1000)
        await w.jobs.wait_published([key])
        assert object_row(w.v, key).state == ObjectState.PUBLISHED

    run_world(tmp_path, body)


def test_plans_are_bounded_and_keep_their_order(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        for i in range(7):
            await w.put(f"f{i}", content(i, 1000))
        made = await w.jobs.plan(TENANT)
        plans = [checkpoint.plan_of(w.job(job_id)) for job_id in made]
        assert [len(p.objects) for p in plans] == [2, 2, 2, 1]
        assert [p.checkpoint_id for p in plans] == [1, 2, 3, 4]
        planned = [key for p in plans for key in p.objects]
        assert planned == sorted(planned) == list(w.rows(t.UNPUBLISHED))
        assert await w.jobs.plan(TENANT) == []

    run_world(tmp_path, body, start=False, plan_objects_max=2)


def test_more_than_fits_the_plans_is_planned_as_they_end(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        for i in range(12):
            await w.put(f"f{i}", content(i, 100))
        assert await w.jobs.checkpoint(TENANT) == 12
        assert {checkpoint.plan_of(job).checkpoint_id for job in w.all_jobs()} == set(range(1, 13))

    run_world(tmp_path, body, plan_objects_max=1)


def test_an_idle_volume_writes_nothing(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        await w.put("a", content(1, 10))
        await w.jobs.checkpoint(TENANT)
        await w.until(lambda: w.all_jobs()[0].state == JobState.DONE)
        clock.jump(1)  # what the last job set off
        await trio.testing.wait_all_tasks_blocked()
        with w.v.catalog.view() as view:
            before = view.position(TENANT)
        for _ in range(10):
            clock.jump(600)
            await trio.testing.wait_all_tasks_blocked()
        assert not prune.is_due(w.v.catalog, TENANT, clock.now_ms(), KEEP)
        with w.v.catalog.view() as view:
            assert view.position(TENANT) == before

    clock = Clock()
    run_world(tmp_path, body, clock=clock.mock, env=clock.env(), prune_every_s=600.0)


def test_equal_content_goes_up_once(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        zeros = await w.put("zeros", bytes(5 * CHUNK))
        twin = await w.put("twin", bytes(2 * CHUNK))
        await w.jobs.checkpoint(TENANT)
        assert w.remote.count("put") == 1
        (blob,) = w.rows(t.BLOBS).values()
        assert blob.refs == 7
        assert {c.key for c in w.rows(t.CHUNKS).values()} == {blob.key}
        await w.v.evict([zeros, twin])
        assert await read_object(w.v, twin, 0, 2 * CHUNK) == bytes(2 * CHUNK)

    run_world(tmp_path, body, plan_objects_max=1)


def test_a_failing_remote_is_tried_again_after_a_backoff(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()

    async def body(w: World) -> None:
        w.remote.fail = lambda op, key: RemoteUnavailableError("away") if op == "put" else None
        key = await w.put("a", content(1, 2 * CHUNK))
        await w.jobs.plan(TENANT)
        (job,) = w.all_jobs()
        for attempt in range(1, 12):  # more often than anything else is tried
            await w.until(lambda n=attempt: w.job(job.job_id).attempts == n)
            row = w.job(job.job_id)
            assert (row.state, row.reason_code, row.reason) == (JobState.QUEUED, 3, "away")
            wait_ms = row.not_before_ms - clock.now_ms()
            full = min(60_000, 500 << (attempt - 1))
            assert full // 2 <= wait_ms <= full
            clock.jump((wait_ms + 1) / 1000)
        await w.until(lambda: w.job(job.job_id).attempts == 12)
        w.remote.fail = lambda op, key: None
        assert await w.jobs.runner.kick() == [(TENANT, job.job_id)]
        await w.jobs.wait_published([key])
        row = await w.until_state(job.job_id, JobState.DONE)
        assert (row.reason, row.done, row.total) == ("", 2, 2)

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())
    assert told(caplog).count(("checkpoint.failed", {"job_id", "error", "stage", "retryable"})) == 12


def test_wrong_credentials_are_tried_again_by_themselves(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        w.remote.fail = lambda op, key: RemoteAuthError("403 AccessDenied") if op == "put" else None
        key = await w.put("a", content(1, CHUNK))
        await w.jobs.plan(TENANT)
        (job,) = w.all_jobs()
        for attempt in range(1, 11):  # more often than what is given up in the end
            await w.until(lambda n=attempt: w.job(job.job_id).attempts == n)
            row = w.job(job.job_id)
            assert (row.state, row.reason_code, row.reason) == (JobState.QUEUED, 2, "403 AccessDenied")
            clock.jump(61)
        w.remote.fail = lambda op, key: None
        clock.jump(61)
        await w.jobs.wait_published([key])

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_a_damaged_object_fails_the_job_and_not_the_others(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        good = await w.put("good", content(1, CHUNK))
        bad = await w.put("bad", content(2, CHUNK))
        path = backing_path(w.v, bad)
        data = bytearray(path.read_bytes())
        data[7] ^= 1
        path.write_bytes(data)
        with pytest.raises(JobFailedError, match=f"object {bad[1]}.1"):
            await w.jobs.checkpoint(TENANT)
        assert object_row(w.v, good).state == ObjectState.PUBLISHED
        assert object_row(w.v, bad).state == ObjectState.SEALED
        (job,) = w.all_jobs()
        assert (job.state, job.reason_code, job.done, job.total) == (JobState.FAILED, 1, 1, 2)
        data[7] ^= 1
        path.write_bytes(data)
        assert await w.jobs.checkpoint(TENANT) == 1
        assert w.remote.count("put") == 2

    run_world(tmp_path, body)


def test_what_is_gone_or_written_again_is_passed_over(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        keys = [await w.put(f"f{i}", content(i, CHUNK)) for i in range(3)]
        await w.jobs.plan(TENANT)

        def unlink(b):  # type: ignore[no-untyped-def]
            for chunk_id in object_row(w.v, keys[0]).chunks:
                b.delete(t.CHUNKS, chunk_id)
            b.delete(t.OBJECTS, keys[0][1:])

        def reopen(b):  # type: ignore[no-untyped-def]
            row = b.get(t.OBJECTS, keys[1][1:])
            b.put(t.OBJECTS, keys[1][1:], msgspec.structs.replace(row, state=ObjectState.DIRTY))

        w.v.writer.call(TENANT, unlink)
        w.v.writer.call(TENANT, reopen)
        async with w.running():
            await w.jobs.wait_published(keys)
            await w.until(lambda: w.all_jobs()[0].state == JobState.DONE)
        assert object_row(w.v, keys[2]).state == ObjectState.PUBLISHED
        assert object_row(w.v, keys[1]).state == ObjectState.DIRTY
        assert w.remote.count("put") == 1
        job = w.all_jobs()[0]
        assert (job.done, job.total) == (1, 1)

    run_world(tmp_path, body, start=False)


def test_progress_is_seen_from_outside(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        seen: list[tuple[int, int]] = []
        key = await w.put("a", content(1, 12 * CHUNK))
        await w.jobs.plan(TENANT)
        (job,) = w.all_jobs()

        def look() -> bool:
            row = w.job(job.job_id)
            seen.append((row.done, row.total))
            return row.state == JobState.DONE

        await w.until(look)
        assert object_row(w.v, key).state == ObjectState.PUBLISHED
        assert seen[-1] == (12, 12)
        assert any(0 < done < 12 for done, _ in seen)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    run_world(tmp_path, body)


@pytest.mark.usefixtures("blobs_alone")
def test_cancel_stops_between_objects(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        w.remote.gate.clear()
        for i in range(30):
            await w.put(f"f{i}", content(i, 100))
        await w.jobs.plan(TENANT)
        (job,) = w.all_jobs()
        await w.until_state(job.job_id, JobState.RUNNING)
        assert await w.jobs.runner.cancel(TENANT, job.job_id) == JobState.RUNNING
        w.remote.gate.set()
        await w.until_state(job.job_id, JobState.CANCELLED)
        published = 30 - len(w.rows(t.UNPUBLISHED))
        assert published < 30
        assert w.quota_is_even()
        assert await w.jobs.checkpoint(TENANT) == 30 - published
        assert w.remote.count("put") == 30

    run_world(tmp_path, body)


@pytest.mark.usefixtures("blobs_alone")
def test_stopping_the_volume_leaves_the_job_for_the_next_start(tmp_path: Path) -> None:
    settings = small_settings(tmp_path)
    record = tmp_path / "calls"

    async def first(w: World) -> None:
        w.remote.gate.clear()
        for i in range(20):
            await w.put(f"f{i}", content(i, 100))
        await w.jobs.plan(TENANT)
        await w.until_state(1, JobState.RUNNING)

    async def between(w: World) -> None:
        job = w.job(1)
        assert (job.state, job.attempts, job.lease_until_ms) == (JobState.QUEUED, 0, 0)

    async def second(w: World) -> None:
        await w.until_state(1, JobState.DONE)
        assert not w.rows(t.UNPUBLISHED)

    run_world(settings, first, record=record)
    run_world(settings, between, start=False)
    run_world(settings, second, record=record)
    puts = [line for line in record.read_text().splitlines() if line.startswith("put ")]
    assert len(puts) == len(set(puts)) == 20


def test_no_room_to_stage_means_no_compression_and_no_waiting(tmp_path: Path) -> None:
    """A cache full of dirty bytes must be able to empty itself."""
    big = 5 << 20
    settings = small_settings(tmp_path, hot_bytes=big, chunk_bytes=big - (big % CHUNK), block_bytes=1 << 20)

    async def body(w: World) -> None:
        key = await w.put("a", os.urandom(100) * (big // 100))
        await w.jobs.checkpoint(TENANT)
        assert object_row(w.v, key).state == ObjectState.PUBLISHED
        assert w.quota_is_even()
        assert not list((tmp_path / "state" / "checkpoint_scratch").rglob("*.blob"))

    run_world(settings, body)


def test_staging_is_counted_and_cleaned_up(tmp_path: Path) -> None:
    metrics = StorageMetrics()
    settings = small_settings(tmp_path, chunk_bytes=8 << 20, block_bytes=1 << 20)

    async def body(w: World) -> None:
        await w.put("a", os.urandom(1 << 10) * (5 << 10))
        await w.jobs.checkpoint(TENANT)
        await w.until(lambda: w.all_jobs()[0].state == JobState.DONE)
        staged = metrics.checkpoint_bytes_written_local.value
        assert staged == w.v.publisher.uploaded_bytes > 0
        assert staged < 5 << 20
        assert w.quota_is_even()
        # What does not shrink goes as it lies.
        await w.put("b", os.urandom(5 << 20))
        await w.jobs.checkpoint(TENANT)
        assert w.v.publisher.uploaded_bytes > staged + (5 << 20)
        assert metrics.checkpoint_bytes_written_local.value == staged
        assert w.quota_is_even()
        scratch = tmp_path / "state" / "checkpoint_scratch"
        assert not [p for p in scratch.rglob("*") if p.is_file()]

    run_world(settings, body, metrics=metrics)


def test_a_plan_whose_caller_went_away_is_run(tmp_path: Path) -> None:
    """It is claimed with its commit: nobody else would take it before its lease ends."""

    async def body(w: World) -> None:
        key = await w.put("a", content(1, 100))
        with trio.CancelScope() as scope:
            scope.cancel()
            await w.jobs.plan(TENANT)
        await w.until(lambda: object_row(w.v, key).state == ObjectState.PUBLISHED)

    run_world(tmp_path, body)
