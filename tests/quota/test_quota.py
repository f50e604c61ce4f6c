"""StorageQuota: budgets, leases, the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.engine.quota import StorageQuota
from aof2.engine.quota.accounts import DiskSpace, Level, ReservationExpiredError, Usage, disk_space
from aof2.engine.units import MinFree


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


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


# -- what can never fit --------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_known() -> None:
    quota = StorageQuota(
        100,
        tenants={"a": 50},
        min_free=MinFree(size_bytes=10),
        disk=lambda: DiskSpace(80, 80),
    )
    for tenant, size, level in [("b", 101, Level.VOLUME), ("a", 51, Level.TENANT), ("b", 71, Level.DISK)]:
        assert quota.shortage(tenant, size).never is level
        assert quota.shortage(tenant, size - 1).never is not level
