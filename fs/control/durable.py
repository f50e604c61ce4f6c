"""Making data durable for somebody who waits: seal what is closed, upload it, say how far it is.

A remote that is away is noticed and said: nobody waits longer than `remote.timeout` without a byte moving. What was not
uploaded stays queued, and goes on by itself.

Owner: the trio thread. A crash leaves what the jobs leave: they go on at the next start.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection
from typing import Final

import msgspec
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import JobState, JobType, ObjectState
from aof2.engine.jobs import checkpoint as plans
from aof2.engine.local.handles import Key
from aof2.engine.volume import Volume
from aof2.fs.control.protocol import ControlError, Progress

LOOK_EVERY_S: Final = 0.25
LOOK_AT_MOST_S: Final = 0.05  # between two looks, however often something changes
LOOK_AT_FILES: Final = 1000
Tell = Callable[[Progress], Awaitable[None]]


class Uploaded(msgspec.Struct, frozen=True):
    """What was made durable while somebody waited."""

    files: int
    bytes: int


class RemoteAwayError(ControlError):
    """Nothing moves towards the remote. It is queued; wait again later."""


def pending(volume: Volume, tenant_ids: Collection[int]) -> dict[Key, int]:
    """Sealed objects of these tenants that are not in the remote yet, and their bytes."""
    with volume.catalog.view() as view:
        return {
            (tenant_id, ino, generation): size
            for tenant_id in tenant_ids
            for (ino, generation), size in view.scan(tenant_id, t.UNPUBLISHED)
        }


async def plan(volume: Volume, tenant_ids: Collection[int]) -> None:
    """Sends everything sealed on its way, also what failed before or waits for its next attempt."""
    for tenant_id in tenant_ids:
        await volume.jobs.checkpoint(tenant_id, wait=False)


async def uploaded(volume: Volume, wanted: dict[Key, int], tell: Tell, *, hint: str = "") -> Uploaded:
    """Until these objects are in the remote, gone, or written to again. `hint` ends the line if the remote is away."""
    if not wanted:
        return Uploaded(0, 0)
    total, files = sum(wanted.values()), len(wanted)
    left = deque(wanted.items())
    done = 0
    watch = _Watch(volume)
    while True:
        change = volume.jobs.runner.changes.next()
        done += _drop_settled(volume, left)
        if not left:
            await tell(Progress("upload", total, total))
            return Uploaded(files, total)
        _raise_failed(volume, left)
        await tell(Progress("upload", min(total, done + watch.sent_since(done, len(left))), total))
        watch.check(hint)
        await trio.sleep(LOOK_AT_MOST_S)
        with trio.move_on_after(LOOK_EVERY_S):
            await change.wait()


def _drop_settled(volume: Volume, left: deque[tuple[Key, int]]) -> int:
    """Some are looked at, the others next time: everybody else waits meanwhile. The bytes of those that are over."""
    bytes_done = 0
    with volume.catalog.view() as view:
        for _ in range(min(len(left), LOOK_AT_FILES)):
            key, size = left.popleft()
            row = view.get(key[0], t.OBJECTS, (key[1], key[2]))
            if row is None or row.state != ObjectState.SEALED:
                bytes_done += size
            else:
                left.append((key, size))
    return bytes_done


def _raise_failed(volume: Volume, left: Collection[tuple[Key, int]]) -> None:
    for tenant_id in volume.tenant_names():
        for row in volume.jobs.runner.jobs(tenant_id):
            if row.type == JobType.CREATE_CHECKPOINT and row.state == JobState.FAILED:
                planned = set(plans.plan_of(row).objects)
                if any((key[1], key[2]) in planned for key, _ in left if key[0] == tenant_id):
                    raise ControlError(f"the upload failed: {row.reason}; what is not uploaded stays here")


class _Watch:
    """Whether anything moves towards the remote."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._patience_s = volume.settings.remote.timeout_s
        self._sent = self._at_done = volume.remote.stats().bytes_sent
        self._done = 0
        self._left = 0
        self._moved_s = trio.current_time()

    def sent_since(self, done: int, left: int) -> int:
        """Bytes sent for what is not done yet: a guess, for a bar that moves within a large file."""
        sent = self._volume.remote.stats().bytes_sent
        if left != self._left:  # files without a byte count, too
            self._left, self._moved_s = left, trio.current_time()
        if done != self._done:
            self._done, self._at_done = done, sent
            self._moved_s = trio.current_time()
        if sent != self._sent:
            self._sent = sent
            self._moved_s = trio.current_time()
        return sent - self._at_done

    def check(self, hint: str) -> None:
        if trio.current_time() - self._moved_s < self._patience_s:
            return
        away = f"the remote {self._volume.settings.remote.url} does not answer"
        raise RemoteAwayError(f"{away}: nothing moved for {self._patience_s:g} s; uploads go on when it is back{hint}")
