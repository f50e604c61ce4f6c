"""The compact index against a dict."""

from __future__ import annotations

import random
from array import array

from hypothesis import given
from hypothesis import strategies as st

from aof2.engine.recency.slots import Slots

keys = st.one_of(st.integers(0, 40), st.integers(0, (1 << 64) - 1), st.integers(0, 40).map(lambda n: (3 << 40) + n))


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), keys), max_size=300))
def test_it_is_a_dict(steps: list[tuple[str, int]]) -> None:
    slots, model = Slots(2), dict[int, int]()
    for what, key in steps:
        assert slots.find(key) == model.get(key, -1)
        if what == "add" and key not in model:
            model[key] = slots.add(key)
        elif what == "remove":
            assert slots.remove(key) == model.pop(key, -1)
        assert len(slots) == len(model)
    assert len(set(model.values())) == len(model)
    assert all(slots.find(key) == slot >= 2 and slots.keys[slot] == key for key, slot in model.items())


def test_many_keys_of_one_stream_come_and_go() -> None:
    rng = random.Random(3)
    slots, model = Slots(), dict[int, int]()
    for n in range(20_000):
        key = (7 << 40) + n
        model[key] = slots.add(key)
        if rng.random() < 0.6:
            gone = rng.choice([*model][-200:]) if n % 50 == 0 else (7 << 40) + rng.randrange(n + 1)
            assert slots.remove(gone) == model.pop(gone, -1)
    assert len(slots) == len(model)
    assert all(slots.find(key) == slot for key, slot in model.items())
    assert len(slots.keys) < 14_000, "slots are reused"


@given(st.sets(keys, max_size=200))
def test_filled_at_once_it_is_the_same(some: set[int]) -> None:
    slots = Slots(3)
    slots.fill(array("Q", some))
    assert [slots.find(key) for key in some] == list(range(3, 3 + len(some)))
    assert slots.find(41) == (-1 if 41 not in some else slots.find(41))
    for key in some:
        slots.remove(key)
    assert len(slots) == 0
    assert slots.find(next(iter(some), 0)) == -1
