"""Room for a segment: taken of the quota and of the disk before it grows, given back when it is sealed or dropped.

Of each byte that the file may grow by, two are reserved: the second is for the payload file and the index, which are
made of the segment before its file goes. Room doubles, so that a stream of a few lines costs little; where that lasts
less than a moment it grows faster: each time it ends, a write has to come to the daemon.

Invariants
- `charged_bytes` are used, in the quota and in the ledger of what cannot make way; the other half stays reserved.
- Where there is no room, nothing changed.

Owner: the trio thread. A crash leaves nothing of this: what is found again is charged again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aof2.engine.files.ledger import Ledger
from aof2.engine.files.seek import RoomSeeker, Writing
from aof2.engine.local.sparse import DISK_PAGE_BYTES, on_disk
from aof2.engine.quota import Reservation

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

STEP_BYTES_MIN: Final = 64 << 10
TIMES: Final = 2
TIMES_FAST: Final = 16
INDEX_EXTRA_BYTES: Final = 8 << 10  # two files take two tails of a disk block


class SegmentRoom:
    """The room of one segment."""

    def __init__(self, volume: Volume, seeker: RoomSeeker, ledger: Ledger, tenant: str, ino: int) -> None:
        self._volume = volume
        self._seeker = seeker
        self._ledger = ledger
        self.tenant = tenant
        self._ino = ino
        self._kept: Reservation | None = None
        self._counted = False
        self.end = 0
        self.charged_bytes = 0

    def found(self, end: int) -> None:
        """A file from before a restart has this room: it counts, over a limit if need be."""
        self._charge(on_disk(end) - self.charged_bytes)
        self._volume.quota.note_used(self.tenant, self.charged_bytes)
        self.end = end

    async def grow(self, need_end: int, most_end: int, *, is_fast: bool, wait: bool) -> Reservation | None:
        """Room up to `need_end`, and further where there is some; `took` or `release` follows. None: not now. With
        `wait` it comes or there will be none: OSError."""
        ample_end = max(STEP_BYTES_MIN, need_end * (TIMES_FAST if is_fast else TIMES))
        size, wanted = self._bytes_to(need_end), self._bytes_to(min(ample_end, most_end))
        if wait:
            return await self._seeker.take(Writing(self.tenant, self._ino, self.end), size, wanted)
        return await self._seeker.take_now(self.tenant, size, wanted)

    def is_short(self, end: int) -> bool:
        """Whether so little is left of it that it had better be made larger."""
        return self.end - end <= self.end // 2

    def _bytes_to(self, end: int) -> int:
        extra = INDEX_EXTRA_BYTES if self._kept is None else 0
        return 2 * (on_disk(end) - on_disk(self.end)) + extra

    def end_of(self, reservation: Reservation) -> int:
        """How far the file may grow with that: by whole pages, which is what it takes of the disk."""
        extra = INDEX_EXTRA_BYTES if self._kept is None else 0
        pages = (reservation.remaining_bytes - extra) // 2 // DISK_PAGE_BYTES
        return on_disk(self.end) + pages * DISK_PAGE_BYTES

    def took(self, reservation: Reservation, end: int) -> None:
        """The disk has it, too."""
        grown = on_disk(end) - on_disk(self.end)
        reservation.commit(grown)
        self._charge(grown)
        self.end = end
        if self._kept is None:
            self._kept = reservation
        else:
            self._kept.absorb(reservation)

    def _charge(self, more: int) -> None:
        if self._counted:
            self._ledger.change(self.tenant, more)
        else:
            self._ledger.add(self.tenant, more)
            self._counted = True
        self.charged_bytes += more

    def sealed(self, files_bytes: int) -> None:
        """The files that it became are counted by the catalog from here on; of its own, `freed` is to come."""
        kept, self._kept = self._kept, None
        left = files_bytes
        if kept is not None:
            some = min(left, kept.remaining_bytes)
            kept.commit(some)
            left -= some
            kept.release()
        if left:
            self._volume.quota.note_used(self.tenant, left)

    def freed(self) -> None:
        """Its file is gone."""
        if self._kept is not None:
            self._kept.release()
            self._kept = None
        if self._counted:
            self._ledger.remove(self.tenant, self.charged_bytes)
            self._volume.evictor.give_back(self.tenant, self.charged_bytes)
            self._counted = False
        self.charged_bytes = 0
