"""RemoteReadLimiter: cold scans get so many bytes a second and so many requests at once, and no more.

Each tenant has its own: one tenant's scan takes nothing from another's. Who waits is served by priority (higher first),
then in order of arrival. The bandwidth is a bucket that holds one second's worth and may be overdrawn by one request,
so a request larger than the bucket passes, and the next ones wait until its debt is paid.

Invariants: never more than `parallel` admitted at once; over any time t at most (t + 1 s) × bytes_per_s plus one
request a place are admitted; a waiter ends at its deadline.

Owner: any thread, a condition guards all. A crash leaves nothing.
"""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aof2.engine.env import Env
from aof2.engine.remote.errors import RemoteThrottledError

Wait = Callable[[threading.Condition, float], object]


class RemoteReadLimiter:
    """The cold-scan budget of one tenant. `bytes_per_s` 0: no ceiling."""

    def __init__(
        self, env: Env, tenant: str, *, bytes_per_s: int, parallel: int, wait: Wait = threading.Condition.wait
    ) -> None:
        if bytes_per_s < 0:
            raise ValueError(f"cache.cold_scan_bytes_per_s = {bytes_per_s}: allowed is 0 (no ceiling) or more")
        if parallel < 1:
            raise ValueError(f"cache.cold_scan_parallel = {parallel}: allowed is 1 or more")
        self.tenant = tenant
        self.admitted_bytes = 0
        self.waits = 0
        self._env = env
        self._rate = bytes_per_s
        self._parallel = parallel
        self._wait = wait
        self._changed = threading.Condition()
        self._arrivals = itertools.count()
        self._queue: list[tuple[int, int]] = []
        self._running = 0
        self._tokens = float(bytes_per_s)
        self._filled_at_s = env.monotonic_s()

    @property
    def running(self) -> int:
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextmanager
    def admit(self, size: int, *, timeout_s: float, priority: int = 0) -> Iterator[None]:
        """Holds a place while `size` bytes are read. RemoteThrottledError when none comes free in time."""
        self._acquire(size, timeout_s, priority)
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _acquire(self, size: int, timeout_s: float, priority: int) -> None:
        with self._changed:
            give_up_s = self._env.monotonic_s() + timeout_s
            place = (-priority, next(self._arrivals))
            bisect.insort(self._queue, place)
            try:
                first = True
                while (pause_s := self._pause_s(place)) > 0:
                    left_s = give_up_s - self._env.monotonic_s()
                    if left_s <= 0:
                        raise RemoteThrottledError(f"cold scan of {self.tenant}: no room within {timeout_s:g} s")
                    self.waits += first
                    first = False
                    self._wait(self._changed, min(pause_s, left_s))
                self._running += 1
                self._tokens -= size
                self.admitted_bytes += size
            finally:
                self._queue.remove(place)
                self._changed.notify_all()

    def _pause_s(self, place: tuple[int, int]) -> float:
        """0: go. Else how long to wait, unless `_changed` is notified first."""
        if self._queue[0] != place or self._running >= self._parallel:
            return threading.TIMEOUT_MAX
        if not self._rate:
            return 0.0
        now = self._env.monotonic_s()
        self._tokens = min(float(self._rate), self._tokens + (now - self._filled_at_s) * self._rate)
        self._filled_at_s = now
        # A sliver of a token counts as one: rounding must not make a waiter wait for nothing.
        return 0.0 if self._tokens > -1e-6 else -self._tokens / self._rate


class ReadLimiters:
    """One limiter a tenant, made when first asked for."""

    def __init__(self, env: Env, *, bytes_per_s: int, parallel: int) -> None:
        self._env = env
        self._bytes_per_s = bytes_per_s
        self._parallel = parallel
        self._lock = threading.Lock()
        self._limiters: dict[str, RemoteReadLimiter] = {}

    def of(self, tenant: str) -> RemoteReadLimiter:
        with self._lock:
            if tenant not in self._limiters:
                self._limiters[tenant] = RemoteReadLimiter(
                    self._env, tenant, bytes_per_s=self._bytes_per_s, parallel=self._parallel
                )
            return self._limiters[tenant]
