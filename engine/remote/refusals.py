"""What the remote refuses us (401, 403, a folder that is not ours): since when, which operation, how often.

Kept by area, that is reads and writes of each first folder of the remote's keys: a log whose prefix is denied stays
refused while blobs go through. An area is cleared by the next request of it that is let in.

Owner: any thread, under the lock of the `Resilience` it belongs to. A crash leaves nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec

_READS: Final = ("get", "head", "list", "range", "read", "bucket", "connect")


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An area that is refused."""

    since_ms: int
    why: str
    times: int


class Refusals:
    """The areas that are refused now, and how many requests ever were. `prefix`: of every name in the bucket."""

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
