"""StorageQuota: budgets and the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from aof2.engine.quota import (
    DiskSpace,
    Level,
    QuotaRow,
    ReservationExpiredError,
    Shortage,
    StorageQuota,
    Usage,
    disk_space,
)
from aof2.engine.units import MinFree

# -- accounting ----------------------------------------------------------------------------------------------------


def test_reserved_becomes_used_and_goes_back() -> None:
    quota = StorageQuota(100, tenants={"a": 80})
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
    quota = StorageQuota(100, tenants={"a": 50}, on_exhausted=lambda: refused.append(1))
    assert quota.try_reserve("a", 20)
    assert quota.try_reserve("a", 31) is None
    assert quota.try_reserve("b", 81) is None
    assert quota.try_reserve("b", 80)
    assert quota.try_reserve("c", 1) is None
    assert quota.try_reserve("c", 0)
    assert len(refused) == 3


def test_a_block_gives_back_what_did_not_land() -> None:
    quota = StorageQuota(100)
    with pytest.raises(ZeroDivisionError), quota.try_reserve("a", 70) or pytest.fail("no room") as held:
        held.commit(10)
        raise ZeroDivisionError
    assert quota.usage == Usage(10, 0, 100)


def test_more_cannot_land_than_was_reserved() -> None:
    quota = StorageQuota(100)
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
    quota = StorageQuota(100)
    held = quota.try_reserve("a", 50)
    assert held is not None
    held.commit(10)
    assert held.resize(90)
    assert not held.resize(91)
    assert quota.usage == Usage(10, 90, 100)
    assert held.resize(5)
    assert quota.usage == Usage(10, 5, 100)


def test_what_a_job_reserved_goes_back_with_it() -> None:
    quota = StorageQuota(100)
    held = quota.try_reserve("a", 80, "dead")
    other = quota.try_reserve("a", 10, "alive")
    assert held is not None and other is not None
    held.commit(30)
    assert quota.release_job("dead") == 50
    assert quota.release_job("dead") == 0
    for use in (lambda: held.commit(1), lambda: held.resize(1), lambda: held.absorb(held)):
        with pytest.raises(ReservationExpiredError, match="the reservation of job dead ended"):
            use()
    assert held.release() == 0
    assert quota.usage == Usage(30, 10, 100)


def test_one_reservation_takes_over_another() -> None:
    quota = StorageQuota(100)
    held, other = quota.try_reserve("a", 30), quota.try_reserve("a", 20)
    assert held is not None and other is not None
    held.absorb(other)
    assert (held.remaining_bytes, other.alive) == (50, False)
    assert quota.usage == Usage(0, 50, 100)
    foreign = quota.try_reserve("b", 1)
    assert foreign is not None
    with pytest.raises(ValueError, match="different accounts"):
        held.absorb(foreign)


def test_what_stands_in_the_way() -> None:
    quota = StorageQuota(100, tenants={"a": 50}, min_free=MinFree(size_bytes=10), disk=lambda: DiskSpace(80, 80))
    assert quota.shortage("b", 101) == Shortage(31, 0, Level.VOLUME)
    assert quota.shortage("a", 51) == Shortage(0, 1, Level.TENANT)
    assert quota.shortage("b", 71) == Shortage(1, 0, Level.DISK)
    assert quota.shortage(None, 71) == Shortage(1, 0, None)
    assert quota.shortage("a", 50) == Shortage(0, 0, None)


def test_accounting_is_restored() -> None:
    rows = [QuotaRow("a", 10), QuotaRow("b", 30)]
    after = StorageQuota(100, tenants={"a": 50})
    after.note_used("gone", 7)
    after.restore(rows)
    assert after.usage == Usage(40, 0, 100)
    assert after.tenant_usage("gone") == Usage(0, 0, None)
    assert [after.tenant_usage(name).used_bytes for name in ("a", "b")] == [10, 30]
    over = StorageQuota(20)
    heard: list[None] = []
    over.on_over = lambda: heard.append(None)
    over.restore(rows)
    assert heard and over.over_limit() == [None]
    assert over.usage.used_bytes == 40
    assert over.try_reserve("a", 1) is None


# -- the disk ------------------------------------------------------------------------------------------------------


def test_the_disk_has_the_last_word() -> None:
    space = DiskSpace(1000, 300)
    quota = StorageQuota(10_000, min_free=MinFree(fraction=0.1), disk=lambda: space)
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

    quota = StorageQuota(100, disk=gone)
    assert quota.try_reserve("a", 1) is None
    assert quota.try_reserve("a", 1) is None
    assert [r.getMessage() for r in caplog.records] == ["the disk does not say how full it is; nothing is granted"]


def test_a_real_disk(tmp_path: Path) -> None:
    space = disk_space(tmp_path)
    assert 0 < space.free_bytes <= space.total_bytes
