"""A policy that also takes notes: which files are used, for the samples that go into the log (`uses.py`).

Invariants
- The policy behind it decides as if this were not here. What costs nothing to pass on (`touched`) is not even seen.
- At most ENTRIES_MAX notes a sample: beyond it the files that stand for all become half as many. A sample with few
  notes lets twice as many in again.

Owner: the trio thread, as the policy. Memory only: a crash loses what was noted since the last sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from aof2.engine.recency.policy import EvictionPolicy, Image
from aof2.engine.recency.uses import SHIFT_MAX, Did, Sample, Use, is_sampled

ENTRIES_MAX: Final = 1024
ENTRIES_FEW: Final = 256
STREAM_SHIFT: Final = 40  # of an inode, which is the key


class Noted:
    """`policy`, as before; what it is told of uses, `take` gives out by stream."""

    def __init__(
        self, policy: EvictionPolicy, now_ms: Callable[[], int], *, limit_units: int, low_water: float
    ) -> None:
        self.policy = policy
        self.touched = policy.touched
        self.unwanted = policy.unwanted
        self.evicted = policy.evicted
        self.units_of = policy.units_of
        self.in_order: Callable[[], Iterator[int]] = policy.in_order
        self.imager: Callable[[], Callable[[], Image]] = policy.imager
        self.load = policy.load
        self._now_ms = now_ms
        self._limit_units = limit_units
        self._low_water = low_water
        self._shift = 0
        self._from_ms = now_ms()
        self._begin()

    def _begin(self) -> None:
        self._uses: Counter[int] = Counter()
        self._missed: Counter[int] = Counter()
        self._missing: set[int] = set()  # used, and fetched since
        self._entries: list[Use] = []
        self._last: dict[int, int] = {}  # inode → its last use among the entries

    @property
    def changes(self) -> int:
        return self.policy.changes

    def __contains__(self, key: int) -> bool:
        return key in self.policy

    def __len__(self) -> int:
        return len(self.policy)

    # -- told ----------------------------------------------------------------------------------------------------

    def used(self, key: int) -> None:
        self._uses[key >> STREAM_SHIFT] += 1
        self._missing.discard(key)
        if is_sampled(key, self._shift):
            self._note(key, Did.HIT, self.policy.units_of(key))
        self.policy.used(key)

    def missed(self, key: int) -> None:
        """Bytes of it that are read are not in hot_cache."""
        if key in self._missing:
            return
        self._missing.add(key)
        self._missed[key >> STREAM_SHIFT] += 1
        if is_sampled(key, self._shift):
            at = self._last.get(key)
            if at is None:
                self._note(key, Did.LATE, self.policy.units_of(key))
            else:
                self._entries[at] = self._entries[at]._replace(did=Did.MISS)

    def sized(self, key: int, units: int) -> None:
        if is_sampled(key, self._shift) and units != self.policy.units_of(key):
            at = self._last.get(key)
            if at is None:
                self._note(key, Did.SIZED, units)
            else:
                self._entries[at] = self._entries[at]._replace(units=units)
        self.policy.sized(key, units)

    def admit_old(self, key: int, units: int) -> None:
        if is_sampled(key, self._shift) and key not in self.policy:
            self._note(key, Did.CAME, units)
        self.policy.admit_old(key, units)

    def forget(self, key: int) -> None:
        if is_sampled(key, self._shift) and key in self.policy:
            self._note(key, Did.LEFT, 0)
        self.policy.forget(key)

    def _note(self, key: int, did: Did, units: int) -> None:
        if did is Did.LEFT:
            self._last.pop(key, None)
        elif did is not Did.CAME:
            self._last[key] = len(self._entries)
        self._entries.append(Use(key, self._now_ms(), did, units))
        while len(self._entries) > ENTRIES_MAX and self._shift < SHIFT_MAX:
            self._shift += 1
            self._entries = [one for one in self._entries if is_sampled(one.ino, self._shift)]
            self._last = {one.ino: at for at, one in enumerate(self._entries) if one.did is not Did.CAME}

    # -- given out -------------------------------------------------------------------------------------------------

    def take(self) -> dict[int, Sample]:
        """A sample for each stream of which something was noted since the last time; empty when nothing was."""
        now_ms = self._now_ms()
        streams = self._uses.keys() | self._missed.keys() | {one.ino >> STREAM_SHIFT for one in self._entries}
        samples = {
            stream_id: Sample(
                self._from_ms,
                now_ms,
                self._limit_units,
                self._low_water,
                self._uses[stream_id],
                self._missed[stream_id],
                self._shift,
                tuple(one for one in self._entries if one.ino >> STREAM_SHIFT == stream_id),
            )
            for stream_id in sorted(streams)
        }
        if len(self._entries) < ENTRIES_FEW and self._shift:
            self._shift -= 1
        self._from_ms = now_ms
        self._begin()
        return samples
