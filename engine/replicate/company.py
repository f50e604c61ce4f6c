"""Callers that wait for one stream's log at the same time, and when its next upload is worth sharing.

A caller is busy until what it waits for is published; then it is ready, and needs the log up to its end. An upload is
for those who are ready when the log is sealed for it: it begins when at least as many are ready as are busy. So a
hundred who wait for a file each need some seven uploads, however slowly one becomes ready after the other, and one who
waits beside another is not held up.

Invariants
- Only callers that are ready soon count as busy: those that wait for little, and for a moment all who just came.
- A caller that is ready asks again after a while without company (`fs/control/durable.py`): it is not held up for long.

Owner: `position.py`, under its lock. A crash leaves nothing: the callers are told that the daemon went away.
"""

from __future__ import annotations

from typing import Final

JUST_CAME_S: Final = 1.0


class Caller:
    """One that waits. `since_s`: when it came."""

    def __init__(self, since_s: float) -> None:
        self._ends: dict[int, int] = {}  # by stream, where it is ready
        self._busy_until_s = since_s + JUST_CAME_S

    def is_busy(self, stream_id: int, now_s: float) -> bool:
        """Whether it is worth waiting for."""
        return stream_id not in self._ends and now_s < self._busy_until_s

    def end(self, stream_id: int) -> int:
        """Up to where it needs the log to be there, 0 while it is busy."""
        return self._ends.get(stream_id, 0)

    def begins(self, stream_id: int, *, soon: bool) -> None:
        """What it waits for there is being published; `soon`: it is a matter of milliseconds."""
        self._ends.pop(stream_id, None)
        self._busy_until_s = float("inf") if soon else float("-inf")

    def becomes_ready(self, stream_id: int, end: int) -> None:
        self._ends[stream_id] = end


class Company:
    """The callers of one stream."""

    def __init__(self, stream_id: int) -> None:
        self._stream_id = stream_id
        self._callers: list[Caller] = []

    def __contains__(self, caller: Caller) -> bool:
        return caller in self._callers

    def joins(self, caller: Caller) -> None:
        self._callers.append(caller)

    def leaves(self, caller: Caller) -> None:
        self._callers.remove(caller)

    def is_lone(self, sealed: int, now_s: float) -> bool:
        """Whether one at most is busy, and no other waits for what is not `sealed`."""
        busy = sum(one.is_busy(self._stream_id, now_s) for one in self._callers)
        return busy <= 1 and all(one.end(self._stream_id) <= sealed for one in self._callers)

    def due(self, sealed: int, now_s: float) -> int:
        """Up to where the log is to be sealed now for those who are ready; 0 where they wait for others. What is
        `sealed` is on its way: who needs no more than that is out of this."""
        ends = [end for one in self._callers if (end := one.end(self._stream_id)) > sealed]
        busy = sum(one.is_busy(self._stream_id, now_s) for one in self._callers)
        return max(ends) if ends and len(ends) >= busy else 0
