"""Samples of uses: how they are taken, their bytes, and what a replay makes of them."""

from __future__ import annotations

import random

import pytest

from aof2.engine.errors import CorruptError
from aof2.engine.recency import InUse
from aof2.engine.recency.noted import ENTRIES_MAX, Noted
from aof2.engine.recency.uses import ENTRY, HEADER, Did, Sample, Use, decode, encode, is_sampled

STREAM = 1 << 40
LIMIT = 1000


class Told:
    ms = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        return self.ms / 1000


def noted(told: Told, limit: int = LIMIT) -> Noted:
    return Noted(InUse(limit, clock_s=told.monotonic_s), told.now_ms, limit_units=limit, low_water=0.9)


def test_hits_misses_and_what_came_and_went() -> None:
    told = Told()
    policy = noted(told)
    policy.sized(STREAM | 1, 10)
    told.ms += 5
    policy.used(STREAM | 1)
    policy.used(STREAM | 2)
    policy.missed(STREAM | 2)
    policy.missed(STREAM | 2)
    policy.sized(STREAM | 2, 7)
    policy.admit_old(STREAM | 3, 4)
    policy.forget(STREAM | 1)
    sample = policy.take()[1]
    assert (sample.uses, sample.missed, sample.limit_units, sample.low_water) == (2, 1, LIMIT, 0.9)
    assert [(one.ino & 0xFF, one.did, one.units) for one in sample.entries] == [
        (1, Did.SIZED, 10),
        (1, Did.HIT, 10),
        (2, Did.MISS, 7),
        (3, Did.CAME, 4),
        (1, Did.LEFT, 0),
    ]
    assert policy.take() == {}
    policy.missed(STREAM | 2)
    assert [one.did for one in policy.take()[1].entries] == [Did.LATE]


def test_each_tenant_has_its_own() -> None:
    policy = noted(Told())
    policy.used(STREAM | 1)
    policy.used(2 << 40 | 1)
    samples = policy.take()
    assert {stream_id: sample.uses for stream_id, sample in samples.items()} == {1: 1, 2: 1}
    assert all(one.ino >> 40 == stream_id for stream_id, sample in samples.items() for one in sample.entries)


def test_a_sample_is_bounded_and_its_counts_exact() -> None:
    policy = noted(Told(), 1 << 30)
    for ino in range(20_000):
        policy.used(STREAM | ino)
        policy.missed(STREAM | ino)
        policy.sized(STREAM | ino, 3)
    sample = policy.take()[1]
    assert (sample.uses, sample.missed) == (20_000, 20_000)
    assert 0 < len(sample.entries) <= ENTRIES_MAX
    assert sample.shift >= 4
    assert all(is_sampled(one.ino, sample.shift) and (one.did, one.units) == (Did.MISS, 3) for one in sample.entries)
    assert len(encode(sample)) <= HEADER.size + ENTRIES_MAX * ENTRY.size
    policy.used(STREAM | 1)
    policy.take()
    for _ in range(40):
        policy.take()
    policy.used(STREAM | 12345)
    assert policy.take()[1].shift < sample.shift


def test_bytes_come_back_as_they_were() -> None:
    entries = tuple(Use(STREAM | n, 1_000_000 + n, Did(n % 6), n * 1000) for n in range(20))
    sample = Sample(1_000_000, 2_000_000, 5, 0.85, 77, 3, 2, entries)
    assert decode(encode(sample)) == sample
    assert decode(encode(sample) + b"of a later version") == sample
    for cut in (0, HEADER.size - 1, len(encode(sample)) - 1):
        with pytest.raises(CorruptError):
            decode(encode(sample)[:cut])


def test_the_policy_decides_as_if_it_were_alone() -> None:
    told, rng = Told(), random.Random(3)
    alone, policy = InUse(LIMIT, clock_s=told.monotonic_s), noted(told)
    for _ in range(3000):
        told.ms += rng.randrange(400)
        ino, what, units = STREAM | rng.randrange(200), rng.randrange(8), rng.randrange(1, 30)
        for one in (alone, policy):
            calls = (one.used, one.used, one.touched, one.forget, one.unwanted, one.evicted)
            if what < len(calls):
                calls[what](ino)
            else:
                one.sized(ino, units)
    assert list(policy.in_order()) == list(alone.in_order())
    assert (policy.changes, len(policy)) == (alone.changes, len(alone))


def test_a_thinned_replay_is_near_the_whole_one() -> None:
    pytest.importorskip("numpy", reason="the report extra is not installed")
    from aof2.engine.history import uses

    rng, told = random.Random(8), Told()
    samples: list[Sample] = []
    cache = uses._Cache(20_000, 0.9)
    entries: list[Use] = []
    for _ in range(60_000):
        told.ms += rng.randrange(50)
        ino = STREAM | int(rng.paretovariate(0.6)) % 8000
        cache.clock.ms = told.ms
        entries.append(Use(ino, told.ms, Did.HIT if cache.used(ino, 10) else Did.MISS, 10))
    samples.append(Sample(0, told.ms, 20_000, 0.9, len(entries), 0, 0, tuple(entries)))
    whole = uses.replay(samples, 20_000 * 4096)
    assert whole.hits == whole.measured_hits
    thin = uses.replay([uses._thinned(samples[0], 3)], 20_000 * 4096)
    assert thin.uses < whole.uses / 2
    assert thin.hit_rate is not None
    assert whole.hit_rate is not None
    assert abs(thin.hit_rate - (thin.measured_rate or 0)) < 0.05
