"""Random use of StorageQuota beside a model that only adds and compares."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from aof2.engine.quota import Reservation, StorageQuota
from aof2.engine.quota.accounts import DiskSpace, ReservationExpiredError
from aof2.engine.units import MinFree

TENANTS = ("a", "b", "c")
JOBS = (None, "j", "k")
SIZES = st.integers(0, 60)
TENANT_LIMITS = {"a": 40, "b": 70, "c": None}
JOB_LIMIT = 30
DISK_BYTES = 200
MIN_FREE_BYTES = 20


class Held:
    """What the model knows of one reservation."""

    def __init__(self, real: Reservation, tenant: str, job: str | None, size: int, expires_at: float | None) -> None:
        self.real = real
        self.tenant = tenant
        self.job = job
        self.left = size
        self.expires_at = expires_at
        self.ttl_s = 0.0


class QuotaMachine(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.limit = 100
        self.foreign = 0  # what others have on the disk
        self.refused = 0
        self.counted = 0
        self.all: list[Held] = []
        self.used = dict.fromkeys(TENANTS, 0)
        self.job_used = {"j": 0}
        self.quota = StorageQuota(
            self.limit,
            tenants=TENANT_LIMITS,
            min_free=MinFree(size_bytes=MIN_FREE_BYTES),
            disk=lambda: DiskSpace(DISK_BYTES, self.free),
            clock_s=lambda: self.now_s,
            on_exhausted=self.count,
        )
        self.quota.set_job_limit("j", JOB_LIMIT)

    def count(self) -> None:
        self.counted += 1

    @property
    def free(self) -> int:
        return DISK_BYTES - self.foreign - sum(self.used.values())

    def alive(self, h: Held) -> bool:
        return h in self.all and (h.expires_at is None or h.expires_at > self.now_s)

    def reserved(self, tenant: str | None = None, job: str | None = None) -> int:
        mine = [h for h in self.all if self.alive(h)]
        return sum(h.left for h in mine if tenant in (None, h.tenant) and job in (None, h.job))

    def fits(self, tenant: str, job: str | None, size: int) -> bool:
        if size == 0:
            return True
        limit = TENANT_LIMITS[tenant]
        if limit is not None and self.reserved(tenant) + self.used[tenant] + size > limit:
            return False
        if job == "j" and self.reserved(job="j") + self.job_used["j"] + size > JOB_LIMIT:
            return False
        if self.reserved() + sum(self.used.values()) + size > self.limit:
            return False
        return self.free - MIN_FREE_BYTES - self.reserved() >= size

    @rule(
        target=held,
        tenant=st.sampled_from(TENANTS),
        job=st.sampled_from(JOBS),
        size=SIZES,
        ttl=st.sampled_from([None, 5]),
    )
    def reserve(self, tenant: str, job: str | None, size: int, ttl: float | None) -> Held | None:
        fits = self.fits(tenant, job, size)
        real = self.quota.try_reserve(tenant, size, job, ttl)
        assert (real is not None) == fits
        if real is None:
            self.refused += 1
            return None
        h = Held(real, tenant, job, size, None if ttl is None else self.now_s + ttl)
        h.ttl_s = ttl or 0.0
        self.all.append(h)
        return h

    @rule(h=held, size=SIZES)
    def commit(self, h: Held | None, size: int) -> None:
        if h is None:
            return
        if not self.alive(h):
            with pytest.raises(ReservationExpiredError):
                h.real.commit(size)
            return
        if size > h.left:
            with pytest.raises(ValueError):
                h.real.commit(size)
            return
        h.real.commit(size)
        h.left -= size
        self.used[h.tenant] += size
        if h.job == "j":
            self.job_used["j"] += size

    @rule(h=held)
    def release(self, h: Held | None) -> None:
        if h is not None:
            expected = h.left if self.alive(h) else 0
            assert h.real.release() == expected
            self.all = [x for x in self.all if x is not h]

    @rule(h=held)
    def renew(self, h: Held | None) -> None:
        if h is None:
            return
        if not self.alive(h):
            with pytest.raises(ReservationExpiredError):
                h.real.renew()
            return
        h.real.renew()
        if h.expires_at is not None:
            h.expires_at = self.now_s + h.ttl_s

    @rule(h=held, size=SIZES)
    def resize_reservation(self, h: Held | None, size: int) -> None:
        if h is None or not self.alive(h):
            return
        fits = size <= h.left or self.fits(h.tenant, h.job, size - h.left)
        assert h.real.resize(size) == fits
        if fits:
            h.left = size
        else:
            self.refused += 1

    @rule(tenant=st.sampled_from(TENANTS), size=SIZES)
    def release_used(self, tenant: str, size: int) -> None:
        if size > self.used[tenant]:
            with pytest.raises(ValueError):
                self.quota.release_used(tenant, size)
            return
        self.quota.release_used(tenant, size)
        self.used[tenant] -= size

    @rule(seconds=st.sampled_from([1, 4, 5]))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds

    @rule(limit=st.integers(60, 150))
    def resize(self, limit: int) -> None:
        self.quota.resize(limit)
        self.limit = limit

    @rule(size=st.integers(0, 150))
    def others_fill_the_disk(self, size: int) -> None:
        self.foreign = size

    @rule(job=st.sampled_from(["j", "k"]))
    def end_job(self, job: str) -> None:
        expected = self.reserved(job=job)
        assert self.quota.release_job(job) == expected
        self.all = [h for h in self.all if h.job != job]
        if job == "j":
            self.job_used["j"] = 0
            self.quota.set_job_limit("j", JOB_LIMIT)

    @rule()
    def restart(self) -> None:
        self.quota.restore({tenant: size for tenant, size in self.used.items() if size})

    @invariant()
    def nothing_is_lost_and_nothing_overcommitted(self) -> None:
        self.quota.try_reserve("a", 0).release()  # type: ignore[union-attr]  # takes nothing, ends leases that ran out
        usage = self.quota.usage
        assert usage.reserved_bytes == self.reserved()
        assert usage.used_bytes == sum(self.used.values())
        for tenant in TENANTS:
            own = self.quota.tenant_usage(tenant)
            assert (own.used_bytes, own.reserved_bytes) == (self.used[tenant], self.reserved(tenant))
            assert own.limit_bytes is None or own.used_bytes + own.reserved_bytes <= own.limit_bytes
        job = self.quota.job_usage("j")
        assert job.used_bytes + job.reserved_bytes <= JOB_LIMIT
        assert job.reserved_bytes == self.reserved(job="j")
        assert self.counted == self.refused
        assert sum(h.real.remaining_bytes for h in self.all) == usage.reserved_bytes
        assert len(self.quota._live) == sum(map(self.alive, self.all))


TestQuota = QuotaMachine.TestCase
TestQuota.settings = settings(max_examples=120, stateful_step_count=40)
