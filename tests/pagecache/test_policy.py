"""Hit rates on fixed traces: scans, loops, skewed use, and blocks read in pieces."""

from __future__ import annotations

import random

import pytest

from tests.pagecache.helpers import cache_of, key, replay, replay_lru

PAGES = 400
HOT = range(PAGES * 8 // 10)


def scan(start: int, length: int = 10 * PAGES) -> range:
    return range(10_000 + start, 10_000 + start + length)


def test_a_scan_does_not_flush_the_hot_set() -> None:
    cache = cache_of(PAGES)
    replay(cache, [*HOT] * 3)
    assert replay(cache, scan(0)) == 0
    assert replay(cache, HOT) >= 0.97
    before = [*HOT, *HOT, *HOT, *scan(0)]
    assert replay_lru(PAGES, [*before, *HOT], after=len(before)) == 0


def test_scan_after_scan() -> None:
    cache = cache_of(PAGES)
    replay(cache, [*HOT] * 3)
    for i in range(5):
        replay(cache, scan(i * 100_000))
        assert replay(cache, HOT) >= 0.97


def test_the_hot_set_is_found_during_a_scan() -> None:
    """Every other request is the scan's from the start: nothing was warmed before."""
    rng = random.Random(1)
    trace = [b for page in scan(0, 20 * PAGES) for b in (page, rng.choice(range(PAGES // 2)))]
    cache = cache_of(PAGES)
    ours = replay(cache, trace)
    assert ours > replay_lru(PAGES, trace)
    assert ours >= 0.48  # half of all requests is all there is to get


@pytest.mark.parametrize("pieces", [2, 8, 32])
def test_a_scan_in_pieces_is_still_a_scan(pieces: int) -> None:
    cache = cache_of(PAGES)
    replay(cache, [*HOT] * 3)
    replay(cache, [page for page in scan(0) for _ in range(pieces)])
    assert replay(cache, HOT) >= 0.97


@pytest.mark.parametrize("scans", [2, 4, 16])
def test_scans_side_by_side_in_pieces(scans: int) -> None:
    cache = cache_of(PAGES)
    replay(cache, [*HOT] * 3)
    side_by_side = zip(*(scan(i * 50_000, 2 * PAGES) for i in range(scans)), strict=True)
    replay(cache, [page for pages in side_by_side for _ in range(8) for page in pages])
    assert replay(cache, HOT) >= 0.97


@pytest.mark.parametrize("share", [1.1, 1.5, 3])
def test_a_loop_larger_than_the_cache(share: float) -> None:
    trace = [*range(int(PAGES * share))] * 20
    ours = replay(cache_of(PAGES), trace)
    assert replay_lru(PAGES, trace) == 0
    assert ours >= {1.1: 0.5, 1.5: 0.2, 3: 0.0}[share]


def test_a_loop_within_the_cache_is_all_hits() -> None:
    cache = cache_of(PAGES)
    replay(cache, range(PAGES))
    assert replay(cache, [*range(PAGES)] * 5) == 1


@pytest.mark.parametrize("skew", [0.8, 1.0, 1.2])
def test_skewed_use_does_no_worse_than_lru(skew: float) -> None:
    rng = random.Random(7)
    blocks = range(10 * PAGES)
    trace = rng.choices(blocks, [1 / (b + 1) ** skew for b in blocks], k=40_000)
    assert replay(cache_of(PAGES), trace) >= replay_lru(PAGES, trace)


def test_a_hot_set_that_moves_is_followed() -> None:
    cache = cache_of(PAGES)
    for phase in range(4):
        hot = range(phase * 1_000, phase * 1_000 + PAGES // 2)
        replay(cache, [*hot] * 10)
        assert replay(cache, hot) >= 0.97


def test_remembered_keys_are_bounded() -> None:
    cache = cache_of(10)
    replay(cache, range(10_000))
    assert len(cache._queues._ghosts) <= 10
    assert key(9_999) in cache


def test_pages_in_use_outlive_pages_that_once_were() -> None:
    cache = cache_of(PAGES)
    replay(cache, [*HOT] * 3)
    replay(cache, scan(0))  # the hot set is in the main queue now
    hits = 0.0
    newcomers = [*range(1_000, 1_400)] * 20
    for i, block in enumerate(newcomers):
        replay(cache, [block])
        hits += replay(cache, [i % 100])
    assert hits / len(newcomers) >= 0.99
