"""Bad weather in one place: deadlines, jittered retries, slowing down, a circuit breaker, and the counters of all that.

One `Resilience` a remote, shared by its callers. `run` tries an attempt until it works, the deadline comes, the retries
are used up, or an error says that trying again is no use.

- **Retries** wait between half and all of a ceiling that doubles (50 ms to 5 s).
- **Throttling** sets a common interval between the starts of requests: doubled (from 10 ms to 2 s) by each throttled
  request that started after the last doubling, so that a burst counts once; shortened by a tenth with each success.
- **The breaker** opens after 8 unavailable attempts in a row: new calls fail at once and say since when. After a
  cool-down (1 s, doubling to 5 s, jittered; never more than half of `remote.timeout`, so that a caller that waits as
  long as that sees a remote that is back) one call is let through as a probe, with one attempt; its success closes
  the breaker, its failure opens it for longer. Calls that were under way go on with their requests and retries until
  their deadline, and close it when they get through: a server that restarts does not fail an upload. Only
  RemoteUnavailableError counts: an answer, be it "denied" or "no such key", is a living remote.
- **Refusals** (401, 403, a folder that is not ours) are not retried within a call, since keys do not change that fast:
  callers come again. They are counted, and kept by area, that is reads and writes of each first folder of the keys: a
  log whose prefix is denied stays refused while blobs go through, until the next request of its area is let in.

Owner: any thread; a lock guards the few numbers and is never held while waiting. A crash leaves nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from enum import StrEnum
from typing import Final, TypeVar

import msgspec

from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error
from aof2.engine.remote.errors import RemoteAuthError, RemoteThrottledError, RemoteUnavailableError

log = logging.getLogger(__name__)

T = TypeVar("T")

BACKOFF_S: Final = 0.05
BACKOFF_S_MAX: Final = 5.0
INTERVAL_S_MIN: Final = 0.01
INTERVAL_S_MAX: Final = 2.0
BREAKER_FAILURES: Final = 8
COOL_DOWN_S: Final = 1.0
COOL_DOWN_S_MAX: Final = 5.0
_READS: Final = ("get", "head", "list", "range", "read", "bucket", "connect")


class Deadline:
    """A point on the monotonic clock. Waiting past it is refused."""

    def __init__(self, env: Env, timeout_s: float) -> None:
        self._env = env
        self.timeout_s = timeout_s
        self.at_s = env.monotonic_s() + timeout_s

    def left_s(self) -> float:
        return self.at_s - self._env.monotonic_s()

    def check(self, what: str) -> None:
        if self.left_s() <= 0:
            raise self.passed(what)

    def passed(self, what: str) -> RemoteUnavailableError:
        return RemoteUnavailableError(f"{what}: not done within {self.timeout_s:g} s", retryable=False)


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An area that is refused."""

    since_ms: int
    why: str
    times: int


class Refusals:
    """The areas that are refused now, and how many requests ever were. `prefix`: of every name in the bucket. Under
    the lock of the `Resilience` it belongs to."""

    def __init__(self, prefix: str = "") -> None:
        self.total = 0
        self._prefix = prefix
        self._areas: dict[tuple[bool, str], Refusal] = {}

    def note(self, what: str, why: str, now_ms: int) -> bool:
        """A request was refused; whether its area was let in before."""
        self.total += 1
        area = self._area(what)
        old = self._areas.get(area)
        since_ms, times = (old.since_ms, old.times) if old is not None else (now_ms, 0)
        self._areas[area] = Refusal(since_ms=since_ms, why=why, times=times + 1)
        return old is None

    def let_in(self, what: str) -> Refusal | None:
        """A request was answered; the refusal that this ends."""
        return self._areas.pop(self._area(what), None) if self._areas else None

    def oldest(self) -> Refusal | None:
        return min(self._areas.values(), key=lambda refusal: refusal.since_ms, default=None)

    def _area(self, what: str) -> tuple[bool, str]:
        """`put of prefix/manifest/1/…` is a write of `manifest`."""
        name = what.rpartition(" ")[2].removeprefix(self._prefix)
        return what.startswith(_READS), name.partition("/")[0]


class RemoteStats(msgspec.Struct, kw_only=True):
    """The counters; seconds are on the monotonic clock."""

    requests: int = 0
    retries: int = 0
    throttled: int = 0
    unavailable: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    puts_skipped: int = 0
    interval_s: float = 0.0
    breaker: BreakerState = BreakerState.CLOSED
    breaker_opened: int = 0
    probe_in_s: float = 0.0  # until the next call is let through; 0: now
    refused: int = 0
    retries_by: Counter[str] = msgspec.field(default_factory=Counter)  # by operation: get, put, head, list, delete
    refusal: Refusal | None = None  # the one that lasts longest


