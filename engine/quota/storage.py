"""StorageQuota: no byte lands on the local disk without room set aside for it first.

Two budgets are nested: the volume's and a tenant's; and the disk's own free space is watched beside them, because
others write to it too. A reservation takes room at every level at once. As bytes land, `commit` turns reserved into
used; used goes back with `release_used` when a file is evicted or unlinked.

Invariants
- At every level that has a limit, reserved + used ≤ limit at every grant, and between grants unless accounting was
  restored or bytes landed without asking (`note_used`: passthrough growth). Then nothing is granted until what is there
  has shrunk below the limit again.
- At a grant, free space on the disk minus everything reserved and not yet landed stays at `min_free` or above.
- What a job reserved goes back when the job is over (`release_job`), whatever became of its holder, which gets
  ReservationExpiredError if it goes on.

Who needs none: verification reads. They stream a blob through a checksum and keep nothing on disk, so there is nothing
to reserve, and a full disk can still be verified. Whatever stages bytes reserves like everyone else.

Owner: the trio thread; no locks. A crash leaves nothing: reservations die with the process, and used bytes are restored
from what the catalog counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from aof2.engine.quota.accounts import Account, DiskSpace, Level, QuotaRow, ReservationExpiredError, Shortage, Usage
from aof2.engine.units import MinFree

log = logging.getLogger(__name__)


class Reservation:
    """Room set aside. As a context manager it gives back, at the end, what was not committed."""

    def __init__(self, quota: StorageQuota, tenant: str, size_bytes: int, job: str | None) -> None:
        self.tenant = tenant
        self.job = job
        self.remaining_bytes = size_bytes
        self.alive = True
        self._quota = quota

    def commit(self, size_bytes: int) -> None:
        """That many bytes have landed: reserved becomes used."""
        self._refuse_if_dead()
        if not 0 <= size_bytes <= self.remaining_bytes:
            raise ValueError(f"{size_bytes} bytes landed where {self.remaining_bytes} were reserved")
        self._quota._change(self.tenant, reserved_bytes=-size_bytes, used_bytes=size_bytes)
        self.remaining_bytes -= size_bytes

    def release(self) -> int:
        """Gives back what was not committed, and says how much. Harmless when there is nothing left to give."""
        return self._quota._end(self) if self.alive else 0

    def absorb(self, other: Reservation) -> None:
        """What another of the same tenant has left is this one's from here on."""
        if (other.tenant, other.job) != (self.tenant, self.job):
            raise ValueError("reservations of different accounts stay apart")
        self._refuse_if_dead()
        self.remaining_bytes += other.remaining_bytes
        other.remaining_bytes = 0
        other.release()

    def resize(self, size_bytes: int) -> bool:
        """Makes what is left that large. Smaller always works; larger only if it fits now (False: unchanged)."""
        self._refuse_if_dead()
        if size_bytes < 0:
            raise ValueError("a reservation cannot be smaller than nothing")
        grow_bytes = size_bytes - self.remaining_bytes
        if grow_bytes > 0 and not self._quota._fits(self.tenant, grow_bytes):
            return False
        self._quota._change(self.tenant, reserved_bytes=grow_bytes)
        self.remaining_bytes = size_bytes
        return True

    def _refuse_if_dead(self) -> None:
        if not self.alive:
            whose = f"job {self.job}" if self.job else f"tenant {self.tenant}"
            raise ReservationExpiredError(f"the reservation of {whose} ended; remove what it staged and plan again")

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class StorageQuota:
    """The budgets of one volume."""

    def __init__(
        self,
        limit_bytes: int,
        *,
        tenants: Mapping[str, int | None] | None = None,
        min_free: MinFree | None = None,
        disk: Callable[[], DiskSpace] | None = None,
        on_exhausted: Callable[[], None] = lambda: None,
    ) -> None:
        """`tenants` are their limits; `disk` says how full the disk is (None: not watched); `on_exhausted` counts."""
        self.on_over: Callable[[], None] | None = None  # hears when bytes count that were not asked for, over a limit
        self._volume = Account(Level.VOLUME, limit_bytes)
        self._tenants = {name: Account(Level.TENANT, limit) for name, limit in (tenants or {}).items()}
        self._min_free = min_free or MinFree()
        self._disk = disk
        self._disk_failed = False
        self._on_exhausted = on_exhausted
        self._live: set[Reservation] = set()

    # -- looking -----------------------------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        return self._volume.usage()

    def tenant_usage(self, tenant: str) -> Usage:
        return self._tenants[tenant].usage() if tenant in self._tenants else Usage(0, 0, None)

    def shortage(self, tenant: str | None, size_bytes: int) -> Shortage:
        """What stands in the way of so many bytes more, of a tenant's or (None) of nobody's in particular."""
        everyones = max(self._volume.short_bytes(size_bytes), self._disk_account().short_bytes(size_bytes))
        if tenant is None:
            return Shortage(everyones, 0, None)
        return Shortage(everyones, self._tenant(tenant).short_bytes(size_bytes), self._never_fits(tenant, size_bytes))

    def over_limit(self) -> list[str | None]:
        """The tenants that use more than they may; None among them: all together do."""
        over = [None] if self._volume.is_over else []
        return [*over, *(name for name, account in self._tenants.items() if account.is_over)]

    # -- asking ------------------------------------------------------------------------------------------------

    def try_reserve(self, tenant: str, size_bytes: int, job: str | None = None) -> Reservation | None:
        """Room now, or None (counted as a refusal)."""
        if size_bytes < 0:
            raise ValueError("a reservation cannot be smaller than nothing")
        if size_bytes and not self._fits(tenant, size_bytes):
            return None
        self._change(tenant, reserved_bytes=size_bytes)
        reservation = Reservation(self, tenant, size_bytes, job)
        self._live.add(reservation)
        return reservation

    def release_job(self, job: str) -> int:
        """The job is over: everything it had reserved goes back (how much)."""
        return sum(self._end(r) for r in list(self._live) if r.job == job)

    # -- counting ----------------------------------------------------------------------------------------------

    def release_used(self, tenant: str, size_bytes: int) -> None:
        """Bytes left the disk (eviction, unlink)."""
        if not 0 <= size_bytes <= self._tenant(tenant).used_bytes:
            raise ValueError(f"{size_bytes} bytes of tenant {tenant} cannot be released: that many are not in use")
        self._change(tenant, used_bytes=-size_bytes)

    def note_used(self, tenant: str, size_bytes: int) -> None:
        """Bytes are on disk that no task reserved (a passthrough writer's). They count, over the limit if need be."""
        if size_bytes < 0:
            raise ValueError("use release_used for bytes that left")
        self._change(tenant, used_bytes=size_bytes)
        self._say_if_over()

    def restore(self, rows: Iterable[QuotaRow]) -> None:
        """Used bytes are what the rows say, and none where they say nothing. Reservations stay."""
        used = {row.tenant: row.used_bytes for row in rows}
        for tenant in self._tenants.keys() | used.keys():
            self._tenant(tenant).used_bytes = used.get(tenant, 0)
        self._volume.used_bytes = sum(used.values())
        self._say_if_over()

    def _say_if_over(self) -> None:
        if self.on_over is not None and self.over_limit():
            self.on_over()

    # -- accounts ----------------------------------------------------------------------------------------------

    def _change(self, tenant: str, *, reserved_bytes: int = 0, used_bytes: int = 0) -> None:
        for account in (self._volume, self._tenant(tenant)):
            account.reserved_bytes += reserved_bytes
            account.used_bytes += used_bytes

    def _end(self, reservation: Reservation) -> int:
        released = reservation.remaining_bytes
        self._change(reservation.tenant, reserved_bytes=-released)
        reservation.remaining_bytes = 0
        reservation.alive = False
        self._live.discard(reservation)
        return released

    def _fits(self, tenant: str, size_bytes: int) -> bool:
        """Whether every account has room for it now; a refusal is counted."""
        accounts = (self._tenant(tenant), self._volume)
        fits = not any(a.short_bytes(size_bytes) for a in accounts) and not self._disk_account().short_bytes(size_bytes)
        if not fits:
            self._on_exhausted()
        return fits

    def _never_fits(self, tenant: str, size_bytes: int) -> Level | None:
        """Whose limit is below it, if any's is."""
        for account in (self._volume, self._tenant(tenant)):
            if account.limit_bytes is not None and size_bytes > account.limit_bytes:
                return account.level
        space = self._disk_space()
        if space is None or size_bytes <= max(0, space.total_bytes - self._min_free.bytes_of(space.total_bytes)):
            return None
        return Level.DISK

    def _tenant(self, tenant: str) -> Account:
        return self._tenants.setdefault(tenant, Account(Level.TENANT))

    def _disk_account(self) -> Account:
        """The disk as an account: what may still land on it, with everything reserved taken off."""
        if self._disk is None:
            return Account(Level.DISK)
        space = self._disk_space() or DiskSpace(0, 0)
        room = max(0, space.free_bytes - self._min_free.bytes_of(space.total_bytes))
        account = Account(Level.DISK, room)
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
