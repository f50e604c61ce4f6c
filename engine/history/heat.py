"""Which directories are used: opens (as sampled), misses, bytes fetched and evictions, by directory and hour.

Invariants
- Sums over all cells are what was added: where there are more than CELLS_MAX, the coldest become one, OTHER.

Owner: one thread. Memory: CELLS_MAX cells.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from aof2.engine.history.fold import Moved
from aof2.engine.recency.uses import Did, Sample

CELLS_MAX: Final = 50_000
HOUR_MS: Final = 3_600_000
OTHER: Final = "(other)"
GONE: Final = "(removed)"

Directory = Callable[[int, int], str]
"""(stream id, segment id) or (stream id, inode) → the directory's path."""


class Cell(NamedTuple):
    directory: str
    hour_ms: int
    opens: int
    misses: int
    fetched_bytes: int
    evictions: int


class Heat:
    """By (directory, hour)."""

    def __init__(self, of_segment: Directory, of_inode: Directory) -> None:
        self._of_segment = of_segment
        self._of_inode = of_inode
        self._cells: dict[tuple[str, int], list[int]] = {}

    def moved(self, stream_id: int, moved: Moved) -> None:
        hot = np.flatnonzero((moved.misses > 0) | (moved.fetched_bytes > 0) | (moved.evictions > 0))
        columns = (moved.segment_id, moved.timestamp_ms, moved.misses, moved.fetched_bytes, moved.evictions)
        for segment, ms, misses, fetched, evictions in zip(*(c[hot].tolist() for c in columns), strict=True):
            self._add(self._of_segment(stream_id, segment), ms, 0, misses, fetched, evictions)

    def opened(self, stream_id: int, sample: Sample) -> None:
        for ino, ms, did, _ in sample.entries:
            if did in (Did.HIT, Did.MISS):
                self._add(self._of_inode(stream_id, ino), ms, 1 << sample.shift, 0, 0, 0)

    def _add(self, directory: str, ms: int, *amounts: int) -> None:
        slot = (directory, ms // HOUR_MS * HOUR_MS)
        cell = self._cells.setdefault(slot, [0, 0, 0, 0])
        for at, amount in enumerate(amounts):
            cell[at] += amount
        if len(self._cells) > CELLS_MAX:
            self._merge_coldest()

    def _merge_coldest(self) -> None:
        by_heat = sorted(self._cells, key=lambda slot: (self._cells[slot][0] + self._cells[slot][1], slot))
        for slot in by_heat[: CELLS_MAX // 2]:
            cell = self._cells.pop(slot)
            other = self._cells.setdefault((OTHER, slot[1]), [0, 0, 0, 0])
            other[:] = [a + b for a, b in zip(other, cell, strict=True)]

    def cells(self) -> list[Cell]:
        return [Cell(directory, hour, *self._cells[directory, hour]) for directory, hour in sorted(self._cells)]

    def hottest(self, count: int) -> list[Cell]:
        """Directories over all hours, the most used first."""
        sums: dict[str, list[int]] = {}
        for (directory, _), cell in self._cells.items():
            total = sums.setdefault(directory, [0, 0, 0, 0])
            total[:] = [a + b for a, b in zip(total, cell, strict=True)]
        order = sorted(sums, key=lambda name: (-(sums[name][0] + sums[name][1]), -sums[name][2], name))
        return [Cell(name, 0, *sums[name]) for name in order[:count]]
