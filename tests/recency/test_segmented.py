"""The policy: against a slow model, on traces, through scans, and its size in memory."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.recency import SegmentedLru
from aof2.engine.recency.segmented import GAP_MAX, GAP_SHARE, PROTECTED_SHARE, USES_A_SECOND
from tests.recency.traces import hit_rate_of_lru, zipf


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Model:
    """The same, in lists of keys: oldest first."""

    def __init__(self, capacity: int, clock: Clock) -> None:
        self.capacity, self.clock = capacity, clock
        self.lists: dict[str, list[int]] = {"old": [], "probation": [], "protected": [], "ghosts": []}
        self.size: dict[int, int] = {}
        self.mark: dict[int, int] = {}
        self.used_at_all: set[int] = set()
        self.uses, self.last = 0, -1

    def where(self, key: int) -> str | None:
        return next((name for name, keys in self.lists.items() if key in keys), None)

    def here(self) -> list[int]:
        return self.lists["old"] + self.lists["probation"] + self.lists["protected"]

    def now(self) -> int:
        return self.uses + int(self.clock() * USES_A_SECOND)

    def put(self, key: int, name: str) -> None:
        for keys in self.lists.values():
            if key in keys:
                keys.remove(key)
        self.lists[name].append(key)

    def sum(self, name: str) -> int:
        return sum(self.size[key] for key in self.lists[name])

    def arrive(self, key: int, name: str = "probation") -> None:
        if self.where(key) is None:
            self.used_at_all.discard(key)
        self.put(key, name)
        self.size[key] = 0

    def shrink(self) -> None:
        protected = self.lists["protected"]
        while len(protected) > 1 and self.sum("protected") > int(self.capacity * PROTECTED_SHARE):
            self.put(protected[0], "probation")

    def used(self, key: int) -> None:
        self.uses += key != self.last
        self.last = key
        where = self.where(key)
        if where is None:
            self.arrive(key)
        again, gap = key in self.used_at_all, min(GAP_MAX, max(1, len(self.here()) // GAP_SHARE))
        if where == "ghosts":
            self.arrive(key, "protected" if again else "probation")
        elif where == "protected":
            self.put(key, "protected")
            return
        elif again and self.now() - self.mark[key] >= gap:
            self.put(key, "protected")
            self.shrink()
        else:
            self.put(key, "probation")
            if again:
                return
        self.used_at_all.add(key)
        self.mark[key] = self.now()

    def touched(self, key: int) -> None:
        if key not in self.here():
            self.arrive(key)
        else:
            self.put(key, "protected" if self.where(key) == "protected" else "probation")

    def sized(self, key: int, units: int) -> None:
        if key not in self.here():
            self.arrive(key)
        self.size[key] = units
        self.shrink()

    def admit_old(self, key: int, units: int) -> None:
        if key not in self.here():
            self.forget(key)
            self.put(key, "old")
            self.used_at_all.discard(key)
            self.size[key] = units

    def unwanted(self, key: int) -> None:
        if key in self.here():
            self.put(key, "old")
            self.lists["old"].insert(0, self.lists["old"].pop())

    def evicted(self, key: int) -> None:
        if key in self.here():
            self.put(key, "ghosts")
            while self.sum("ghosts") > self.capacity:
                self.lists["ghosts"].pop(0)

    def forget(self, key: int) -> None:
        for keys in self.lists.values():
            if key in keys:
                keys.remove(key)


steps = st.tuples(
    st.sampled_from(["used", "used", "used", "touched", "sized", "admit_old", "unwanted", "evicted", "forget", "wait"]),
    st.integers(0, 12),
    st.integers(0, 9),
)


@given(st.lists(steps, max_size=120))
def test_it_is_the_model(plan: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    policy, model = SegmentedLru(30, clock_s=clock), Model(30, clock)
    for what, key, units in plan:
        if what == "wait":
            clock.now_s += units / 16
            continue
        for one in (policy, model):
            call = getattr(one, what)
            call(key, units) if what in ("sized", "admit_old") else call(key)
        assert list(policy.in_order()) == model.here()
        assert len(policy) == len(model.here())
        assert all((key in policy) == (key in model.here()) for key in range(13))
        assert policy.units == sum(model.size[key] for key in model.here())


@given(st.lists(steps, max_size=80))
def test_what_is_loaded_goes_in_the_order_that_was_saved(plan: list[tuple[str, int, int]]) -> None:
    policy = SegmentedLru(30, clock_s=Clock())
    for what, key, units in plan:
        if what != "wait":
            call = getattr(policy, what)
            call(key, units) if what in ("sized", "admit_old") else call(key)
    image = policy.imager()()
    loaded = SegmentedLru(30, clock_s=Clock())
    loaded.load(image)
    assert list(loaded.in_order()) == list(policy.in_order())
    assert loaded.imager()() == image
    loaded.admit_old(77, 1)
    loaded.used(78)
    order = list(loaded.in_order())
    assert order.index(77) < order.index(78)
    assert order[: image.counts[0]] == list(image.keys[: image.counts[0]]), "older than what was found without a use"


def test_all_may_change_while_the_order_is_walked() -> None:
    policy = SegmentedLru(1000, clock_s=Clock())
    for key in range(500):
        policy.used(key)
    met = []
    for key in policy.in_order():
        met.append(key)
        if key % 3 == 0:
            policy.evicted(key)
        elif key % 3 == 1:
            policy.used(key + 2 if key + 2 < 500 else key)
        if key == 250:
            policy.forget(499)
    assert sorted(met) == list(range(499)), "each once, whatever happened to the others"


class Cache:
    """A cache that the policy runs, by bytes, down to a low-water mark: as the evictor does."""

    def __init__(self, capacity: int, sizes: dict[int, int], low_water: float = 0.9) -> None:
        self.clock = Clock()
        self.policy = SegmentedLru(capacity, clock_s=self.clock)
        self.capacity, self.low_water, self.sizes = capacity, low_water, sizes

    def access(self, key: int) -> bool:
        self.clock.now_s += 0.001
        hit = key in self.policy
        self.policy.used(key)
        if not hit:
            self.landed(key)
        self.policy.touched(key)
        return hit

    def make(self, key: int) -> None:
        self.policy.touched(key)
        self.landed(key)

    def landed(self, key: int) -> None:
        self.policy.sized(key, self.sizes[key])
        if self.policy.units > self.capacity:
            for victim in self.policy.in_order():
                if self.policy.units <= self.capacity * self.low_water:
                    break
                self.policy.evicted(victim)

    def hits(self, trace: Iterable[int]) -> float:
        found = [self.access(key) for key in trace]
        return sum(found) / len(found)


def sizes_of(count: int) -> dict[int, int]:
    rng = random.Random(5)
    return {n: rng.randint(1, 32) for n in range(count)}


@pytest.mark.parametrize("s", [0.6, 0.8, 1.0, 1.2])
def test_on_a_zipf_trace_it_is_as_good_as_lru(s: float) -> None:
    sizes = sizes_of(2000)
    capacity = sum(sizes.values()) // 10
    trace = zipf(2000, 12_000, s=s)
    assert Cache(capacity, sizes).hits(trace) >= hit_rate_of_lru(trace, capacity, sizes) - 0.01


@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_a_scan_pushes_out_nothing_that_was_used_twice(share: float) -> None:
    sizes = dict.fromkeys(range(100_000), 4)
    cache = Cache(4000, sizes)
    hot = range(int(1000 * share))
    for _ in range(2):
        cache.hits(hot)
    assert cache.hits(range(5000, 15_000)) == 0.0
    assert cache.hits(hot) == 1.0


def test_what_was_only_made_before_is_used_once_by_a_scan() -> None:
    """Copied here, some of it left since; the hot set is read twice, then everything once."""
    cache = Cache(4000, dict.fromkeys(range(2000), 4))
    for key in range(2000):
        cache.make(key)
    for _ in range(2):
        cache.hits(range(300))
    cache.hits(range(300, 2000))
    assert cache.hits(range(300)) == 1.0


def test_a_new_working_set_gets_in() -> None:
    """Also one that is larger than probation, over an old one that fills all it may."""
    cache = Cache(4000, dict.fromkeys(range(10_000), 4))
    for _ in range(4):
        cache.hits(range(900))
    assert cache.hits([key for _ in range(6) for key in range(2000, 2600)]) > 0.6
    assert cache.hits(range(2000, 2600)) > 0.95


def test_opened_twice_for_one_purpose_is_used_once() -> None:
    """Footer, then data, by several readers side by side."""
    cache = Cache(4000, dict.fromkeys(range(100_000), 4))
    for _ in range(2):
        cache.hits(range(500))
    for first in range(10_000, 30_000, 4):
        for _ in range(2):
            cache.hits(range(first, first + 4))
    assert cache.hits(range(500)) == 1.0


def test_a_key_costs_some_tens_of_bytes() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        policy = SegmentedLru(1 << 40)
        for key in range(30_000):
            policy.used((3 << 40) + key)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 30_000 < 60
