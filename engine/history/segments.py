"""A number for each segment, set by the records about it: what it was before a record is what the record changed.

Segment ids come from one counter a stream, so the numbers of neighbours lie in one page; pages that no record speaks of
are not there. A volume of a million segments takes 8 MB a number.

Owner: one thread. Memory only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aof2.engine.history.columns import U64

PAGE: Final = 1 << 13
_SHIFT: Final = np.uint64(13)


class Numbers:
    """Of one stream's segments; 0 until set."""

    def __init__(self) -> None:
        self._pages: dict[int, NDArray[np.uint64]] = {}

    def get(self, segments: U64) -> U64:
        out = np.zeros(len(segments), np.uint64)
        for number, where in _by_page(segments):
            page = self._pages.get(number)
            if page is not None:
                out[where] = page[segments[where] % np.uint64(PAGE)]
        return out

    def put(self, segments: U64, values: U64) -> None:
        """Each segment once."""
        for number, where in _by_page(segments):
            page = self._pages.get(number)
            if page is None:
                page = self._pages[number] = np.zeros(PAGE, np.uint64)
            page[segments[where] % np.uint64(PAGE)] = values[where]

    def step(self, segments: U64, values: U64) -> U64:
        """Sets, record after record; what each of them found there before."""
        before = np.zeros(len(segments), np.uint64)
        if not len(segments):
            return before
        order = np.argsort(segments, kind="stable")
        s, v = segments[order], values[order]
        first = np.concatenate(([True], s[1:] != s[:-1]))
        found = np.empty_like(v)
        found[1:] = v[:-1]
        found[first] = self.get(s[first])
        last = np.concatenate((first[1:], [True]))
        self.put(s[last], v[last])
        before[order] = found
        return before

    def top(self, count: int) -> list[tuple[int, int]]:
        """The largest, as (segment, number)."""
        found: list[tuple[int, int]] = []
        for number, page in self._pages.items():
            for at in np.argsort(page)[-count:].tolist():
                if page[at]:
                    found.append((number * PAGE + at, int(page[at])))
        return sorted(found, key=lambda one: (-one[1], one[0]))[:count]

    def sum(self) -> int:
        return sum(int(page.sum(dtype=np.uint64)) for page in self._pages.values())


def _by_page(segments: U64) -> list[tuple[int, Any]]:
    if not len(segments):
        return []
    pages = segments >> _SHIFT
    lowest, highest = int(pages.min()), int(pages.max())
    if lowest == highest:
        return [(lowest, slice(None))]
    return [(number, np.flatnonzero(pages == number)) for number in np.unique(pages).tolist()]
