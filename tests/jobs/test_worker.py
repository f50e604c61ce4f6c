"""The runner: slots, leases, errors, cancellation, quota, whatever the executors do."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from aof2.engine.catalog.rows import JobState, JobType
from aof2.engine.errors import CorruptError, TransientError
from aof2.engine.jobs.errors import JobFailedError
from aof2.engine.jobs.worker import JobContext

from .helpers import TENANT, Clock, World, run_world

VERIFY = JobType.VERIFY_MANIFEST


class Fake:
    """An executor that does what a test says."""

    def __init__(self, act: Callable[[JobContext], Awaitable[None]]) -> None:
        self.act = act
        self.runs = 0

    async def run(self, job: JobContext) -> None:
        self.runs += 1
        await self.act(job)


def use(w: World, act: Callable[[JobContext], Awaitable[None]], job_type: JobType = VERIFY) -> Fake:
    fake = w.jobs.runner.executors[job_type] = Fake(act)
    return fake


def test_long_jobs_leave_room_for_checkpoints(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        go = trio.Event()

        async def wait(job: JobContext) -> None:
            await go.wait()

        use(w, wait)
        ids = [await w.jobs.verify(TENANT, token=f"t{i}") for i in range(4)]
        await w.until(lambda: sum(w.job(i).state == JobState.RUNNING for i in ids) == 2)
        await w.put("a", b"x" * 1000)
        assert await w.jobs.checkpoint(TENANT) == 1
        assert [w.job(i).state for i in ids] == [JobState.RUNNING] * 2 + [JobState.QUEUED] * 2
        go.set()
        for job_id in ids:
            await w.wait(TENANT, job_id)

    run_world(tmp_path, body)


def test_a_lease_is_renewed_as_long_as_the_job_runs(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        go = trio.Event()

        async def wait(job: JobContext) -> None:
            await go.wait()

        fake = use(w, wait)
        job_id = await w.jobs.verify(TENANT)
        first = (await w.until_state(job_id, JobState.RUNNING)).lease_until_ms
        while w.job(job_id).lease_until_ms < first + 600_000:
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(1)
        go.set()
        await w.wait(TENANT, job_id)
        assert fake.runs == 1

    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


@pytest.mark.expects_warnings
def test_a_bug_fails_the_job_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(w: World) -> None:
        async def crash(job: JobContext) -> None:
            raise KeyError("oops")

        use(w, crash)
        job_id = await w.jobs.verify(TENANT)
        with pytest.raises(JobFailedError, match="unexpected KeyError: 'oops'"):
            await w.wait(TENANT, job_id)
        await w.put("a", b"x")
        assert await w.jobs.checkpoint(TENANT) == 1

    run_world(tmp_path, body)
    assert "job failed in an unexpected way" in caplog.text


def test_a_job_that_may_work_later_ends_after_its_attempts(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        async def away(job: JobContext) -> None:
            raise TransientError("away", reason_code=3)

        fake = use(w, away)
        job_id = await w.jobs.verify(TENANT)
        for attempt in range(1, 8):
            await w.until(lambda n=attempt: w.job(job_id).attempts == n)
            clock.jump(61)
        with pytest.raises(JobFailedError, match="away"):
            await w.wait(TENANT, job_id)
        assert (fake.runs, w.job(job_id).attempts) == (8, 8)

    clock = Clock()
    run_world(tmp_path, body, clock=clock.mock, env=clock.env())


def test_damage_is_not_tried_again(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        async def damaged(job: JobContext) -> None:
            raise CorruptError("bad bytes", path="x")

        fake = use(w, damaged)
        job_id = await w.jobs.verify(TENANT)
        with pytest.raises(JobFailedError, match="bad bytes"):
            await w.wait(TENANT, job_id)
        assert fake.runs == 1

    run_world(tmp_path, body)


@pytest.mark.parametrize("end", ["well", "badly", "cancelled"])
def test_quota_is_given_back_whatever_happens(tmp_path: Path, end: str) -> None:
    async def body(w: World) -> None:
        async def hoard(job: JobContext) -> None:
            assert w.v.quota.try_reserve("default", 12345, job.name)
            if end == "badly":
                raise CorruptError("no")
            if end == "cancelled":
                await w.jobs.runner.cancel(TENANT, job.row.job_id)
                job.check_cancelled()

        use(w, hoard)
        job_id = await w.jobs.verify(TENANT)
        await w.until(lambda: w.job(job_id).state not in (JobState.QUEUED, JobState.RUNNING))
        await w.until(lambda: w.v.quota.usage.reserved_bytes == 0)
        expected = {"well": JobState.DONE, "badly": JobState.FAILED, "cancelled": JobState.CANCELLED}
        assert w.job(job_id).state == expected[end]

    run_world(tmp_path, body)


def test_asking_twice_is_asking_once(tmp_path: Path) -> None:
    async def body(w: World) -> None:
        go = trio.Event()

        async def wait(job: JobContext) -> None:
            await go.wait()

        fake = use(w, wait)
        first = await w.jobs.verify(TENANT)
        assert await w.jobs.verify(TENANT) == first
        await w.until_state(first, JobState.RUNNING)
        assert await w.jobs.verify(TENANT) == first
        go.set()
        await w.wait(TENANT, first)
        second = await w.jobs.verify(TENANT)
        assert second != first
        await w.wait(TENANT, second)
        assert fake.runs == 2

    run_world(tmp_path, body)


def test_a_wish_to_cancel_survives_a_stop(tmp_path: Path) -> None:
    """Asked to stop, and shut down before it got round to it: it does not start again."""

    async def first(w: World) -> None:
        async def for_ever(job: JobContext) -> None:
            await trio.sleep_forever()

        use(w, for_ever)
        job_id = await w.jobs.verify(TENANT)
        await w.until_state(job_id, JobState.RUNNING)
        await w.jobs.runner.cancel(TENANT, job_id)

    async def second(w: World) -> None:
        await w.until_state(1, JobState.CANCELLED)

    run_world(tmp_path, first)
    run_world(tmp_path, second)


def test_a_catalog_that_takes_no_writes_stops_nothing_for_good(tmp_path: Path) -> None:
    clock = Clock()

    async def body(w: World) -> None:
        async def well(job: JobContext) -> None:
            pass

        use(w, well)
        job_id = await w.jobs.verify(TENANT)
        w.v.target.enabled = False
        async with w.running():
            w.jobs.runner.wake()
            await trio.testing.wait_all_tasks_blocked()
            assert w.job(job_id).state == JobState.QUEUED
            w.v.target.enabled = True
            while w.job(job_id).state != JobState.DONE:
                clock.jump(1)
                await trio.testing.wait_all_tasks_blocked()

    run_world(tmp_path, body, clock=clock.mock, env=clock.env(), start=False)
