"""Traces of accesses, and textbook LRU on them."""

from __future__ import annotations

import itertools
import random
from bisect import bisect
from collections import OrderedDict
from collections.abc import Mapping, Sequence


def zipf(count: int, accesses: int, *, s: float = 1.0, seed: int = 1) -> list[int]:
    """Numbers below `count`: the n-th most popular is asked for 1 / n^s as often as the most popular."""
    rng = random.Random(seed)
    names = list(range(count))
    rng.shuffle(names)
    weights = list(itertools.accumulate(1 / (rank + 1) ** s for rank in range(count)))
    return [names[bisect(weights, rng.random() * weights[-1])] for _ in range(accesses)]


class TextbookLru:
    """Least recently used first, by bytes, nothing else."""

    def __init__(self, capacity_bytes: int, sizes: Mapping[int, int] | Sequence[int]) -> None:
        self._capacity_bytes = capacity_bytes
        self._sizes = sizes
        self._order: OrderedDict[int, None] = OrderedDict()
        self._used_bytes = 0

    def access(self, name: int) -> bool:
        """Whether it was here; it is now."""
        if name in self._order:
            self._order.move_to_end(name)
            return True
        self._order[name] = None
        self._used_bytes += self._sizes[name]
        while self._used_bytes > self._capacity_bytes:
            oldest, _ = self._order.popitem(last=False)
            self._used_bytes -= self._sizes[oldest]
        return False


def hit_rate_of_lru(trace: Sequence[int], capacity_bytes: int, sizes: Mapping[int, int] | Sequence[int]) -> float:
    lru = TextbookLru(capacity_bytes, sizes)
    return sum(lru.access(name) for name in trace) / len(trace)
