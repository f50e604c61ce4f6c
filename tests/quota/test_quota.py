"""StorageQuota: budgets, leases, the disk, and who is served first."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from aof2.engine.quota import (
    DiskSpace,
    Level,
    QuotaExceededError,
    Reservation,
    ReservationExpiredError,
    StorageQuota,
    Usage,
    disk_space,
)
from aof2.engine.units import MinFree


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def refusal(caught: pytest.ExceptionInfo[QuotaExceededError]) -> tuple[Level, bool]:
    return caught.value.level, caught.value.never


# -- accounting ----------------------------------------------------------------------------------------------------


def test_reserved_becomes_used_and_goes_back() -> None:
    quota = StorageQuota(100, tenants={"a": 80}, clock_s=Clock())
    held = quota.try_reserve("a", 60)
    assert held is not None
    assert quota.usage == Usage(0, 60, 100)
    held.commit(25)
    assert held.remaining_bytes == 35
    assert quota.tenant_usage("a") == Usage(25, 35, 80)
    assert held.release() == 35
    assert held.release() == 0
    assert quota.usage == Usage(25, 0, 100)
    quota.release_used("a", 25)
    assert quota.usage == Usage(0, 0, 100)


def test_each_level_refuses() -> None:
    refused = []
    quota = StorageQuota(100, tenants={"a": 50}, clock_s=Clock(), on_exhausted=lambda: refused.append(1))
    quota.set_job_limit("j", 20)
    assert quota.try_reserve("a", 21, job="j") is None
    assert quota.try_reserve("a", 20, job="j")
    assert quota.try_reserve("a", 31) is None
    assert quota.try_reserve("b", 81) is None
    assert quota.try_reserve("b", 80)
    assert quota.try_reserve("c", 1) is None
    assert quota.try_reserve("c", 0)
    assert len(refused) == 4


def test_a_block_gives_back_what_did_not_land() -> None:
    quota = StorageQuota(100, clock_s=Clock())
    with pytest.raises(ZeroDivisionError), quota.try_reserve("a", 70) or pytest.fail("no room") as held:
        held.commit(10)
        raise ZeroDivisionError
    assert quota.usage == Usage(10, 0, 100)


def test_more_cannot_land_than_was_reserved() -> None:
    quota = StorageQuota(100, clock_s=Clock())
    held = quota.try_reserve("a", 10)
    assert held is not None
    for size in (11, -1):
        with pytest.raises(ValueError, match="10 were reserved"):
            held.commit(size)
    for size in (1, -1):
        with pytest.raises(ValueError, match="not in use"):
            quota.release_used("a", size)
    with pytest.raises(ValueError):
        quota.try_reserve("a", -1)
    with pytest.raises(ValueError):
        quota.note_used("a", -1)
    with pytest.raises(ValueError):
        held.resize(-1)
    assert quota.usage == Usage(0, 10, 100)


def test_a_reservation_is_resized() -> None:
    quota = StorageQuota(100, clock_s=Clock())
    held = quota.try_reserve("a", 50)
    assert held is not None
    held.commit(10)
    assert held.resize(90)
    assert not held.resize(91)
    assert quota.usage == Usage(10, 90, 100)
    assert held.resize(5)
    assert quota.usage == Usage(10, 5, 100)


def test_a_job_keeps_to_its_limit_until_it_ends() -> None:
    quota = StorageQuota(100, clock_s=Clock())
    quota.set_job_limit("j", 30)
    first = quota.try_reserve("a", 20, job="j")
    assert first is not None
    first.commit(20)
    first.release()
    assert quota.try_reserve("a", 11, job="j") is None
    quota.release_used("a", 5, job="j")
    assert quota.try_reserve("a", 15, job="j")
    assert quota.job_usage("j") == Usage(15, 15, 30)
    assert quota.release_job("j") == 15
    assert quota.job_usage("j") == Usage(0, 0, None)
    assert quota.usage == Usage(15, 0, 100)


def test_a_job_without_a_limit_is_forgotten() -> None:
    quota = StorageQuota(100, clock_s=Clock())
    assert quota.try_reserve("a", 101, job="j") is None
    for _ in range(2):
        with quota.try_reserve("a", 10, job="j") or pytest.fail("no room") as held:
            held.commit(10)
            assert quota.job_usage("j").used_bytes == 10
    assert not quota._jobs
    quota.release_used("a", 20, job="j")


def test_a_lowered_limit_takes_nothing_away_and_grants_nothing() -> None:
    quota = StorageQuota(100, clock_s=Clock())
    quota.note_used("a", 60)
    quota.resize(50)
    assert quota.usage == Usage(60, 0, 50)
    assert quota.try_reserve("b", 1) is None
    quota.release_used("a", 20)
    assert quota.try_reserve("b", 10)
    quota.resize(60)
    assert quota.try_reserve("c", 6)


def test_accounting_is_restored() -> None:
    quota = StorageQuota(100, tenants={"a": 50}, clock_s=Clock())
    quota.note_used("b", 30)
    quota.note_used("a", 10)
    assert quota.try_reserve("c", 5)
    rows = {name: quota.tenant_usage(name).used_bytes for name in ("a", "b")}
    after = StorageQuota(100, tenants={"a": 50}, clock_s=Clock())
    after.note_used("gone", 7)
    after.restore(rows)
    assert after.usage == Usage(40, 0, 100)
    assert after.tenant_usage("gone") == Usage(0, 0, None)
    assert after.tenant_usage("b") == Usage(30, 0, None)
    over = StorageQuota(20, clock_s=Clock())
    over.restore(rows)
    assert over.usage.used_bytes == 40
    assert over.try_reserve("a", 1) is None


# -- leases --------------------------------------------------------------------------------------------------------


def test_a_lease_that_is_not_renewed_gives_its_room_back() -> None:
    clock = Clock()
    quota = StorageQuota(100, clock_s=clock)
    held = quota.try_reserve("a", 80, job="dead", ttl_s=10)
    assert held is not None
    held.commit(30)
    clock.now_s += 9.9
    assert quota.try_reserve("a", 21) is None
    clock.now_s += 0.1
    assert quota.try_reserve("a", 70)
    assert not held.alive
    for use in (lambda: held.commit(1), held.renew, lambda: held.resize(1)):
        with pytest.raises(ReservationExpiredError, match="the reservation of job dead ended"):
            use()
    assert held.release() == 0
    assert quota.usage == Usage(30, 70, 100)


def test_a_renewed_lease_lives_on() -> None:
    clock = Clock()
    quota = StorageQuota(100, clock_s=clock)
    held = quota.try_reserve("a", 100, ttl_s=10)
    assert held is not None
    for _ in range(5):
        clock.now_s += 9
        held.renew()
    clock.now_s += 9
    held.renew(ttl_s=100)
    clock.now_s += 99
    assert quota.try_reserve("a", 1) is None
    clock.now_s += 1
    assert quota.try_reserve("a", 1)


def test_a_lease_past_its_time_is_over_even_if_nobody_looked() -> None:
    clock = Clock()
    held = StorageQuota(100, clock_s=clock).try_reserve("a", 10, ttl_s=1)
    assert held is not None
    clock.now_s += 1
    with pytest.raises(ReservationExpiredError, match="tenant a"):
        held.commit(1)


# -- the disk ------------------------------------------------------------------------------------------------------


def test_the_disk_has_the_last_word() -> None:
    space = DiskSpace(1000, 300)
    quota = StorageQuota(10_000, min_free=MinFree(fraction=0.1), disk=lambda: space, clock_s=Clock())
    held = quota.try_reserve("a", 150)
    assert held is not None
    assert quota.try_reserve("a", 51) is None  # 300 free, 150 spoken for, 100 to stay free
    assert quota.try_reserve("a", 50)
    held.commit(100)
    space = DiskSpace(1000, 200)  # they landed
    assert quota.try_reserve("a", 1) is None
    space = DiskSpace(1000, 50)  # somebody else fills the disk
    assert quota.try_reserve("a", 1) is None


@pytest.mark.expects_warnings
def test_a_disk_that_does_not_answer_grants_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> DiskSpace:
        raise OSError(5, "Input/output error")

    quota = StorageQuota(100, disk=gone, clock_s=Clock())
    assert quota.try_reserve("a", 1) is None
    assert quota.try_reserve("a", 1) is None
    assert [r.getMessage() for r in caplog.records] == ["the disk does not say how full it is; nothing is granted"]


def test_a_real_disk(tmp_path: Path) -> None:
    space = disk_space(tmp_path)
    assert 0 < space.free_bytes <= space.total_bytes


# -- waiting -------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_once() -> None:
    refused = []

    async def main() -> None:
        quota = StorageQuota(
            100,
            tenants={"a": 50},
            min_free=MinFree(size_bytes=10),
            disk=lambda: DiskSpace(80, 80),
            on_exhausted=lambda: refused.append(1),
        )
        quota.set_job_limit("j", 20)
        for tenant, size, job, level in [
            ("b", 101, None, Level.VOLUME),
            ("a", 51, None, Level.TENANT),
            ("a", 21, "j", Level.JOB),
            ("b", 71, None, Level.DISK),
        ]:
            with pytest.raises(QuotaExceededError, match="it can never fit") as caught:
                await quota.reserve(tenant, size, job)
            assert refusal(caught) == (level, True)

    run(main)
    assert len(refused) == 4


def test_waits_until_somebody_gives_back() -> None:
    async def main() -> None:
        quota = StorageQuota(100)
        first = await quota.reserve("a", 80)

        async def give_back() -> None:
            await trio.testing.wait_all_tasks_blocked()
            first.commit(30)
            assert quota.usage == Usage(30, 50, 100)
            first.release()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(give_back)
            second = await quota.reserve("b", 50)
        assert quota.usage == Usage(30, 50, 100)
        second.release()
        assert quota.usage == Usage(30, 0, 100)

    run(main)


def test_the_deadline_ends_the_wait() -> None:
    refused = []

    async def main() -> None:
        quota = StorageQuota(100, on_exhausted=lambda: refused.append(1))
        await quota.reserve("a", 80)
        start_s = trio.current_time()
        with pytest.raises(
            QuotaExceededError, match="no room for 50B within the 100B of the volume: none came"
        ) as caught:
            await quota.reserve("a", 50, deadline=start_s + 7)
        assert trio.current_time() == start_s + 7
        assert refusal(caught) == (Level.VOLUME, False)
        with pytest.raises(QuotaExceededError):
            await quota.reserve("a", 50, deadline=-math.inf)
        assert quota.try_reserve("a", 20)  # who gave up holds up no other

    run(main)
    assert len(refused) == 2


def test_a_waiter_is_served_when_a_lease_runs_out() -> None:
    async def main() -> None:
        quota = StorageQuota(100)
        await quota.reserve("a", 80, job="dead", ttl_s=30)
        renewed = await quota.reserve("a", 20, ttl_s=5)
        renewed.renew(ttl_s=1000)
        start_s = trio.current_time()
        await quota.reserve("b", 50)
        assert trio.current_time() == start_s + 30

    run(main)


def test_a_waiter_is_served_when_the_disk_empties() -> None:
    async def main() -> None:
        start_s = trio.current_time()

        def disk() -> DiskSpace:
            return DiskSpace(100, 100 if trio.current_time() - start_s > 4.5 else 0)

        quota = StorageQuota(1000, disk=disk)
        await quota.reserve("a", 10)
        assert 4.5 < trio.current_time() - start_s <= 5.5
        with pytest.raises(QuotaExceededError) as caught:
            await quota.reserve("a", 95, deadline=trio.current_time() + 3)
        assert refusal(caught) == (Level.DISK, False)

    run(main)


class Line:
    """Tasks that ask one after the other, and the order in which they were served."""

    def __init__(self, quota: StorageQuota, nursery: trio.Nursery) -> None:
        self.quota = quota
        self.nursery = nursery
        self.served: list[str] = []
        self.held: dict[str, Reservation] = {}

    async def ask(self, name: str, tenant: str, size_bytes: int, job: str | None = None) -> trio.CancelScope:
        scope = trio.CancelScope()
        self.nursery.start_soon(self._ask, scope, name, tenant, size_bytes, job)
        await trio.testing.wait_all_tasks_blocked()
        return scope

    async def _ask(self, scope: trio.CancelScope, name: str, tenant: str, size_bytes: int, job: str | None) -> None:
        with scope:
            self.held[name] = await self.quota.reserve(tenant, size_bytes, job)
            self.served.append(name)


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    async def main() -> None:
        quota = StorageQuota(100)
        async with trio.open_nursery() as nursery:
            line = Line(quota, nursery)
            for i in range(10):
                await line.ask(f"first {i}", "a", 10)
            await line.ask("large", "b", 90)
            for i in range(10):
                await line.ask(f"small {i}", "c", 10)
            assert quota.try_reserve("d", 1) is None
            for i in range(10):
                line.held[f"first {i}"].release()
                assert quota.try_reserve("d", 10) is None  # even when it would fit now
                await trio.testing.wait_all_tasks_blocked()
            assert line.served[10:] == ["large", "small 0"]
            line.held["large"].release()
        granted = sorted(line.held, key=lambda name: line.held[name]._number)  # tasks woken together run in any order
        assert granted[10:] == ["large", *(f"small {i}" for i in range(10))]

    run(main)


def test_a_tenant_at_its_limit_holds_up_nobody_else() -> None:
    async def main() -> None:
        quota = StorageQuota(100, tenants={"a": 20})
        async with trio.open_nursery() as nursery:
            line = Line(quota, nursery)
            await line.ask("a1", "a", 20)
            await line.ask("a2", "a", 20)
            await line.ask("a3", "a", 1)
            await line.ask("b1", "b", 30)
            assert line.served == ["a1", "b1"]
            assert quota.try_reserve("a", 0)
            line.held["a1"].release()
            await trio.testing.wait_all_tasks_blocked()
            assert line.served == ["a1", "b1", "a2"]
            line.held["a2"].resize(19)
        assert line.served == ["a1", "b1", "a2", "a3"]

    run(main)


def test_a_job_at_its_limit_holds_up_only_itself() -> None:
    async def main() -> None:
        quota = StorageQuota(100)
        quota.set_job_limit("j", 10)
        async with trio.open_nursery() as nursery:
            line = Line(quota, nursery)
            await line.ask("j1", "a", 10, "j")
            await line.ask("j2", "a", 5, "j")
            await line.ask("k1", "a", 5, "k")
            assert line.served == ["j1", "k1"]
            quota.set_job_limit("j", 15)
        assert line.served == ["j1", "k1", "j2"]

    run(main)


def test_who_gives_up_lets_the_next_one_in() -> None:
    async def main() -> None:
        quota = StorageQuota(100)
        async with trio.open_nursery() as nursery:
            line = Line(quota, nursery)
            await line.ask("holder", "a", 50)
            large = await line.ask("large", "a", 80)
            await line.ask("small", "a", 50)
            assert line.served == ["holder"]
            large.cancel()
        assert line.served == ["holder", "small"]
        assert quota.usage == Usage(0, 100, 100)

    run(main)


def test_room_granted_to_a_task_that_is_cancelled_is_not_lost() -> None:
    async def main() -> None:
        quota = StorageQuota(100)
        for served_first in (True, False):
            holder = await quota.reserve("a", 100)
            async with trio.open_nursery() as nursery:
                line = Line(quota, nursery)
                scope = await line.ask("waiter", "a", 100)
                if served_first:
                    holder.release()
                    scope.cancel()
                else:
                    scope.cancel()
                    holder.release()
            for held in line.held.values():
                held.release()
            assert quota.usage == Usage(0, 0, 100)
            assert bool(line.held) == served_first

    run(main)


def test_a_limit_lowered_below_a_waiter_refuses_it() -> None:
    async def main() -> None:
        quota = StorageQuota(100)
        await quota.reserve("a", 80)
        errors: list[QuotaExceededError] = []

        async def ask() -> None:
            with pytest.raises(QuotaExceededError) as caught:
                await quota.reserve("a", 50)
            errors.append(caught.value)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            quota.resize(40)
        assert [(e.level, e.never) for e in errors] == [(Level.VOLUME, True)]

    run(main)


def test_the_evictor_is_told_what_is_missing() -> None:
    async def main() -> None:
        hints: list[tuple[int, str | None]] = []

        def evict(missing_bytes: int, tenant: str | None) -> None:
            hints.append((missing_bytes, tenant))
            quota.release_used(tenant or "b", missing_bytes)

        quota = StorageQuota(100, tenants={"a": 40}, evict_hint=evict)
        quota.note_used("a", 30)
        quota.note_used("b", 60)
        with await quota.reserve("b", 25) as held:
            held.commit(25)
        assert hints == [(15, None)]
        await quota.reserve("a", 20)
        assert hints[1:] == [(10, "a"), (10, None)]
        assert quota.usage == Usage(80, 20, 100)

    run(main)


def test_the_evictor_hears_of_the_disk() -> None:
    async def main() -> None:
        free_bytes = 30
        hints: list[tuple[int, str | None]] = []

        def evict(missing_bytes: int, tenant: str | None) -> None:
            nonlocal free_bytes
            hints.append((missing_bytes, tenant))
            free_bytes += missing_bytes
            quota.release_used("a", missing_bytes)

        disk = MinFree(size_bytes=20)
        quota = StorageQuota(1000, min_free=disk, disk=lambda: DiskSpace(200, free_bytes), evict_hint=evict)
        quota.note_used("a", 170)
        await quota.reserve("a", 50)
        assert hints == [(40, None)]

    run(main)
