"""Sums over time: fine while little time has passed, coarser as it grows, so that ten years take what ten minutes do.

Bins begin a second wide. When there are more than BINS_MAX, two become one, and bins are twice as wide from then on:
what is added stays exact, only when it happened gets coarser.

Invariants
- The sum over all bins of a field is the sum of all that was added to it.

Owner: one thread. Memory only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

BINS_MAX: Final = 4096
BIN_MS_FIRST: Final = 1000


class Timeline:
    """Named sums by time."""

    def __init__(self, fields: tuple[str, ...], *, bin_ms: int = BIN_MS_FIRST, bins_max: int = BINS_MAX) -> None:
        self.fields = fields
        self.bin_ms = bin_ms
        self._bins_max = bins_max
        self._bins: dict[int, NDArray[np.int64]] = {}
        self._column = {name: at for at, name in enumerate(fields)}

    def __len__(self) -> int:
        return len(self._bins)

    def add(self, field: str, times_ms: NDArray[np.uint64], amounts: NDArray[Any] | None = None) -> None:
        """Adds amounts, or 1 each, at these times."""
        if not len(times_ms):
            return
        bins, where = np.unique(times_ms // np.uint64(self.bin_ms), return_inverse=True)
        sums = np.zeros(len(bins), np.int64)
        np.add.at(sums, where, 1 if amounts is None else amounts)
        column = self._column[field]
        for number, amount in zip(bins.tolist(), sums.tolist(), strict=True):
            self._bin(number)[column] += amount
        while len(self._bins) > self._bins_max:
            self._halve()

    def put(self, at_ms: int, amounts: dict[str, int]) -> None:
        for field, amount in amounts.items():
            self.add(field, np.array([at_ms], np.uint64), np.array([amount], np.int64))

    def merge(self, other: Timeline) -> None:
        """What another has, as if it had been added here."""
        times_ms = np.array(sorted(other._bins), np.uint64) * np.uint64(other.bin_ms)
        while self.bin_ms < other.bin_ms:
            self._halve()
        table = other._table()
        for at, field in enumerate(other.fields):
            self.add(field, times_ms, table[:, at])

    def _bin(self, number: int) -> NDArray[np.int64]:
        found = self._bins.get(number)
        if found is None:
            found = self._bins[number] = np.zeros(len(self.fields), np.int64)
        return found

    def _halve(self) -> None:
        old, self._bins = self._bins, {}
        self.bin_ms *= 2
        for number, sums in old.items():
            self._bin(number // 2)[:] += sums

    def _table(self) -> NDArray[np.int64]:
        rows = [self._bins[number] for number in sorted(self._bins)]
        return np.array(rows, np.int64).reshape(len(rows), len(self.fields))

    def total(self, field: str) -> int:
        column = self._column[field]
        return sum(int(sums[column]) for sums in self._bins.values())

    def rows(self, width_ms: int = 0) -> tuple[list[int], dict[str, list[int]]]:
        """When each bin begins, and each field's sums; bins of at least that width, those with something in them."""
        times_ms = np.array(sorted(self._bins), np.int64) * self.bin_ms
        table = self._table()
        if width_ms > self.bin_ms and len(times_ms):
            times_ms, where = np.unique(times_ms // width_ms * width_ms, return_inverse=True)
            wide = np.zeros((len(times_ms), len(self.fields)), np.int64)
            np.add.at(wide, where, table)
            table = wide
        return times_ms.tolist(), {field: table[:, at].tolist() for at, field in enumerate(self.fields)}
