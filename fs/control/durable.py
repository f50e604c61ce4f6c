"""Making data durable for a caller who waits: seal what is closed, upload it, then the log up to the commits that name
it, and say how far it is. Durable means that the remote alone, copied then, restores it.

A remote that is away, or refuses us, is noticed and said: when no byte moved for `remote.timeout`, and it was asked
once more after that, in vain. While a caller waits, jobs and the log do not wait out their backoffs: the remote is
asked as soon as its breaker lets a call through. What was not uploaded stays queued, and goes on by itself.

Owner: the trio thread. A crash leaves what the jobs leave: they go on at the next start.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

import msgspec
import trio

from aof2.engine.aio import open_nursery
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.rows import JobRow, JobState, JobType, ObjectState
from aof2.engine.jobs import checkpoint as plans
from aof2.engine.local.handles import Key
from aof2.engine.remote.resilience import COOL_DOWN_S_MAX, BreakerState
from aof2.engine.replicate.company import Caller
from aof2.engine.replicate.position import Standing
from aof2.engine.volume import Volume
from aof2.fs.control.closing import all_closed
from aof2.fs.control.mounted import Mounted
from aof2.fs.control.protocol import ControlError, Progress

LOOK_EVERY_S: Final = 0.25
LOOK_AT_MOST_S: Final = 0.05  # between two looks at many files, however often something changes
LOOK_PER_FILE_S: Final = 0.00005
LOOK_AT_FILES: Final = 1000
LOOK_AT_WAITING: Final = 64  # of those, before it is left at that: they are published in about this order
ASK_EVERY_S: Final = 1.0
# So little is uploaded within the moment for which the fence may be asked ahead.
SOON_BYTES: Final = 1 << 20
SOON_FILES: Final = 8
# Uploads that began with the seal are sent by threads, which wait for the interpreter while this one looks around.
HEAD_START_S: Final = 0.05
Tell = Callable[[Progress], Awaitable[None]]


class Uploaded(msgspec.Struct, frozen=True):
    """What was made durable while the command waited."""

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


async def upload(
    volume: Volume,
    tenant_ids: Collection[int],
    tell: Tell,
    *,
    inos: Collection[int] | None = None,
    log: bool = True,
    hint: str = "",
    caller: Caller | None = None,
) -> Uploaded:
    """What is sealed, of these files or all, is in the remote; with `log`, so is every commit so far, those that were
    foretold included: when the daemon dies now, the next `umount` finds nothing left. `hint` ends the line
    if the remote is away. `caller`: who shares uploads of the log with others that wait."""
    wanted = {k: n for k, n in pending(volume, tenant_ids).items() if inos is None or k[1] in inos}
    total = sum(wanted.values())
    if wanted:
        with contextlib.ExitStack() as stack:
            soon = total <= SOON_BYTES and len(wanted) <= SOON_FILES
            for tenant_id in {key[0] for key in wanted}:
                keys = [key[1:] for key in wanted if key[0] == tenant_id]
                stack.enter_context(volume.replication.awaiting(tenant_id, keys, soon=soon, caller=caller))
            if not (soon and volume.jobs.is_under_way(wanted) and await _uploaded_soon(volume, wanted)):
                await plan(volume, tenant_ids)
                await _until_uploaded(volume, wanted, tell, hint)
    if log:
        await replicated(volume, volume.log_ends(tenant_ids), tell, hint=hint, caller=caller)
    return Uploaded(len(wanted), total)


def later(tell: Tell) -> Tell:
    """`tell`, of what takes longer than a moment: before that, a line costs more than it says."""
    from_s = trio.current_time() + LOOK_EVERY_S

    async def tell_later(progress: Progress) -> None:
        if trio.current_time() >= from_s:
            await tell(progress)

    return tell_later


async def _uploaded_soon(volume: Volume, wanted: Mapping[Key, int]) -> bool:
    """Whether these are in the remote, gone, or written to again within a moment. No more is looked at meanwhile."""
    left = deque(wanted.items())
    with trio.move_on_after(HEAD_START_S):
        while True:
            change = volume.jobs.runner.changes.next()
            _drop_done(volume, left)
            if not left:
                return True
            await change.wait()
    return False


async def _until_uploaded(volume: Volume, wanted: dict[Key, int], tell: Tell, hint: str) -> None:
    """Until these objects are in the remote, gone, or written to again."""
    total, done = sum(wanted.values()), 0
    left = deque(wanted.items())
    watch = _Watch(volume, {key[0] for key in wanted})
    while True:
        change = volume.jobs.runner.changes.next()
        done += _drop_done(volume, left)
        if not left:
            await tell(Progress("upload", total, total))
            return
        rows = _uploads(volume)
        _raise_failed(rows, left)
        await watch.ask(rows)
        await tell(Progress("upload", min(total, done + watch.sent_since(done, len(left))), total))
        watch.check(hint)
        await trio.sleep(min(LOOK_AT_MOST_S, len(left) * LOOK_PER_FILE_S))
        with trio.move_on_after(LOOK_EVERY_S):
            await change.wait()


async def sealed(mounted: Mounted, tell: Tell) -> None:
    """Until what is closed now is sealed, and its upload has begun."""
    total = mounted.kinds.unsealed().files

    async def say() -> None:
        while True:
            await trio.sleep(LOOK_EVERY_S)
            await tell(Progress("seal", max(0, total - mounted.kinds.unsealed().files), total, "files"))

    await all_closed(mounted)
    async with open_nursery() as nursery:
        nursery.start_soon(say)
        await mounted.kinds.seal(begin=True)
        nursery.cancel_scope.cancel()


async def replicated(
    volume: Volume, ends: Mapping[int, int], tell: Tell, *, hint: str = "", caller: Caller | None = None
) -> None:
    """Until the remote has these logs up to there. RemoteAwayError when they stand; ControlError when they end."""
    replication = volume.replication
    watch = _LogWatch(volume, ends, hint)
    shares_until_s = trio.current_time() + LOOK_EVERY_S
    while True:
        change = replication.next()
        if replication.has(ends):
            return
        watch.look()
        replication.want(ends, caller if trio.current_time() < shares_until_s else None)
        with trio.move_on_after(LOOK_EVERY_S) as waiting:
            await change.wait()
        if waiting.cancelled_caught:
            await tell(Progress("log", *watch.records(), "records"))


class _LogWatch:
    """Whether the log moves towards the remote."""

    def __init__(self, volume: Volume, ends: Mapping[int, int], hint: str) -> None:
        self._volume = volume
        self._ends = ends
        self._hint = hint
        self._patience_s = volume.settings.remote.timeout_s
        self._there = self._positions()
        self._moved_s = trio.current_time()
        self._asked_s = float("-inf")
        self._late_s: float | None = None  # since when patience is over
        self._late_answers = 0

    def _positions(self) -> list[int]:
        return [self._volume.replication.there(stream_id) for stream_id in self._ends]

    def records(self) -> tuple[int, int]:
        """How many the remote has of those that it is to have."""
        has = sum(min(there, end) for there, end in zip(self._there, self._ends.values(), strict=True))
        return has, sum(self._ends.values())

    def look(self) -> None:
        now_s, there = trio.current_time(), self._positions()
        standing = self._volume.replication.standing(self._ends)
        if self._volume.replicator.ended:
            why = standing.why if standing is not None else self._volume.target.read_only_reason
            end = "not durable: the log's end is not in the remote, and stays here"
            raise ControlError(f"{end}: {why or 'the volume is closing'}")
        if there != self._there:
            self._there, self._moved_s, self._late_s = there, now_s, None
        if standing is not None and now_s - self._asked_s >= ASK_EVERY_S:
            self._asked_s = now_s
            self._volume.replicator.hurry()
        if now_s - self._moved_s < self._patience_s:
            return
        if self._late_s is None:
            self._late_s, self._late_answers, self._asked_s = now_s, self._answers(), float("-inf")
        late_s = now_s - self._late_s
        if self._answers() != self._late_answers or late_s >= self._patience_s + COOL_DOWN_S_MAX:
            raise RemoteAwayError(_stands(self._volume, standing, self._patience_s) + self._hint)

    def _answers(self) -> int:
        """How often the remote was asked in vain."""
        stats = self._volume.remote.stats()
        return stats.unavailable + stats.refused


def _stands(volume: Volume, standing: Standing | None, patience_s: float) -> str:
    url = volume.settings.remote.url
    if standing is None:
        return f"not durable yet: nothing of the log reached {url} for {patience_s:g} s; it goes on by itself"
    verb = "refuses" if standing.refused else "does not take"
    return f"not durable yet: {url} {verb} the log ({standing.why}); it is asked again by itself"


def _drop_done(volume: Volume, left: deque[tuple[Key, int]]) -> int:
    """Looks at some, the others next time: all other tasks wait meanwhile. The bytes of those that are over."""
    bytes_done = waiting = 0
    with volume.catalog.view() as view:
        for _ in range(min(len(left), LOOK_AT_FILES)):
            key, size = left.popleft()
            row = view.get(key[0], t.OBJECTS, (key[1], key[2]))
            if row is None or row.state != ObjectState.SEALED:
                bytes_done += size
                continue
            left.append((key, size))
            waiting += 1
            if waiting == LOOK_AT_WAITING:
                break
    return bytes_done


def _uploads(volume: Volume) -> list[JobRow]:
    rows = [row for tenant_id in volume.tenant_names() for row in volume.jobs.runner.live(tenant_id)]
    return [row for row in rows if row.type == JobType.CREATE_CHECKPOINT]


def _raise_failed(rows: Collection[JobRow], left: Collection[tuple[Key, int]]) -> None:
    for row in rows:
        if row.state == JobState.FAILED:
            planned = set(plans.plan_of(row).objects)
            if any((key[1], key[2]) in planned for key, _ in left if key[0] == row.tenant_id):
                raise ControlError(f"the upload failed: {row.reason}; what is not uploaded stays here")


class _Watch:
    """Whether anything moves towards the remote."""

    def __init__(self, volume: Volume, tenant_ids: Collection[int]) -> None:
        self._volume = volume
        self._tenant_ids = tenant_ids
        self._patience_s = volume.settings.remote.timeout_s
        self._sent = self._at_done = volume.remote.stats().bytes_sent
        self._done = 0
        self._left = 0
        self._moved_s = trio.current_time()
        self._was_open = False
        self._asked_s = float("-inf")
        self._backing_off = False
        self._late_s: float | None = None  # since when patience is over
        self._late_unavailable = 0

    def sent_since(self, done: int, left: int) -> int:
        """Bytes sent for what is not done yet: a guess, for a bar that moves within a large file."""
        sent = self._volume.remote.stats().bytes_sent
        if left != self._left:  # files without a byte count, too
            self._left = left
            self._moved()
        if done != self._done:
            self._done, self._at_done = done, sent
            self._moved()
        if sent != self._sent:
            grown, self._sent = sent - self._sent, sent
            # Few bytes may be the log's, which says of each attempt that failed that it did.
            log_bytes = self._volume.settings.manifest.chunk_capacity_bytes
            ends = self._volume.log_ends(self._tenant_ids)
            if not self._backing_off and (grown > log_bytes or self._volume.replication.has(ends)):
                self._moved()
        return sent - self._at_done

    def _moved(self) -> None:
        self._moved_s, self._late_s = trio.current_time(), None

    async def ask(self, rows: Collection[JobRow]) -> None:
        """Jobs that wait out a backoff try now, if the breaker lets them."""
        stats, now_s = self._volume.remote.stats(), trio.current_time()
        is_open = stats.breaker is not BreakerState.CLOSED
        if self._was_open and not is_open:
            self._moved()  # a request got through
        self._was_open = is_open
        self._backing_off = any(row.state == JobState.QUEUED and row.not_before_ms for row in rows)
        may_ask = not is_open or (stats.breaker is BreakerState.OPEN and not stats.probe_in_s)
        if self._backing_off and may_ask and now_s - self._asked_s >= ASK_EVERY_S:
            await plan(self._volume, self._tenant_ids)
            self._asked_s, self._backing_off = now_s, False

    def check(self, hint: str) -> None:
        now_s = trio.current_time()
        if now_s - self._moved_s < self._patience_s:
            return
        if self._late_s is None:
            self._late_s, self._late_unavailable = now_s, self._volume.remote.stats().unavailable
        if not self._in_vain(now_s, self._late_s):
            return
        url, refusal = self._volume.settings.remote.url, self._volume.remote.stats().refusal
        if refusal is not None:
            why = f"the remote {url} refuses us ({refusal.why})"
            raise RemoteAwayError(f"{why}; it is asked again by itself{hint}")
        away = f"the remote {url} does not answer"
        raise RemoteAwayError(f"{away}: nothing moved for {self._patience_s:g} s; uploads go on when it is back{hint}")

    def _in_vain(self, now_s: float, late_s: float) -> bool:
        """Whether the remote was asked since patience is over. A job may ask late: it is waited for, not for ever."""
        if self._was_open:
            asked = self._volume.remote.stats().unavailable != self._late_unavailable
            return asked or now_s - late_s >= self._patience_s + COOL_DOWN_S_MAX
        return (self._backing_off and self._asked_s >= late_s) or now_s - late_s >= self._patience_s
