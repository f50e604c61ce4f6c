"""Stretches of packs, as they came: who reads one small file of a pack often reads those that were made with it.

The first miss in a pack fetches its member alone. A second one fetches the window around it. Windows lie on a grid, so
that any order of reading finds its neighbours; where most of a pack's last window was read, the next one is twice as
long. Members are cut out of them, and checked like anything that comes from the remote: a window proves nothing.

What was fetched and not read is counted when it goes. A window that went hardly read halves those that come, down to
single members; then one is fetched only now and then, to see whether that has changed. One of which half was read lets
them grow back.

Invariants
- `held_bytes` at most are kept, the least recently used go first; no window takes more than half of that. Packs do not
  change, so none is ever stale.
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
WINDOW_BYTES_MIN: Final = 64 << 10
WINDOW_BYTES_MAX: Final = 16 << 20
HELD_BYTES: Final = 64 << 20
PACKS_KEPT: Final = 1024
USELESS_SHARE: Final = 8  # of which less than an eighth was read when it went
TRY_EVERY: Final = 64  # misses, where single members are fetched


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
    """A window that came, and where the members are that were read of it."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offsets: set[int] = set()
        self.read_bytes = 0

    def read(self, at: Location) -> bool:
        """Whether half of it is read with this."""
        if at.offset in self.offsets:
            return False
        half = len(self.data) // 2
        before, self.read_bytes = self.read_bytes, self.read_bytes + at.length
        self.offsets.add(at.offset)
        return before < half <= self.read_bytes


class Windows:
    """Of one volume. `neighbours_bytes` came with what was asked for, `unread_bytes` of them went without being read;
    `window_bytes` is what a second miss in a pack fetches, 0: its member."""

    def __init__(self, *, held_bytes: int = HELD_BYTES) -> None:
        self._held_max = held_bytes
        self._held: OrderedDict[_Window, _Held] = OrderedDict()
        self._held_bytes = 0
        self._last: OrderedDict[str, _Window | None] = OrderedDict()  # packs that were read from: the newest window
        self._coming: dict[_Window, threading.Event] = {}
        self._misses = 0
        self._lock = thread_lock()
        self._first_max = min(WINDOW_BYTES, _power_of_two(held_bytes // 2))
        self._next_max = min(WINDOW_BYTES_MAX, _power_of_two(held_bytes // 2))
        self.window_bytes = self._first_max
        self.neighbours_bytes = 0
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
                self._drop(window)  # which says nothing about how packs are read

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
                if held.read(at):
                    self.window_bytes = min(self._first_max, max(WINDOW_BYTES_MIN, 2 * self.window_bytes))
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
        size = self.window_bytes
        if not size and not self._misses % TRY_EVERY:
            size = WINDOW_BYTES_MIN
        if not known or not size or pack_bytes < at.end:
            return _Window(at.key, at.offset, at.end)
        held = self._held.get(last) if last is not None else None
        if last is not None and held is not None and held.read_bytes >= last.size // 2:
            size = max(size, min(self._next_max, 2 << (last.size - 1).bit_length()))
        start = at.offset // size * size
        window = _Window(at.key, start, max(at.end, min(start + size, pack_bytes)))
        self._last[at.key] = window
        return window

    def _keep(self, window: _Window, data: bytes, at: Location) -> None:
        held = _Held(data)
        held.read(at)
        self.neighbours_bytes += len(data) - at.length
        for inner in [w for w in self._held if w.key == window.key and window.start <= w.start and w.end <= window.end]:
            read = self._held.pop(inner)
            self._held_bytes -= len(read.data)
            held.offsets |= read.offsets
            held.read_bytes += read.read_bytes
        self._held[window] = held
        self._held_bytes += len(data)
        while self._held_bytes > self._held_max:
            oldest = self._drop(next(iter(self._held)))
            if oldest.read_bytes < len(oldest.data) // USELESS_SHARE:
                self._shrink()

    def _shrink(self) -> None:
        smaller = self.window_bytes // 2
        self.window_bytes = smaller if smaller >= WINDOW_BYTES_MIN else 0

    def _drop(self, window: _Window) -> _Held:
        held = self._held.pop(window)
        self._held_bytes -= len(held.data)
        self.unread_bytes += max(0, len(held.data) - held.read_bytes)
        return held


def _power_of_two(size: int) -> int:
    """The largest that is not larger."""
    return 1 << (size.bit_length() - 1) if size > 0 else 0
