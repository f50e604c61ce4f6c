"""Retries, slowing down and the breaker on a clock that moves only when somebody sleeps."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import pytest

from aof2.engine.errors import Aof2Error
from aof2.engine.remote import resilience as module
from aof2.engine.remote.errors import (
    RemoteAuthError,
    RemoteCorruptError,
    RemoteMissingError,
    RemoteThrottledError,
    RemoteUnavailableError,
)
from aof2.engine.remote.resilience import BreakerState, Deadline, Resilience
from tests.remote.helpers import Clock


class Remote:
    """Does what it is told, call by call; then works."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


def down() -> RemoteUnavailableError:
    return RemoteUnavailableError("down")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def weather(clock: Clock) -> Resilience:
    return Resilience(clock.env(), "s3://b", retries=5, sleep_s=clock.sleep_s)


@pytest.fixture
def run(clock: Clock, weather: Resilience) -> Callable[..., str]:
    def call(remote: Remote, timeout_s: float = 30) -> str:
        return weather.run("get of k", remote, Deadline(clock.env(), timeout_s))

    return call


def test_retries_until_it_works(run: Callable[..., str], weather: Resilience, clock: Clock) -> None:
    remote = Remote(down(), RemoteThrottledError("slow"), down())
    assert run(remote) == "done"
    assert (remote.calls, weather.stats().requests, weather.stats().retries) == (4, 4, 3)


def test_pauses_grow_and_are_jittered(run: Callable[..., str], clock: Clock) -> None:
    with pytest.raises(RemoteUnavailableError, match="down"):
        run(Remote(*[down() for _ in range(6)]))
    assert len(clock.slept) == 5
    for number, pause in enumerate(clock.slept):
        ceiling = 0.05 * 2**number
        assert ceiling / 2 <= pause <= ceiling
    other = Clock()
    weather = Resilience(other.env(seed=8), "x", retries=5, sleep_s=other.sleep_s)
    with pytest.raises(RemoteUnavailableError):
        weather.run("w", Remote(*[down() for _ in range(6)]), Deadline(other.env(), 30))
    assert other.slept != clock.slept


def test_the_deadline_ends_retries_with_the_real_cause(clock: Clock) -> None:
    weather = Resilience(clock.env(), "x", retries=100, sleep_s=clock.sleep_s)
    start_s = clock.now_s
    with pytest.raises(RemoteUnavailableError, match="down"):
        weather.run("w", Remote(*[down() for _ in range(7)]), Deadline(clock.env(), 0.3))
    assert clock.now_s - start_s <= 0.3


@pytest.mark.parametrize(
    "error", [RemoteAuthError("no"), RemoteMissingError("no"), RemoteCorruptError("no"), Aof2Error("no")], ids=repr
)
def test_answers_are_not_retried_and_do_not_open_the_breaker(
    error: Aof2Error, run: Callable[..., str], weather: Resilience
) -> None:
    for _ in range(50):
        remote = Remote(error)
        with pytest.raises(type(error)):
            run(remote)
        assert remote.calls == 1
    assert weather.stats().breaker is BreakerState.CLOSED
    assert weather.stats().retries == 0


def test_unavailable_for_good_is_not_retried(run: Callable[..., str]) -> None:
    remote = Remote(RemoteUnavailableError("no bucket", retryable=False))
    with pytest.raises(RemoteUnavailableError):
        run(remote)
    assert remote.calls == 1


def open_breaker(run: Callable[..., str], weather: Resilience) -> None:
    while weather.stats().breaker is not BreakerState.OPEN:
        with pytest.raises(RemoteUnavailableError):
            run(Remote(*[down() for _ in range(6)]))


