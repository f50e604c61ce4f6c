"""Random use of PageCache beside a model: no stale byte, no lost dirty page, never over the bound."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from aof2.engine.pagecache import PageCache, PageCacheFullError, PageKey
from tests.pagecache.helpers import check

KEYS = st.builds(PageKey, st.integers(1, 2), st.integers(1, 2), st.integers(0, 5))
SIZES = st.integers(1, 45)


class CacheMachine(RuleBasedStateMachine):
    """`truth` is what each page is, as of its last put or fetch; the cache holds some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PageCache(100)
        self.truth: dict[PageKey, bytes] = {}
        self.dirty: dict[PageKey, int] = {}
        self.stamp = 0

    def bytes_of(self, size: int) -> bytes:
        self.stamp += 1
        return (
            self.stamp.to_bytes(4, "little").ljust(size, b".")[:size] if size >= 4 else bytes([self.stamp % 256]) * size
        )

    @rule(k=KEYS, size=SIZES)
    def put(self, k: PageKey, size: int) -> None:
        data = self.bytes_of(size)
        held = self.cache.put(k, data)
        assert not (held and k in self.dirty)
        if k not in self.dirty:
            self.truth[k] = data
            assert held == (k in self.cache)

    @rule(k=KEYS, size=SIZES)
    def put_dirty(self, k: PageKey, size: int) -> None:
        data = self.bytes_of(size)
        before = self.cache.peek(k)
        try:
            self.dirty[k] = self.cache.put_dirty(k, data)
            self.truth[k] = data
        except PageCacheFullError:
            assert self.cache.peek(k) == before
            assert self.cache.dirty_bytes + size > 100 - (len(before) if before else 0)

    @rule(k=KEYS, stale=st.booleans())
    def mark_clean(self, k: PageKey, stale: bool) -> None:
        version = self.dirty.get(k, 1)
        assert self.cache.mark_clean(k, version - stale) == (k in self.dirty and not stale)
        if not stale:
            self.dirty.pop(k, None)

    @rule(k=KEYS, size=SIZES)
    def get(self, k: PageKey, size: int) -> None:
        """What is not held is fetched by the caller, and put."""
        found = self.cache.get(k)
        if found is None:
            assert k not in self.dirty
            self.cache.put(k, self.truth.setdefault(k, self.bytes_of(size)))
        else:
            assert found == self.truth[k]

    @rule(ks=st.lists(KEYS, max_size=3))
    def drop(self, ks: list[PageKey]) -> None:
        self.cache.drop(ks)
        for k in ks:
            self.gone(k)

    @rule(object_id=st.integers(1, 2), generation=st.integers(1, 2))
    def drop_object(self, object_id: int, generation: int) -> None:
        self.cache.drop_object(object_id, generation)
        for k in [k for k in self.truth if k[:2] == (object_id, generation)]:
            self.gone(k)

    def gone(self, k: PageKey) -> None:
        assert k not in self.cache
        self.dirty.pop(k, None)
        self.truth.pop(k, None)

    @invariant()
    def what_is_held_is_true(self) -> None:
        check(self.cache)
        assert dict(self.cache.dirty_pages()) == self.dirty
        for k in self.dirty:
            assert self.cache.peek(k) == self.truth[k]
        for k, data in self.truth.items():
            assert self.cache.peek(k) in (None, data)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=40)
