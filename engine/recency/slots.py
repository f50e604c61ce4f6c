"""Where a 64-bit key has its row in parallel arrays: an open-addressing index in a few bytes a key.

A dict of ints takes some 110 bytes a key, and there may be millions. This takes 5 to 10 beside the key itself. It is
cut into SHARDS so that growing rehashes a few thousand keys at a time, not all of them.

Invariants
- A shard holds slot + 1 (0: empty), by linear probing, never more than LOAD full; removing closes the gap, so there are
  no tombstones.
- `keys[slot]` is the key of a slot in use. Slots are reused.

Owner: the policy it is part of. Crash: memory only.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Final

SHARDS: Final = 256
SHARD_MIN: Final = 8
LOAD: Final = (5, 8)
_MIX: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


class Slots:
    """Keys and their slots. The first `reserved` slots are the caller's own."""

    def __init__(self, reserved: int = 0) -> None:
        self.keys = array("Q", bytes(8 * reserved))
        self._free = array("I")
        self._shards = [array("I") for _ in range(SHARDS)]
        self._counts = array("I", bytes(4 * SHARDS))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, key: int) -> int:
        """The key's slot; -1: it has none."""
        hashed = key * _MIX & _MASK
        shard = self._shards[hashed >> 56]
        mask = len(shard) - 1
        if mask < 0:
            return -1
        keys = self.keys
        at = hashed >> 24 & mask
        while slot := shard[at]:
            if keys[slot - 1] == key:
                return slot - 1
            at = at + 1 & mask
        return -1

    def add(self, key: int) -> int:
        """A slot for a key that has none. `keys` may have grown by one."""
        number = (key * _MIX & _MASK) >> 56
        if (self._counts[number] + 1) * LOAD[1] > len(self._shards[number]) * LOAD[0]:
            self._grow(number)
        if self._free:
            slot = self._free.pop()
            self.keys[slot] = key
        else:
            slot = len(self.keys)
            self.keys.append(key)
        self._place(self._shards[number], key, slot)
        self._counts[number] += 1
        self._count += 1
        return slot

    def fill(self, keys: array[int]) -> None:
        """All of these at once, into an index that is empty: slots in their order, behind the reserved ones."""
        hashes = [key * _MIX & _MASK for key in keys]
        counts = Counter(hashed >> 56 for hashed in hashes)
        for number, count in counts.items():
            size = SHARD_MIN
            while count * LOAD[1] > size * LOAD[0]:
                size *= 2
            self._shards[number] = array("I", bytes(4 * size))
            self._counts[number] = count
        shards, slot = self._shards, len(self.keys)
        for hashed in hashes:
            slot += 1
            shard = shards[hashed >> 56]
            mask = len(shard) - 1
            at = hashed >> 24 & mask
            while shard[at]:
                at = at + 1 & mask
            shard[at] = slot
        self.keys.extend(keys)
        self._count = len(keys)

    def remove(self, key: int) -> int:
        """The slot the key had, free again; -1: it had none."""
        hashed = key * _MIX & _MASK
        number = hashed >> 56
        shard, keys = self._shards[number], self.keys
        mask = len(shard) - 1
        if mask < 0:
            return -1
        at = hashed >> 24 & mask
        while (slot := shard[at]) and keys[slot - 1] != key:
            at = at + 1 & mask
        if not slot:
            return -1
        self._close_gap(shard, at)
        self._counts[number] -= 1
        self._count -= 1
        self._free.append(slot - 1)
        return slot - 1

    def _place(self, shard: array[int], key: int, slot: int) -> None:
        mask = len(shard) - 1
        at = (key * _MIX & _MASK) >> 24 & mask
        while shard[at]:
            at = at + 1 & mask
        shard[at] = slot + 1

    def _close_gap(self, shard: array[int], gap: int) -> None:
        """Moves what was pushed past the gap back into it."""
        mask = len(shard) - 1
        at = gap + 1 & mask
        while slot := shard[at]:
            home = (self.keys[slot - 1] * _MIX & _MASK) >> 24 & mask
            if at - home & mask >= at - gap & mask:
                shard[gap] = slot
                gap = at
            at = at + 1 & mask
        shard[gap] = 0

    def _grow(self, number: int) -> None:
        old = self._shards[number]
        new = self._shards[number] = array("I", bytes(4 * max(SHARD_MIN, 2 * len(old))))
        for slot in old:
            if slot:
                self._place(new, self.keys[slot - 1], slot - 1)