@pytest.mark.expects_warnings
def test_the_breaker_opens_probes_and_closes(
    run: Callable[..., str], weather: Resilience, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    open_breaker(run, weather)
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert [r.getMessage() for r in warned] == ["remote: s3://b is unavailable: down"]
    clock.now_s += 0.1
    remote = Remote()
    with pytest.raises(RemoteUnavailableError, match=r"unavailable for \d+\.\d s \(down\)") as e:
        run(remote)
    assert (remote.calls, e.value.reason_code) == (0, 3)
    assert weather.stats().breaker is BreakerState.OPEN

    clock.now_s += module.COOL_DOWN_S
    probe = Remote(down(), down())
    with pytest.raises(RemoteUnavailableError, match="down"):
        run(probe)
    assert probe.calls == 1
    assert weather.stats().breaker is BreakerState.OPEN

    clock.now_s += 0.9  # a longer cool-down now
    with pytest.raises(RemoteUnavailableError, match="asked again in"):
        run(Remote())
    clock.now_s += module.COOL_DOWN_S * 2
    assert run(Remote()) == "done"
    assert weather.stats().breaker is BreakerState.CLOSED
    assert weather.stats().breaker_opened == 1
    assert run(Remote(down())) == "done"


@pytest.mark.expects_warnings
def test_one_probe_at_a_time(run: Callable[..., str], weather: Resilience, clock: Clock) -> None:
    open_breaker(run, weather)
    clock.now_s += 2

    def probe() -> str:
        assert weather.stats().breaker is BreakerState.HALF_OPEN
        with pytest.raises(RemoteUnavailableError, match="asked again"):
            run(Remote())
        return "ok"

    assert weather.run("probe", probe, Deadline(clock.env(), 9)) == "ok"
    assert weather.stats().breaker is BreakerState.CLOSED


@pytest.mark.expects_warnings
def test_a_probe_that_was_stopped_leaves_the_question_open(
    run: Callable[..., str], weather: Resilience, clock: Clock
) -> None:
    open_breaker(run, weather)
    clock.now_s += 2

    def stopped() -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        weather.run("probe", stopped, Deadline(clock.env(), 9))
    assert weather.stats().breaker is BreakerState.OPEN
    assert run(Remote()) == "done"


@pytest.mark.expects_warnings
def test_denied_is_an_answer_and_closes_the_breaker(run: Callable[..., str], weather: Resilience, clock: Clock) -> None:
    open_breaker(run, weather)
    clock.now_s += 2
    with pytest.raises(RemoteAuthError):
        run(Remote(RemoteAuthError("denied")))
    assert weather.stats().breaker is BreakerState.CLOSED


@pytest.mark.expects_warnings
def test_a_call_under_way_keeps_its_retries(weather: Resilience, clock: Clock, run: Callable[..., str]) -> None:
    with pytest.raises(RemoteUnavailableError):
        run(Remote(*[down() for _ in range(6)]))
    assert run(Remote(*[down() for _ in range(4)])) == "done"
    assert weather.stats().breaker_opened == 1
    assert weather.stats().breaker is BreakerState.CLOSED


def test_throttling_slows_everybody_down_and_wears_off(
    run: Callable[..., str], weather: Resilience, clock: Clock
) -> None:
    for _ in range(3):
        run(Remote(RemoteThrottledError("SlowDown"), RemoteThrottledError("SlowDown")))
    slow = weather.stats()
    assert slow.throttled == 6
    assert slow.interval_s > 0.1
    starts = []
    for _ in range(5):
        run(Remote())
        starts.append(clock.now_s)
    assert all(b - a > 0.05 for a, b in itertools.pairwise(starts))
    for _ in range(200):
        run(Remote())
    assert weather.stats().interval_s == 0
    before = clock.now_s
    run(Remote())
    assert clock.now_s == before
    assert weather.stats().breaker is BreakerState.CLOSED


def test_a_burst_that_started_together_slows_down_once(weather: Resilience, clock: Clock) -> None:
    clock.now_s += 1
    started = clock.now_s
    clock.now_s += 1
    for _ in range(16):
        weather._on_throttled(started)
    assert weather.stats().interval_s == module.INTERVAL_S_MIN
    weather._on_throttled(clock.now_s)
    assert weather.stats().interval_s == module.INTERVAL_S_MIN * 2


def test_throttled_to_the_end_is_reason_0(run: Callable[..., str]) -> None:
    with pytest.raises(RemoteThrottledError) as e:
        run(Remote(*[RemoteThrottledError("SlowDown") for _ in range(6)]))
    assert e.value.reason_code == 0


def test_close_ends_waiting() -> None:
    weather = Resilience(Clock().env(), "x")
    remote = Remote(down())

    def fail_and_close() -> str:
        weather.close()
        return remote()

    with pytest.raises(RemoteUnavailableError, match="closed"):
        weather.run("w", fail_and_close, Deadline(Clock().env(), 30))