class Resilience:
    """The weather of one remote. `sleep_s` defaults to a wait that `close` ends."""

    def __init__(
        self,
        env: Env,
        name: str,
        *,
        retries: int = 5,
        timeout_s: float = 30.0,
        sleep_s: Callable[[float], object] | None = None,
        prefix: str = "",
    ) -> None:
        self._refusals = Refusals(prefix)
        self._now = RemoteStats()
        self._env = env
        self._name = name
        self._retries_max = retries
        self._closing = threading.Event()
        self._sleep_s = sleep_s or self._closing.wait
        self._lock = threading.Lock()
        self._next_start_s = 0.0
        self._slowed_at_s = -1.0
        self._failures = 0
        self._opened_at_s = 0.0
        self._probe_at_s = 0.0
        self._cool_down_max_s = min(COOL_DOWN_S_MAX, timeout_s / 2)
        self._cool_down_s = min(COOL_DOWN_S, self._cool_down_max_s)
        self._last_error = ""

    def run(self, what: str, attempt: Callable[[], T], deadline: Deadline, *, under_way: bool = False) -> T:
        """The attempt's result, or the last error. `under_way`: a further request of a call that was let in."""
        probe = not under_way and self._admit(what)
        try:
            return self._tries(what, attempt, deadline, 0 if probe else self._retries_max)
        finally:
            if probe:
                self._end_probe()

    def _tries(self, what: str, attempt: Callable[[], T], deadline: Deadline, retries: int) -> T:
        for number in range(retries + 1):
            started_s = self._start(what, deadline)
            try:
                result = attempt()
            except (RemoteThrottledError, RemoteUnavailableError) as e:
                if isinstance(e, RemoteUnavailableError):
                    self._on_unavailable(e)
                else:
                    self._on_throttled(started_s)
                ceiling = min(BACKOFF_S_MAX, BACKOFF_S * 2**number)
                pause_s = self._env.rng.uniform(ceiling / 2, ceiling)
                final = number == retries or not getattr(e, "retryable", True)
                if final or pause_s >= deadline.left_s():
                    raise
                log.info("remote: trying again", extra={"what": what, "error": str(e), "attempt": number + 1})
            except RemoteAuthError as e:
                self._on_refused(what, e)
                raise
            except Aof2Error:
                self._on_let_in(what)
                raise
            else:
                self._on_let_in(what, success=True)
                return result
            with self._lock:
                self._now.retries += 1
                self._now.retries_by[_operation(what)] += 1
            self.pause(what, pause_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _start(self, what: str, deadline: Deadline) -> float:
        """Waits for this request's turn while the remote asks for fewer."""
        with self._lock:
            now = self._env.monotonic_s()
            turn = max(now, self._next_start_s) if self._now.interval_s else now
            if turn >= deadline.at_s:
                raise deadline.passed(what)
            if self._now.interval_s:
                self._next_start_s = turn + self._now.interval_s
            self._now.requests += 1
        if turn > now:
            self.pause(what, turn - now)
        if self._closing.is_set():
            raise closed(what)
        return turn

    def pause(self, what: str, seconds: float) -> None:
        """Sleeps, unless the store is closed meanwhile."""
        self._sleep_s(seconds)
        if self._closing.is_set():
            raise closed(what)

    def _admit(self, what: str) -> bool:
        """False: go on. True: go on as the probe."""
        with self._lock:
            if self._closing.is_set():
                raise closed(what)
            if self._now.breaker is BreakerState.CLOSED:
                return False
            now = self._env.monotonic_s()
            if self._now.breaker is BreakerState.OPEN and now >= self._probe_at_s:
                self._now.breaker = BreakerState.HALF_OPEN
                return True
            since_s = now - self._opened_at_s
            wait_s = self._probe_in_s()
            raise RemoteUnavailableError(
                f"{what}: {self._name} has been unavailable for {since_s:.1f} s ({self._last_error}); "
                f"asked again in {wait_s:.1f} s",
                retryable=False,
                again_in_s=max(wait_s, 0.05),  # 0 would say that it was asked
            )

    def _probe_in_s(self) -> float:
        """Under the lock."""
        if self._now.breaker is BreakerState.CLOSED:
            return 0.0
        return max(0.0, self._probe_at_s - self._env.monotonic_s())

    def _end_probe(self) -> None:
        """A probe that neither succeeded nor failed (its caller was stopped) leaves the question open."""
        with self._lock:
            if self._now.breaker is BreakerState.HALF_OPEN:
                self._now.breaker = BreakerState.OPEN

    def _on_refused(self, what: str, error: RemoteAuthError) -> None:
        with self._lock:
            self._alive()
            first = self._refusals.note(what, str(error), self._env.now_ms())
        if first:
            log.info("remote: refused", extra={"remote": self._name, "what": what, "error": str(error)})

    def _on_let_in(self, what: str, *, success: bool = False) -> None:
        with self._lock:
            if success and self._now.interval_s:
                self._now.interval_s *= 0.9
                if self._now.interval_s < INTERVAL_S_MIN / 2:
                    self._now.interval_s = 0.0
            self._alive()
            over = self._refusals.let_in(what)
        if over is not None:
            lasted_s = round((self._env.now_ms() - over.since_ms) / 1000, 1)
            log.info("remote: let in again", extra={"remote": self._name, "what": what, "after_s": lasted_s})

    def _on_throttled(self, started_s: float) -> None:
        with self._lock:
            self._now.throttled += 1
            if started_s >= self._slowed_at_s:
                self._now.interval_s = min(INTERVAL_S_MAX, max(INTERVAL_S_MIN, self._now.interval_s * 2))
                self._slowed_at_s = self._env.monotonic_s()
                self._next_start_s = self._slowed_at_s + self._now.interval_s
            self._alive()

    def _alive(self) -> None:
        """The remote answered. Under the lock."""
        self._failures = 0
        if self._now.breaker is not BreakerState.CLOSED:
            self._now.breaker = BreakerState.CLOSED
            self._cool_down_s = min(COOL_DOWN_S, self._cool_down_max_s)
            lasted_s = self._env.monotonic_s() - self._opened_at_s
            log.info("remote: available again", extra={"remote": self._name, "after_s": round(lasted_s, 1)})

    def _on_unavailable(self, error: RemoteUnavailableError) -> None:
        with self._lock:
            self._now.unavailable += 1
            self._failures += 1
            now = self._env.monotonic_s()
            if self._now.breaker is BreakerState.CLOSED and self._failures >= BREAKER_FAILURES:
                self._opened_at_s = now
                self._now.breaker_opened += 1
                self._last_error = str(error)
                self._open(now)
                log.warning("remote: %s is unavailable: %s", self._name, error)
            elif self._now.breaker is not BreakerState.CLOSED:
                if self._now.breaker is BreakerState.HALF_OPEN:
                    self._cool_down_s = min(self._cool_down_max_s, self._cool_down_s * 2)
                self._last_error = str(error)
                self._open(now)  # a call still under way failed: as good as a probe

    def _open(self, now: float) -> None:
        self._now.breaker = BreakerState.OPEN
        self._probe_at_s = now + self._env.rng.uniform(self._cool_down_s / 2, self._cool_down_s)

    @property
    def is_fair(self) -> bool:
        """A request may go out at once: breaker closed, no throttling, no shutdown."""
        return self._now.breaker is BreakerState.CLOSED and not self._now.interval_s and not self._closing.is_set()

    def went_well(self, received: int) -> None:
        """A request outside `run` was answered."""
        with self._lock:
            self._now.requests += 1
            self._now.bytes_received += received
            self._alive()

    def sent(self, count: int) -> None:
        with self._lock:
            self._now.bytes_sent += count

    def received(self, count: int) -> None:
        with self._lock:
            self._now.bytes_received += count

    def skipped_put(self) -> None:
        with self._lock:
            self._now.puts_skipped += 1

    def stats(self) -> RemoteStats:
        """As they are now."""
        with self._lock:
            return msgspec.structs.replace(
                self._now,
                retries_by=self._now.retries_by.copy(),
                probe_in_s=self._probe_in_s(),
                refused=self._refusals.total,
                refusal=self._refusals.oldest(),
            )

    def close(self) -> None:
        self._closing.set()


def _operation(what: str) -> str:
    """`get of …` is a get. What goes by another name (the start of an upload, a part, a replacement) is a put."""
    word = what.split(" ", 1)[0]
    return word if word in ("get", "head", "list", "delete") else "put"


def closed(what: str) -> RemoteUnavailableError:
    return RemoteUnavailableError(f"{what}: the remote is closed", retryable=False)
