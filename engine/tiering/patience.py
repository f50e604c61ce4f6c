"""Who reads a file waits for a remote that is away or refuses us, while the outage is young: one shorter than
`remote.timeout` is no reader's error, and in a longer one none asks again later than that. (Jobs do not wait: they come
again.)

An outage is counted from the first request that failed, of any reader: once it is `patience_s` old, readers are told
as soon as the remote was asked again, or the breaker's cool-down is over. When nothing failed for as long, the next
failure begins another one; one that comes sooner counts as the same, since a read that went well may have been of what
is here.

Owner: the trio thread. A crash leaves nothing.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

import trio

from aof2.engine.remote.errors import RemoteAuthError, RemoteUnavailableError
from aof2.engine.remote.resilience import COOL_DOWN_S_MAX

T = TypeVar("T")

PAUSE_S_MIN: Final = 0.1
PAUSE_S_MAX: Final = 2.0
GRACE_S: Final = COOL_DOWN_S_MAX + 0.5


class Patience:
    """What all readers of a volume know of the outage."""

    def __init__(self, rng: random.Random, patience_s: float) -> None:
        self._rng = rng
        self._patience_s = patience_s
        self._began_s = self._failed_s = float("-inf")

    async def insist(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, tried again while the remote is away and that is not long ago."""
        asked_by_s = trio.current_time() + min(GRACE_S, self._patience_s)
        while True:
            started_s = trio.current_time()
            try:
                return await work()
            except (RemoteUnavailableError, RemoteAuthError) as e:
                again_in_s = getattr(e, "again_in_s", 0.0)
                left_s = self._note_failure(started_s)
                if again_in_s:  # it was not even asked: it may be back
                    left_s = max(left_s, asked_by_s - trio.current_time())
                if left_s <= 0:
                    raise
                pause_s = min(max(again_in_s, PAUSE_S_MIN), PAUSE_S_MAX, left_s)
            await trio.sleep(pause_s * self._rng.uniform(1.0, 1.2))

    def _note_failure(self, started_s: float) -> float:
        """How much longer the reader should wait whose request, begun at that time, failed."""
        now_s = trio.current_time()
        if started_s - self._failed_s > self._patience_s:
            self._began_s = started_s
        self._failed_s = now_s
        return self._began_s + self._patience_s - now_s
