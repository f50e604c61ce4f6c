"""The policy: least recently used first, in two segments, with a memory of what left.

    written, fetched, used ──► probation ── a second use ──► protected (two thirds of the room at most)
                                  │  ▲                          │
                         evicted  ▼  └──── the oldest, when ◄───┘
                               ghosts       there are too many
                                  └── a second use: straight to protected

Why not plain LRU: one `grep -r` through more than fits would push out everything. What is used once passes through
probation only; what was used twice goes when nothing else is left to go. Why ghosts: without them a new working set
that is larger than probation would never get in: each file of it would leave before its second use. Why two thirds:
enough for a working set to survive a scan; and closer to LRU than more would be (`tests/recency/test_segmented.py`
measures both).

What is a second use: making a file is none, or the first `grep -r` over what was copied here would count twice.
Programs open a file several times for one purpose (Spark reads a Parquet file's footer, then its data), several of them
side by side. So a repeat counts when, since the last use that counted, as many other uses came as `_gap` says (up to
GAP_MAX; fewer where few things are here), or about a second passed.

A key costs some 40 bytes.

Invariants
- A key is in one list. Each list is in order of last use; `_units` is the sum of what is in it.
- Ghosts stand for no more units than the room has, and are at most GHOSTS_MAX.

Owner: one thread or lock of the caller's. Crash: what was last saved is left.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from typing import Final

from aof2.engine.recency.policy import Image
from aof2.engine.recency.slots import Slots

PROTECTED_SHARE: Final = 2 / 3
GHOSTS_MAX: Final = 1 << 20
GAP_MAX: Final = 8
GAP_SHARE: Final = 64
USES_A_SECOND: Final = 8  # what a second without any other use counts for
WALK_FIRST: Final = 64

# Lists, and the slots that are their ends. In the saved form, too: never renumber.
PROBATION: Final = 0
PROTECTED: Final = 1
GHOSTS: Final = 2
LISTS: Final = (PROBATION, PROTECTED, GHOSTS)
# Stands in probation, and for nothing: what is newer was used in this run.
_START: Final = 3
# In the saved form the highest bit of a size says that it was used, not only made.
USED_BIT: Final = 1 << 31
UNITS_MAX: Final = USED_BIT - 1
_U32: Final = 0xFFFFFFFF


class SegmentedLru:
    """See above. `capacity_units`: the room that all of it together has."""

    def __init__(self, capacity_units: int, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._capacity = max(1, capacity_units)
        self._protected_max = int(self._capacity * PROTECTED_SHARE)
        self._clock_s = clock_s
        self._slots = Slots(len(LISTS) + 1)
        self._newer = array("I", (_START, PROTECTED, GHOSTS, PROBATION))  # of a list's own slot: its oldest
        self._older = array("I", (_START, PROTECTED, GHOSTS, PROBATION))  # … its newest
        self._size = array("I", (0, 0, 0, 0))
        self._mark = array("I", (0, 0, 0, 0))  # when the last use that counted was, in uses
        self._list = bytearray((PROBATION, PROTECTED, GHOSTS, PROBATION))
        self._used = bytearray(4)  # whether a use was counted at all
        self._units = [0, 0, 0]
        self._counts = [0, 0, 0]
        self._uses = 0
        self._last_key = -1
        self.changes = 0

    def __contains__(self, key: int) -> bool:
        return self._find_here(key) >= 0

    def _find_here(self, key: int) -> int:
        """The slot of what is here; -1: it is not."""
        slot = self._slots.find(key)
        return slot if slot >= 0 and self._list[slot] != GHOSTS else -1

    def __len__(self) -> int:
        return self._counts[PROBATION] + self._counts[PROTECTED]

    def units_of(self, key: int) -> int:
        """How large it is here; 0: it is not."""
        slot = self._find_here(key)
        return self._size[slot] if slot >= 0 else 0

    @property
    def units(self) -> int:
        """How large all of it is together."""
        return self._units[PROBATION] + self._units[PROTECTED]

    # -- uses --------------------------------------------------------------------------------------------------

    def used(self, key: int) -> None:
        if key != self._last_key:
            self._uses += 1
            self._last_key = key
        now = self._now()
        self.changes += 1
        slot = self._slots.find(key)
        if slot < 0:
            slot = self._arrive(key)
        which, again = self._list[slot], self._used[slot]
        if which == GHOSTS:
            self._return(slot, PROTECTED if again else PROBATION)
        elif which == PROBATION and again and (now - self._mark[slot]) & _U32 >= self._gap():
            self._move(slot, PROTECTED)
            self._shrink_protected()
        else:
            self._move(slot, which)
            if again:
                return  # the same use, as far as can be told, or one more
        self._used[slot], self._mark[slot] = 1, now

    def touched(self, key: int) -> None:
        slot = self._slots.find(key)
        if slot < 0:
            self.changes += 1
            self._arrive(key)
        elif self._list[slot] == GHOSTS:
            self.changes += 1
            self._return(slot, PROBATION)
        elif self._newer[slot] != self._list[slot]:  # else it is the newest already
            self.changes += 1
            self._move(slot, self._list[slot])

    def _now(self) -> int:
        return (self._uses + int(self._clock_s() * USES_A_SECOND)) & _U32

    def _gap(self) -> int:
        return min(GAP_MAX, max(1, len(self) // GAP_SHARE))

    def _arrive(self, key: int) -> int:
        """It is here, the newest; how large is said by `sized`."""
        slot = self._new(key, 0)
        self._link(slot, PROBATION)
        return slot

    def _return(self, ghost: int, which: int) -> None:
        """It is here again, the newest."""
        self._resize(ghost, 0)
        self._move(ghost, which)

    def _shrink_protected(self) -> None:
        while self._units[PROTECTED] > self._protected_max and self._counts[PROTECTED] > 1:
            self._move(self._newer[PROTECTED], PROBATION)

    # -- what is here --------------------------------------------------------------------------------------------

    def sized(self, key: int, units: int) -> None:
        if key not in self:
            self.touched(key)
        slot = self._slots.find(key)
        self.changes += 1
        self._resize(slot, units)
        self._shrink_protected()

    def admit_old(self, key: int, units: int) -> None:
        slot = self._slots.find(key)
        if slot >= 0:
            if self._list[slot] != GHOSTS:
                return
            self._resize(slot, units)
            self._unlink(slot)  # that it was used before it left is remembered
        else:
            slot = self._new(key, units)
        self.changes += 1
        self._link(slot, PROBATION, self._older[_START])

    def unwanted(self, key: int) -> None:
        slot = self._find_here(key)
        if slot >= 0:
            self.changes += 1
            self._unlink(slot)
            self._link(slot, PROBATION, PROBATION)

    def evicted(self, key: int) -> None:
        slot = self._find_here(key)
        if slot < 0:
            return
        self.changes += 1
        self._move(slot, GHOSTS)
        while self._units[GHOSTS] > self._capacity or self._counts[GHOSTS] > GHOSTS_MAX:
            self.forget(self._slots.keys[self._newer[GHOSTS]])

    def forget(self, key: int) -> None:
        slot = self._slots.remove(key)
        if slot >= 0:
            self.changes += 1
            self._unlink(slot)

    # -- the order -------------------------------------------------------------------------------------------------

    def in_order(self) -> Iterator[int]:
        seen: set[int] = set()
        some = WALK_FIRST
        # No pointer is kept between two steps: what was met may be gone by then, or the newest. What stays is passed
        # again, twice as much a time, so that all of it costs a few walks.
        while found := self._oldest(some, seen):
            seen.update(found)
            yield from found
            some *= 2

    def _oldest(self, count: int, but: set[int]) -> list[int]:
        found: list[int] = []
        for which in (PROBATION, PROTECTED):
            slot = self._newer[which]
            while slot != which and len(found) < count:
                if slot != _START and (key := self._slots.keys[slot]) not in but:
                    found.append(key)
                slot = self._newer[slot]
        return found

    # -- lists -----------------------------------------------------------------------------------------------------

    def _new(self, key: int, units: int) -> int:
        slot = self._slots.add(key)
        if slot == len(self._list):
            for column in (self._newer, self._older, self._size, self._mark):
                column.append(0)
            self._list.append(0)
            self._used.append(0)
        self._size[slot] = min(units, UNITS_MAX)
        self._mark[slot] = self._used[slot] = 0
        return slot

    def _resize(self, slot: int, units: int) -> None:
        units = min(units, UNITS_MAX)
        self._units[self._list[slot]] += units - self._size[slot]
        self._size[slot] = units

    def _move(self, slot: int, which: int) -> None:
        self._unlink(slot)
        self._link(slot, which)

    def _link(self, slot: int, which: int, after: int | None = None) -> None:
        """Into a list, as its newest, or behind another of it."""
        older = self._older[which] if after is None else after
        newer = self._newer[older]
        self._newer[older] = self._older[newer] = slot
        self._older[slot], self._newer[slot] = older, newer
        self._list[slot] = which
        self._units[which] += self._size[slot]
        self._counts[which] += 1

    def _unlink(self, slot: int) -> None:
        older, newer = self._older[slot], self._newer[slot]
        self._newer[older], self._older[newer] = newer, older
        which = self._list[slot]
        self._units[which] -= self._size[slot]
        self._counts[which] -= 1

    # -- saved and loaded ------------------------------------------------------------------------------------------

    def imager(self) -> Callable[[], Image]:
        """The order as of now; the call of the result puts it together, on any thread."""
        newer, size, keys, used = self._newer[:], self._size[:], self._slots.keys[:], self._used[:]
        counts = (self._counts[0], self._counts[1], self._counts[2])

        def image() -> Image:
            order = array("I")
            for which in LISTS:
                slot = newer[which]
                while slot != which:
                    if slot != _START:
                        order.append(slot)
                    slot = newer[slot]
            sizes = array("I", (size[s] | used[s] * USED_BIT for s in order))
            return Image(counts, array("Q", (keys[s] for s in order)), sizes)

        return image

    def load(self, image: Image) -> None:
        """Takes over an order, into an empty policy; its keys are all different."""
        first = len(self._list)
        total = len(image.keys)
        self._slots.fill(image.keys)
        self._newer.extend(range(first + 1, first + total + 1))
        self._older.extend(range(first - 1, first + total - 1))
        self._size.extend(size & UNITS_MAX for size in image.sizes)
        self._used.extend(size >> 31 for size in image.sizes)
        self._mark.extend([self._now() - GAP_MAX & _U32] * total)  # long ago
        for which, count in zip(LISTS, image.counts, strict=True):
            self._list.extend(bytes([which]) * count)
            if count:
                self._splice(first, first + count - 1, which)
                self._units[which] = sum(self._size[first : first + count])
                self._counts[which] = count
                first += count
        self._shrink_protected()

    def _splice(self, oldest: int, newest: int, which: int) -> None:
        """Slots that are linked among each other become all of a list; of probation, what is older than this run."""
        end = _START if which == PROBATION else which
        self._newer[which], self._older[oldest] = oldest, which
        self._newer[newest], self._older[end] = end, newest
