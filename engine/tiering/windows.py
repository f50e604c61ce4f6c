"""Stretches of packs, as they came: who reads one small file of a pack often reads those that were made with it.

The first miss in a pack fetches its member alone. A second one fetches the window around it. Windows lie on a grid, so
that any order of reading finds its neighbours; where most of a pack's last window was read, the next one is twice as
long. Members are cut out of them, and checked like anything that comes from the remote: a window proves nothing.

What was fetched and not read is counted when it goes. Where most windows went so, single members are fetched, and a
window only now and then, to see whether that has changed.

Invariants
- HELD_BYTES at most are kept, the least recently used go first; packs do not change, so none is ever stale.
- Those who want the same window wait for the one request.

Owner: any thread, under a lock that no request is made under. A crash leaves nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final, NamedTuple

from aof2.engine.locks import thread_lock
from aof2.engine.remote.location import Location
from aof2.engine.remote.store import RemoteStore

WINDOW_BYTES: Final = 1 << 20
WINDOW_BYTES_MAX: Final = 16 << 20
HELD_BYTES: Final = 64 << 20
PACKS_KEPT: Final = 1024
TRUST_MAX: Final = 8  # so many useless windows more than useful ones, and there are none for a while
USEFUL_READS: Final = 4
TRY_EVERY: Final = 64  # misses


class _Window(NamedTuple):
    key: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def covers(self, at: Location) -> bool:
        return self.start <= at.offset and at.end <= self.end


class _Held:
    """A window that came."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads = 0
        self.read_bytes = 0


class Windows:
    """Of one volume. `fetched_bytes` of windows, and `unread_bytes` of those that went."""

    def __init__(self, *, held_bytes: int = HELD_BYTES) -> None:
        self._held_max = held_bytes
        self._held: OrderedDict[_Window, _Held] = OrderedDict()
        self._held_bytes = 0
        self._last: OrderedDict[str, _Window | None] = OrderedDict()  # packs that were read from: the newest window
        self._coming: dict[_Window, threading.Event] = {}
        self._trust = TRUST_MAX
        self._misses = 0
        self._lock = thread_lock()
        self.fetched_bytes = 0
        self.unread_bytes = 0

    def read(self, remote: RemoteStore, at: Location, pack_bytes: int) -> bytes | memoryview:
        """The member there. It is not checked."""
        while True:
            with self._lock:
                found = self._find(at)
                if found is not None:
                    return found
                waits = self._coming_for(at)
                if waits is None:
                    window = self._next(at, pack_bytes)
                    self._coming[window] = threading.Event()
            if waits is None:
                return self._fetch(remote, window, at)
            waits.wait()

    def holds(self, at: Location) -> bool:
        """Whether `read` of it would ask nothing of the remote."""
        with self._lock:
            return any(window.key == at.key and window.covers(at) for window in self._held)

    def forget(self, key: str) -> None:
        """What came of this pack was not right, or the pack is gone."""
        with self._lock:
            self._last.pop(key, None)
            for window in [w for w in self._held if w.key == key]:
                self._drop(window)

    def _fetch(self, remote: RemoteStore, window: _Window, at: Location) -> bytes | memoryview:
        try:
            data = remote.get_range(window.key, window.start, window.size)
            with self._lock:
                if window.size > at.length:
                    self._keep(window, data, at)
        finally:
            with self._lock:
                self._coming.pop(window).set()
        return memoryview(data)[at.offset - window.start : at.end - window.start]

    # -- under the lock ------------------------------------------------------------------------------------------

    def _find(self, at: Location) -> memoryview | None:
        for window in reversed(self._held):
            if window.key == at.key and window.covers(at):
                self._held.move_to_end(window)
                held = self._held[window]
                held.reads += 1
                held.read_bytes += at.length
                if held.reads == USEFUL_READS:
                    self._trust = min(TRUST_MAX, self._trust + 1)
                return memoryview(held.data)[at.offset - window.start : at.end - window.start]
        return None

    def _coming_for(self, at: Location) -> threading.Event | None:
        return next((over for w, over in self._coming.items() if w.key == at.key and w.covers(at)), None)

    def _next(self, at: Location, pack_bytes: int) -> _Window:
        """What is fetched for a miss there."""
        known = at.key in self._last
        last = self._last.setdefault(at.key, None)
        self._last.move_to_end(at.key)
        while len(self._last) > PACKS_KEPT:
            self._last.popitem(last=False)
        self._misses += 1
        useful = self._trust > 0 or not self._misses % TRY_EVERY
        if not known or not useful or pack_bytes < at.end:
            return _Window(at.key, at.offset, at.end)
        size = WINDOW_BYTES
        held = self._held.get(last) if last is not None else None
        if last is not None and held is not None and held.read_bytes >= last.size // 2:
            size = min(WINDOW_BYTES_MAX, 2 << (last.size - 1).bit_length())
        start = at.offset // size * size
        window = _Window(at.key, start, max(at.end, min(start + size, pack_bytes)))
        self._last[at.key] = window
        return window

    def _keep(self, window: _Window, data: bytes, at: Location) -> None:
        for inner in [w for w in self._held if w.key == window.key and window.start <= w.start and w.end <= window.end]:
            self._held_bytes -= len(self._held.pop(inner).data)
        held = self._held[window] = _Held(data)
        held.reads, held.read_bytes = 1, at.length
        self._held_bytes += len(data)
        self.fetched_bytes += len(data)
        while self._held_bytes > self._held_max:
            self._drop(next(iter(self._held)))

    def _drop(self, window: _Window) -> None:
        held = self._held.pop(window)
        self._held_bytes -= len(held.data)
        self.unread_bytes += max(0, len(held.data) - held.read_bytes)
        if held.reads < USEFUL_READS:
            self._trust = max(0, self._trust - 1)
