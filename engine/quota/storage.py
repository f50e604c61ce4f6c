"""StorageQuota: no byte lands on the local disk without room set aside for it first.

Three budgets are nested: the volume's, a tenant's, a job's; and the disk's own free space is watched beside them,
because others write to it too. A reservation takes room at every level at once. As bytes land, `commit` turns reserved
into used; used goes back with `release_used` when a file is evicted or unlinked.

Invariants
- At every level that has a limit, reserved + used ≤ limit at every grant, and between grants unless a limit was
  lowered, accounting restored, or bytes landed without asking (`note_used`: passthrough growth). Then nothing is
  granted until what is there has shrunk below the limit again.
- At a grant, free space on the disk minus everything reserved and not yet landed stays at `min_free` or above.
- A reservation with a `ttl_s` is a lease: not renewed in time, what it had not committed returns to the pool and its
  holder gets ReservationExpiredError. So a job that died gives its room back.

Who needs none: verification reads (the third open question of the checkpoint design). They stream a blob through a
checksum and keep nothing on disk, so there is nothing to reserve, and a full disk can still be verified. Whatever
stages bytes, repair included, reserves like everyone else.

Owner: the trio thread; no locks. A crash leaves nothing: reservations die with the process, and used bytes are restored
from the catalog's counters.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import trio

from aof2.engine.quota.accounts import Account, DiskSpace, Level, ReservationExpiredError, Shortage, Usage
from aof2.engine.units import MinFree

log = logging.getLogger(__name__)


class Reservation:
    """Room set aside. As a context manager it gives back, at the end, what was not committed."""

    def __init__(self, quota: StorageQuota, number: int, request: _Request) -> None:
        self.tenant = request.tenant
        self.job = request.job
        self.remaining_bytes = request.size_bytes
        self.alive = True
        self._quota = quota
        self._number = number
        self._ttl_s = request.ttl_s
        self._expires_at = math.inf

    def commit(self, size_bytes: int) -> None:
        """That many bytes have landed: reserved becomes used."""
        self._refuse_if_dead()
        if not 0 <= size_bytes <= self.remaining_bytes:
            raise ValueError(f"{size_bytes} bytes landed where {self.remaining_bytes} were reserved")
        self._quota._count(self.tenant, self.job, reserved=-size_bytes, used=size_bytes)
        self.remaining_bytes -= size_bytes

    def release(self) -> int:
        """Gives back what was not committed, and says how much. Harmless when there is nothing left to give."""
        released = self._quota._end(self) if self.alive else 0
        self._quota._expire()
        return released

    def absorb(self, other: Reservation) -> None:
        """What another of the same tenant has left is this one's from here on."""
        if (other.tenant, other.job) != (self.tenant, self.job):
            raise ValueError("reservations of different accounts stay apart")
        self._refuse_if_dead()
        self.remaining_bytes += other.remaining_bytes
        other.remaining_bytes = 0
        other.release()

    def renew(self, ttl_s: float | None = None) -> None:
        """The holder is alive: the lease runs anew, for as long as it first did unless told otherwise."""
        self._refuse_if_dead()
        self._ttl_s = ttl_s if ttl_s is not None else self._ttl_s
        if self._ttl_s is not None:
            self._quota._watch(self, self._ttl_s)

    def resize(self, size_bytes: int) -> bool:
        """Makes what is left that large. Smaller always works; larger only if it fits now (False: unchanged)."""
        self._refuse_if_dead()
        grow_bytes = size_bytes - self.remaining_bytes
        request = _Request(self.tenant, max(0, grow_bytes), self.job, None)
        if size_bytes < 0:
            raise ValueError("a reservation cannot be smaller than nothing")
        if not self._quota._has_room(request):
            self._quota._exhausted()
            return False
        self._quota._count(self.tenant, self.job, reserved=grow_bytes)
        self.remaining_bytes = size_bytes
        self._quota._expire()
        return True

    def _refuse_if_dead(self) -> None:
        self._quota._expire()
        if not self.alive:
            whose = f"job {self.job}" if self.job else f"tenant {self.tenant}"
            raise ReservationExpiredError(f"the reservation of {whose} ended; remove what it staged and plan again")

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class _Request(NamedTuple):
    tenant: str
    size_bytes: int
    job: str | None
    ttl_s: float | None


