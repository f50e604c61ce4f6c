"""Stretches of packs, as they came: who reads one small file of a pack often reads those that were made with it.

The first miss in a pack fetches its member alone. A second one fetches the window around it, and each further window of
that pack is twice as long, up to all of it. Windows lie on a grid, so that any order of reading finds its neighbours.
Members are cut out of them, and checked like anything that comes from the remote: a window proves nothing.

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
MISSES_KEPT: Final = 1024


class _Window(NamedTuple):
    key: str
    start: int
    end: int

    def covers(self, at: Location) -> bool:
        return self.start <= at.offset and at.end <= self.end


class Windows:
    """Of one volume."""

    def __init__(self, *, held_bytes: int = HELD_BYTES) -> None:
        self._held_max = held_bytes
        self._held: OrderedDict[_Window, bytes] = OrderedDict()
        self._held_bytes = 0
        self._next_bytes: OrderedDict[str, int] = OrderedDict()  # of packs that were read from: 0 is one member
        self._coming: dict[_Window, threading.Event] = {}
        self._lock = thread_lock()

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
            return self._find(at) is not None

    def forget(self, key: str) -> None:
        """What came of this pack was not right, or the pack is gone."""
        with self._lock:
            self._next_bytes.pop(key, None)
            for window in [w for w in self._held if w.key == key]:
                self._held_bytes -= len(self._held.pop(window))

    def _fetch(self, remote: RemoteStore, window: _Window, at: Location) -> bytes | memoryview:
        try:
            data = remote.get_range(window.key, window.start, window.end - window.start)
            with self._lock:
                if window.end - window.start > at.length:
                    self._keep(window, data)
        finally:
            with self._lock:
                self._coming.pop(window).set()
        return memoryview(data)[at.offset - window.start : at.end - window.start]

    # -- under the lock ------------------------------------------------------------------------------------------

    def _find(self, at: Location) -> memoryview | None:
        for window in reversed(self._held):
            if window.key == at.key and window.covers(at):
                self._held.move_to_end(window)
                return memoryview(self._held[window])[at.offset - window.start : at.end - window.start]
        return None

    def _coming_for(self, at: Location) -> threading.Event | None:
        return next((over for w, over in self._coming.items() if w.key == at.key and w.covers(at)), None)

    def _next(self, at: Location, pack_bytes: int) -> _Window:
        """What is fetched for a miss there."""
        size = self._next_bytes.get(at.key, 0)
        self._next_bytes[at.key] = min(WINDOW_BYTES_MAX, max(WINDOW_BYTES, 2 * size))
        self._next_bytes.move_to_end(at.key)
        while len(self._next_bytes) > MISSES_KEPT:
            self._next_bytes.popitem(last=False)
        if not size or pack_bytes < at.end:
            return _Window(at.key, at.offset, at.end)
        start = at.offset // size * size
        return _Window(at.key, start, max(at.end, min(start + size, pack_bytes)))

    def _keep(self, window: _Window, data: bytes) -> None:
        for inner in [w for w in self._held if w.key == window.key and window.start <= w.start and w.end <= window.end]:
            self._held_bytes -= len(self._held.pop(inner))
        self._held[window] = data
        self._held_bytes += len(data)
        while self._held_bytes > self._held_max:
            self._held_bytes -= len(self._held.popitem(last=False)[1])
