"""Cold scans keep to their bytes a second and their places, on a clock that waiting moves."""

from __future__ import annotations

import threading

import pytest

from aof2.engine.remote.errors import RemoteThrottledError
from aof2.engine.remote.limiter import ReadLimiters, RemoteReadLimiter
from tests.remote.helpers import MIB, Clock


def limiter(clock: Clock, **settings: int) -> RemoteReadLimiter:
    def wait(changed: threading.Condition, timeout_s: float) -> None:
        clock.sleep_s(timeout_s)

    return RemoteReadLimiter(clock.env(), "t", wait=wait, **settings)  # type: ignore[arg-type]


def test_bandwidth_is_kept() -> None:
    clock = Clock()
    limit = limiter(clock, bytes_per_s=10 * MIB, parallel=4)
    start_s = clock.now_s
    for _ in range(100):
        with limit.admit(MIB, timeout_s=60):
            pass
    # 100 MiB at 10 MiB/s, of which the bucket held the first second's worth and the last request is owed.
    assert clock.now_s - start_s == pytest.approx(8.9, abs=0.01)
    assert limit.admitted_bytes == 100 * MIB


def test_a_request_larger_than_the_bucket_passes_and_is_paid_for() -> None:
    clock = Clock()
    limit = limiter(clock, bytes_per_s=MIB, parallel=4)
    with limit.admit(5 * MIB, timeout_s=1):
        pass
    start_s = clock.now_s
    with limit.admit(1, timeout_s=60):
        pass
    assert clock.now_s - start_s == pytest.approx(4)


def test_idle_time_is_not_saved_up_beyond_a_second() -> None:
    clock = Clock()
    limit = limiter(clock, bytes_per_s=MIB, parallel=4)
    clock.now_s += 1000
    for _ in range(4):
        with limit.admit(MIB, timeout_s=60):
            pass
    assert clock.now_s == pytest.approx(1000 + 1000 + 2)


def test_the_deadline_ends_waiting_and_leaves_no_trace() -> None:
    clock = Clock()
    limit = limiter(clock, bytes_per_s=MIB, parallel=1)
    with limit.admit(10 * MIB, timeout_s=1):
        start_s = clock.now_s
        with pytest.raises(RemoteThrottledError, match="cold scan of t"), limit.admit(1, timeout_s=3):
            pass
        assert clock.now_s - start_s == pytest.approx(3)
        assert (limit.running, limit.waiting) == (1, 0)
    with pytest.raises(RemoteThrottledError), limit.admit(1, timeout_s=0.5):
        pass
    assert (limit.running, limit.waiting) == (0, 0)


def test_a_failing_reader_gives_its_place_back() -> None:
    limit = limiter(Clock(), bytes_per_s=0, parallel=1)
    with pytest.raises(ZeroDivisionError), limit.admit(1, timeout_s=1):
        raise ZeroDivisionError
    with limit.admit(1, timeout_s=1):
        assert limit.running == 1


def test_places_go_by_priority_then_arrival() -> None:
    limit = RemoteReadLimiter(Clock().env(), "t", bytes_per_s=0, parallel=1)
    order: list[str] = []

    def scan(name: str, priority: int) -> None:
        with limit.admit(1, timeout_s=60, priority=priority):
            order.append(name)

    threads = []
    with limit.admit(1, timeout_s=1):
        for number, (name, priority) in enumerate([("low", -1), ("first", 0), ("second", 0), ("high", 5)], 1):
            thread = threading.Thread(target=scan, args=(name, priority))
            thread.start()
            threads.append(thread)
            while limit.waiting < number:
                threading.Event().wait(0.001)
    for thread in threads:
        thread.join()
    assert order == ["high", "first", "second", "low"]


def test_never_more_than_its_places_at_once() -> None:
    limit = RemoteReadLimiter(Clock().env(), "t", bytes_per_s=0, parallel=3)
    seen: list[int] = []

    def scan() -> None:
        for _ in range(50):
            with limit.admit(1, timeout_s=60):
                seen.append(limit.running)

    threads = [threading.Thread(target=scan) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 400
    assert max(seen) <= 3
    assert limit.running == 0


def test_one_limiter_a_tenant() -> None:
    limiters = ReadLimiters(Clock().env(), bytes_per_s=MIB, parallel=2)
    assert limiters.of("a") is limiters.of("a")
    assert limiters.of("a") is not limiters.of("b")


@pytest.mark.parametrize("settings", [{"bytes_per_s": -1, "parallel": 1}, {"bytes_per_s": 1, "parallel": 0}])
def test_bad_limits_name_their_key(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"cache\.cold_scan"):
        limiter(Clock(), **settings)