class StorageQuota:
    """The budgets of one volume."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        tenants: Mapping[str, int | None] | None = None,
        min_free: MinFree | None = None,
        disk: Callable[[], DiskSpace] | None = None,
        clock_s: Callable[[], float] = trio.current_time,
        on_exhausted: Callable[[], None] | None = None,
        on_over: Callable[[], None] | None = None,
    ) -> None:
        """`tenants` are their limits; `disk` says how full the disk is (None: not watched); `on_exhausted` counts;
        `on_over` hears when bytes count that were not asked for, over a limit."""
        self._volume = Account(Level.VOLUME, limit_bytes=limit_bytes)
        self._tenants = {name: Account(Level.TENANT, name, limit) for name, limit in (tenants or {}).items()}
        self._jobs: dict[str, Account] = {}
        self._min_free = min_free or MinFree()
        self._disk = disk
        self._disk_failed = False
        self._clock_s = clock_s
        self._on_exhausted = on_exhausted
        self._on_over = on_over
        self._live: dict[int, Reservation] = {}
        self._next_number = 0
        self._expiries: list[tuple[float, int]] = []  # a heap; entries of renewed or released leases are passed over

    # -- looking -----------------------------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        return self._volume.usage()

    def tenant_usage(self, tenant: str) -> Usage:
        return self._tenants[tenant].usage() if tenant in self._tenants else Usage(0, 0, None)

    def job_usage(self, job: str) -> Usage:
        return self._jobs[job].usage() if job in self._jobs else Usage(0, 0, None)

    def shortage(self, tenant: str | None, size_bytes: int) -> Shortage:
        """What stands in the way of so many bytes more, of a tenant's or (None) of no tenant in particular."""
        everyones = max(self._volume.short_bytes(size_bytes), self._disk_account().short_bytes(size_bytes))
        if tenant is None:
            return Shortage(everyones, 0, None)
        return Shortage(everyones, self._tenant(tenant).short_bytes(size_bytes), self._never_fits(tenant, size_bytes))

    # -- asking ------------------------------------------------------------------------------------------------

    def try_reserve(
        self, tenant: str, size_bytes: int, job: str | None = None, ttl_s: float | None = None
    ) -> Reservation | None:
        """Room now, or None (counted as a refusal)."""
        if size_bytes < 0:
            raise ValueError("a reservation cannot be smaller than nothing")
        self._expire()
        request = _Request(tenant, size_bytes, job, ttl_s)
        if self._has_room(request):
            return self._grant(request)
        self._exhausted()
        return None

    # -- changing ----------------------------------------------------------------------------------------------

    def resize(self, limit_bytes: int) -> None:
        """The volume's limit is another. Below what is used, nothing is taken away, and nothing more is granted."""
        self._volume.limit_bytes = limit_bytes
        self._expire()

    def set_job_limit(self, job: str, limit_bytes: int) -> None:
        """What the job may have reserved and committed together, until `release_job`."""
        self._job(job).limit_bytes = limit_bytes
        self._expire()

    def release_job(self, job: str) -> int:
        """The job is over: everything it had reserved goes back (how much), its own limit is forgotten."""
        released = sum(self._end(r) for r in list(self._live.values()) if r.job == job)
        self._jobs.pop(job, None)
        self._expire()
        return released

    def release_used(self, tenant: str, size_bytes: int, job: str | None = None) -> None:
        """Bytes left the disk (eviction, unlink). `job`: they were that job's own, and count for its limit no more."""
        if not 0 <= size_bytes <= self._tenant(tenant).used_bytes:
            raise ValueError(f"{size_bytes} bytes of tenant {tenant} cannot be released: that many are not in use")
        self._count(tenant, job, used=-size_bytes)
        self._expire()

    def note_used(self, tenant: str, size_bytes: int) -> None:
        """Bytes are on disk without a reservation (a passthrough writer's). They count, over the limit if need be."""
        if size_bytes < 0:
            raise ValueError("use release_used for bytes that left")
        self._count(tenant, None, used=size_bytes)
        self._say_if_over()

    def over_limit(self) -> list[str | None]:
        """The tenants that use more than they may; None among them: all together do."""
        over: list[str | None] = [None] if self._volume.short_bytes(0) else []
        return [*over, *(name for name, account in self._tenants.items() if account.short_bytes(0))]

    def _say_if_over(self) -> None:
        if self._on_over is not None and self.over_limit():
            self._on_over()

    def restore(self, used_bytes: Mapping[str, int]) -> None:
        """Used bytes by tenant, and none where it is not named. Reservations stay."""
        for tenant in self._tenants.keys() | used_bytes.keys():
            self._tenant(tenant).used_bytes = used_bytes.get(tenant, 0)
        self._volume.used_bytes = sum(used_bytes.values())
        self._expire()
        self._say_if_over()

    # -- granting ----------------------------------------------------------------------------------------------

    def _has_room(self, request: _Request) -> bool:
        accounts = (*self._accounts(request.tenant, request.job), self._disk_account())
        return not request.size_bytes or not any(account.short_bytes(request.size_bytes) for account in accounts)

    def _grant(self, request: _Request) -> Reservation:
        if request.job is not None:
            self._job(request.job).holders += 1
        self._count(request.tenant, request.job, reserved=request.size_bytes)
        reservation = Reservation(self, self._next_number, request)
        self._live[self._next_number] = reservation
        self._next_number += 1
        if request.ttl_s is not None:
            self._watch(reservation, request.ttl_s)
        return reservation

    def _never_fits(self, tenant: str, size_bytes: int) -> Level | None:
        for account in self._accounts(tenant, None):
            if account.limit_bytes is not None and size_bytes > account.limit_bytes:
                return account.level
        space = self._disk_space()
        if space is None:
            return None
        limit_bytes = max(0, space.total_bytes - self._min_free.bytes_of(space.total_bytes))
        return Level.DISK if size_bytes > limit_bytes else None

    # -- leases ------------------------------------------------------------------------------------------------

    def _watch(self, reservation: Reservation, ttl_s: float) -> None:
        reservation._expires_at = self._clock_s() + ttl_s
        heapq.heappush(self._expiries, (reservation._expires_at, reservation._number))

    def _expire(self) -> None:
        while self._expiries:
            expires_at, number = self._expiries[0]
            reservation = self._live.get(number)
            current = reservation is not None and reservation._expires_at == expires_at
            if current and expires_at > self._clock_s():
                return
            heapq.heappop(self._expiries)
            if reservation is not None and current:
                released = self._end(reservation)
                fields = {"tenant": reservation.tenant, "job": reservation.job, "released_bytes": released}
                log.info("a reservation was not renewed and ended", extra=fields)

    def _end(self, reservation: Reservation) -> int:
        released = reservation.remaining_bytes
        self._count(reservation.tenant, reservation.job, reserved=-released)
        reservation.remaining_bytes = 0
        reservation.alive = False
        del self._live[reservation._number]
        if reservation.job is not None:
            self._let_go_of_job(reservation.job)
        return released

    # -- accounts ----------------------------------------------------------------------------------------------

    def _count(self, tenant: str, job: str | None, *, reserved: int = 0, used: int = 0) -> None:
        for account in self._accounts(tenant, job):
            account.reserved_bytes += reserved
            account.used_bytes = max(0, account.used_bytes + used)

    def _accounts(self, tenant: str, job: str | None) -> list[Account]:
        """From the widest to the narrowest. A job that holds nothing and has no limit has no account."""
        accounts = [self._volume, self._tenant(tenant)]
        if job is not None and job in self._jobs:
            accounts.append(self._jobs[job])
        return accounts

    def _tenant(self, tenant: str) -> Account:
        return self._tenants.setdefault(tenant, Account(Level.TENANT, tenant))

    def _job(self, job: str) -> Account:
        return self._jobs.setdefault(job, Account(Level.JOB, job))

    def _let_go_of_job(self, job: str) -> None:
        account = self._jobs[job]
        account.holders -= 1
        if account.limit_bytes is None and not account.holders:
            del self._jobs[job]

    def _disk_account(self) -> Account:
        """The disk as an account: what may still land on it, with everything reserved taken off."""
        if self._disk is None:
            return Account(Level.DISK)
        space = self._disk_space() or DiskSpace(0, 0)
        room = max(0, space.free_bytes - self._min_free.bytes_of(space.total_bytes))
        account = Account(Level.DISK, limit_bytes=room)
        account.reserved_bytes = self._volume.reserved_bytes
        return account

    def _disk_space(self) -> DiskSpace | None:
        """None: there is no disk to watch, or it does not answer (then nothing is granted until it does)."""
        if self._disk is None:
            return None
        try:
            space = self._disk()
        except OSError as e:
            if not self._disk_failed:
                log.warning("the disk does not say how full it is; nothing is granted", extra={"error": str(e)})
            self._disk_failed = True
            return None
        self._disk_failed = False
        return space

    def _exhausted(self) -> None:
        if self._on_exhausted is not None:
            self._on_exhausted()
