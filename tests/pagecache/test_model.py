"""Random use of PageCache beside a model: no stale byte, no lost dirty page, never over the bound."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from aof2.engine.pagecache import PageCache, PageCacheFullError, PageKey, Pin
from tests.pagecache.helpers import cache_of, check, key, run

KEYS = st.builds(PageKey, st.integers(1, 2), st.integers(1, 2), st.integers(0, 5))
SIZES = st.integers(1, 45)


class CacheMachine(RuleBasedStateMachine):
    """`truth` is what each page is, as of its last put or fetch; the cache holds some of it."""

    pins = Bundle("pins")

    def __init__(self) -> None:
        super().__init__()
        self.cache = PageCache(100, expected_bytes=10)
        self.truth: dict[PageKey, bytes] = {}
        self.dirty: dict[PageKey, int] = {}
        self.pinned: dict[Pin, PageKey] = {}
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
            if not held:
                self.forget_pins(k)

    @rule(k=KEYS, size=SIZES)
    def put_dirty(self, k: PageKey, size: int) -> None:
        data = self.bytes_of(size)
        before = self.cache.peek(k)
        try:
            self.dirty[k] = self.cache.put_dirty(k, data)
            self.truth[k] = data
        except PageCacheFullError:
            assert self.cache.peek(k) == before
            assert self.cache.stats().held_bytes + size > 100 - (len(before) if before else 0)

    @rule(k=KEYS, stale=st.booleans())
    def mark_clean(self, k: PageKey, stale: bool) -> None:
        version = self.dirty.get(k, 1)
        assert self.cache.mark_clean(k, version - stale) == (k in self.dirty and not stale)
        if not stale:
            self.dirty.pop(k, None)

    @rule(k=KEYS, size=SIZES, fails=st.booleans())
    def get(self, k: PageKey, size: int, fails: bool) -> None:
        held = self.cache.peek(k)
        data = self.truth.setdefault(k, self.bytes_of(size))

        async def fetch() -> bytes:
            assert held is None
            if fails:
                raise OSError(5, "no")
            return data

        async def main() -> bytes:
            return await self.cache.get(k, fetch)

        if held is None and fails:
            with pytest.raises(OSError):
                run(main)
        else:
            assert run(main) == data

    @rule(target=pins, k=KEYS)
    def pin(self, k: PageKey) -> Pin | None:
        pin = self.cache.pin(k)
        assert (pin is not None) == (k in self.cache)
        if pin is not None:
            self.pinned[pin] = k
        return pin

    @rule(pin=consumes(pins))
    def unpin(self, pin: Pin | None) -> None:
        if pin is not None:
            pin.release()
            self.pinned.pop(pin, None)

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
        self.forget_pins(k)

    def forget_pins(self, k: PageKey) -> None:
        self.pinned = {p: x for p, x in self.pinned.items() if x != k}

    @invariant()
    def what_is_held_is_true(self) -> None:
        check(self.cache)
        assert dict(self.cache.dirty_pages()) == self.dirty
        for k in [*self.dirty, *self.pinned.values()]:
            assert self.cache.peek(k) == self.truth[k]
        for pin, k in self.pinned.items():
            assert pin.data == self.truth[k]
        for k, data in self.truth.items():
            assert self.cache.peek(k) in (None, data)


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=80, stateful_step_count=40)


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_tasks_at_random_never_read_what_was_replaced_before_they_asked(seed: int) -> None:
    """Readers, writers, droppers and cancellations interleave; a read is at least as new as when it was asked for."""
    rng = random.Random(seed)
    cache = cache_of(4)
    stored = dict.fromkeys(range(6), 0)  # what the tier below has: version by block
    newest = dict.fromkeys(range(6), 0)

    def page(version: int) -> bytes:
        return version.to_bytes(4, "little").ljust(rng.randint(4, 14), b".")

    async def read(block: int) -> None:
        least = newest[block]

        async def fetch() -> bytes:
            version = stored[block]
            await trio.sleep(rng.choice([0, 1, 2, 5]))
            if rng.random() < 0.15:
                raise OSError(5, "no")
            return page(version)

        with trio.move_on_after(rng.choice([1, 3, 100])):
            try:
                data = await cache.get(key(block), fetch, rng.choice([None, 4, 14, 50]))
            except OSError:
                return
            assert int.from_bytes(data[:4], "little") >= least

    async def write(block: int) -> None:
        newest[block] += 1
        try:
            version = cache.put_dirty(key(block), page(newest[block]))
        except PageCacheFullError:
            newest[block] -= 1
            return
        written = newest[block]
        await trio.sleep(rng.choice([0, 1, 4]))
        stored[block] = max(stored[block], written)
        assert cache.mark_clean(key(block), version) == (newest[block] == written)

    async def replace_below(block: int) -> None:
        if not cache.dirty_pages():
            newest[block] += 1
            stored[block] = newest[block]
            cache.drop([key(block)])

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(80):
                act = rng.choice([read, read, read, read, write, replace_below])
                nursery.start_soon(act, rng.randrange(6))
                await trio.sleep(rng.choice([0, 0, 1]))
                check(cache)
        check(cache)
        assert not cache._flights
        assert cache.stats().inflight_bytes == 0
        assert cache.stats().dirty_bytes == 0

    run(main)
