"""Small caches, and what their policy is compared with."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from aof2.engine.pagecache import PageCache, PageKey

PAGE = 10


def key(block_index: int, object_id: int = 1, generation: int = 1) -> PageKey:
    return PageKey(object_id, generation, block_index)


def cache_of(pages: int) -> PageCache:
    return PageCache(pages * PAGE)


def replay(cache: PageCache, trace: Sequence[int]) -> float:
    """Reads the blocks of a trace one after the other; the share that was held."""
    hits = 0
    for block in trace:
        if cache.get(key(block)) is not None:
            hits += 1
        else:
            cache.put(key(block), b"x" * PAGE)
            assert cache.used_bytes <= cache.capacity_bytes
    check(cache)
    return hits / len(trace)


def replay_lru(pages: int, trace: Sequence[int], *, after: int = 0) -> float:
    """What LRU makes of it; the share of what comes `after` so many requests."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for i, block in enumerate(trace):
        hits += block in held and i >= after
        held[block] = None
        held.move_to_end(block)
        if len(held) > pages:
            held.popitem(last=False)
    return hits / (len(trace) - after)


def check(cache: PageCache) -> None:
    """The bound, and that the books agree with the pages."""
    assert 0 <= cache.dirty_bytes <= cache.used_bytes <= cache.capacity_bytes
    assert cache.used_bytes == sum(len(p.data) for p in cache._pages.values())
    assert cache.dirty_bytes == sum(len(p.data) for p in cache._pages.values() if p.version)
    assert cache._queues.evictable_bytes == cache.used_bytes - cache.dirty_bytes
    assert all((p.queue is None) == bool(p.version) for p in cache._pages.values())
    assert sum(map(len, cache._objects.values())) == len(cache._pages)
    assert cache._queues._ghost_bytes <= cache.capacity_bytes
