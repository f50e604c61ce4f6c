"""Stretches of packs, as they came: who reads one small file of a pack often reads those that were made with it.

The first miss in a pack fetches its member alone. A second one fetches the window around it. Windows lie on a grid, so
that any order of reading finds its neighbours; where most of a pack's last window was read, the next one is twice as
long. Members are cut out of them, and checked like anything that comes from the remote: a window proves nothing. Most
of them become files at once (`landing.py`); then their use is told here (`used`), and that they left (`went`).

What was fetched and not read is counted when it goes, out of memory or off the disk. A window that went hardly read
halves those that come, down to single members; then one is fetched only now and then, to see whether that has changed.
One of which half was read lets them grow back.

Invariants
- `held_bytes` at most are kept, the least recently used go first; no window takes more than half of that. Packs do not
  change, so none is ever stale.
- LAID_MAX members on the disk are remembered at most; of the others no use is told.
- Those who want the same window wait for the one request.

Owner: any thread, under a lock that no request is made under. A crash leaves nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from aof2.engine.locks import thread_lock
from aof2.engine.remote.location import Location
from aof2.engine.remote.store import RemoteStore

WINDOW_BYTES: Final = 1 << 20
WINDOW_BYTES_MIN: Final = 64 << 10
WINDOW_BYTES_MAX: Final = 16 << 20
HELD_BYTES: Final = 64 << 20
PACKS_KEPT: Final = 1024
LAID_MAX: Final = 1 << 16
USELESS_SHARE: Final = 8  # of which less than an eighth was read when it went
TRY_EVERY: Final = 64  # misses, where single members are fetched


class Window(NamedTuple):
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
        self.size = len(data)
        self.offsets: set[int] = set()
        self.read_bytes = 0
        self.laid_bytes = 0  # of members that are files, and were not used yet

    def read(self, at: Location) -> bool:
        """Whether half of it is read with this."""
        if at.offset in self.offsets:
            return False
        half = self.size // 2
        before, self.read_bytes = self.read_bytes, self.read_bytes + at.length
        self.offsets.add(at.offset)
        return before < half <= self.read_bytes

    @property
    def is_useless(self) -> bool:
        return self.read_bytes < self.size // USELESS_SHARE


class _Laid(NamedTuple):
    """A member that is a file now."""

    held: _Held
    at: Location


Came = Callable[[Window, bytes], None]


class Windows:
    """Of one volume. `neighbours_bytes` came with what was asked for, `unread_bytes` of them went without being read;
    `window_bytes` is what a second miss in a pack fetches, 0: its member."""

    def __init__(self, *, held_bytes: int = HELD_BYTES) -> None:
        self._held_max = held_bytes
        self._held: OrderedDict[Window, _Held] = OrderedDict()
        self._held_bytes = 0
        # Packs that were read from: the newest window of each, once there was one.
        self._last: OrderedDict[str, tuple[Window, _Held] | None] = OrderedDict()
        self._laid: OrderedDict[int, _Laid] = OrderedDict()  # by inode, those not used yet
        self._coming: dict[Window, threading.Event] = {}
        self._misses = 0
        self._lock = thread_lock()
        self._first_max = min(WINDOW_BYTES, _power_of_two(held_bytes // 2))
        self._next_max = min(WINDOW_BYTES_MAX, _power_of_two(held_bytes // 2))
        self.window_bytes = self._first_max
        self.neighbours_bytes = 0
        self.unread_bytes = 0

    def read(self, remote: RemoteStore, at: Location, pack_bytes: int, came: Came | None = None) -> bytes | memoryview:
        """The member there. It is not checked. `came` is told of a window that had to be fetched for it."""
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
                return self._fetch(remote, window, at, came)
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

    # -- members that are files ----------------------------------------------------------------------------------

    def laid(self, window: Window, members: Mapping[int, Location]) -> None:
        """These are files now, by inode."""
        with self._lock:
            held = self._held.get(window)
            last = self._last.get(window.key)
            if held is None and last is not None and last[0] == window:
                held = last[1]
            if held is None:
                return  # it went already, and was counted as it was
            for ino, at in members.items():
                self._forget_laid(ino)
                self._laid[ino] = _Laid(held, at)
                held.laid_bytes += at.length
            while len(self._laid) > LAID_MAX:
                self._forget_laid(next(iter(self._laid)))

    def _forget_laid(self, ino: int) -> _Laid | None:
        one = self._laid.pop(ino, None)
        if one is not None:
            one.held.laid_bytes -= one.at.length
        return one

    def used(self, ino: int) -> None:
        """It is opened: what came along for it was worth it."""
        if ino not in self._laid:
            return
        with self._lock:
            one = self._forget_laid(ino)
            if one is not None and one.held.read(one.at):
                self._grow()

    def went(self, ino: int) -> None:
        """It left the disk."""
        if ino not in self._laid:
            return
        with self._lock:
            one = self._forget_laid(ino)
            if one is not None and one.at.offset not in one.held.offsets:
                self.unread_bytes += one.at.length
                if not one.held.laid_bytes and one.held.is_useless:
                    self._shrink()

    def _fetch(self, remote: RemoteStore, window: Window, at: Location, came: Came | None) -> bytes | memoryview:
        try:
            data = remote.get_range(window.key, window.start, window.size)
            with self._lock:
                if window.size > at.length:
                    self._keep(window, data, at)
        finally:
            with self._lock:
                self._coming.pop(window).set()
        if came is not None and window.size > at.length:
            came(window, data)
        return memoryview(data)[at.offset - window.start : at.end - window.start]

    # -- under the lock ------------------------------------------------------------------------------------------

    def _find(self, at: Location) -> memoryview | None:
        for window in reversed(self._held):
            if window.key == at.key and window.covers(at):
                self._held.move_to_end(window)
                held = self._held[window]
                if held.read(at):
                    self._grow()
                return memoryview(held.data)[at.offset - window.start : at.end - window.start]
        return None

    def _coming_for(self, at: Location) -> threading.Event | None:
        return next((over for w, over in self._coming.items() if w.key == at.key and w.covers(at)), None)

    def _next(self, at: Location, pack_bytes: int) -> Window:
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
            return Window(at.key, at.offset, at.end)
        if last is not None and last[1].read_bytes >= last[0].size // 2:
            size = max(size, min(self._next_max, 2 << (last[0].size - 1).bit_length()))
        start = at.offset // size * size
        return Window(at.key, start, max(at.end, min(start + size, pack_bytes)))

    def _keep(self, window: Window, data: bytes, at: Location) -> None:
        held = _Held(data)
        held.read(at)
        self.neighbours_bytes += len(data) - at.length
        for inner in [w for w in self._held if w.key == window.key and window.start <= w.start and w.end <= window.end]:
            read = self._held.pop(inner)
            self._held_bytes -= len(read.data)
            held.offsets |= read.offsets
            held.read_bytes += read.read_bytes
        self._held[window] = held
        if window.key in self._last:
            self._last[window.key] = (window, held)
        self._held_bytes += len(data)
        while self._held_bytes > self._held_max:
            oldest = self._drop(next(iter(self._held)))
            if oldest.is_useless and not oldest.laid_bytes:
                self._shrink()

    def _grow(self) -> None:
        self.window_bytes = min(self._first_max, max(WINDOW_BYTES_MIN, 2 * self.window_bytes))

    def _shrink(self) -> None:
        smaller = self.window_bytes // 2
        self.window_bytes = smaller if smaller >= WINDOW_BYTES_MIN else 0

    def _drop(self, window: Window) -> _Held:
        held = self._held.pop(window)
        self._held_bytes -= len(held.data)
        held.data = b""
        self.unread_bytes += max(0, held.size - held.read_bytes - held.laid_bytes)
        return held


def _power_of_two(size: int) -> int:
    """The largest that is not larger."""
    return 1 << (size.bit_length() - 1) if size > 0 else 0
