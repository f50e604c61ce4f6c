"""A mounted follower at work: it tails the writer's logs, tells what changed, and says that it is there.

    every follow_period   one GET of the next chunk of each tenant's log; again at once while there is one
    a name is not there   the same, once for all who asked before it began (`at_end`)
    now and then          the volume's own log; whether chunks went behind a new snapshot (a HEAD)
    every 30 s            the heartbeat (`heartbeat.py`)

A chunk that is not there is nothing new, but where the writer may have bundled or deleted it: behind a snapshot that is
not known here, or after a while in which the remote could not be asked. Then the stream is listed (`LogFolder.follow`).

Invariants
- One walk a stream at a time. Who asks for the log's end waits for a walk that began after it asked.
- Rows change on the catalog thread alone; what changed is told (`hear`) after that, on the trio thread.
- What cannot be asked is not made up: names and attributes stay as they were, `away_since_ms` says since when.

Owner: the trio thread; requests on worker threads. A crash leaves what `LogFolder` leaves, and a heartbeat that ends.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from aof2.engine.aio import open_nursery
from aof2.engine.catalog.fold import load_pending
from aof2.engine.errors import Aof2Error, TransientError
from aof2.engine.follow import heartbeat
from aof2.engine.follow.facts import FollowStatus, StreamStatus
from aof2.engine.follow.mark import FollowerMark
from aof2.engine.follow.ownlog import open_own
from aof2.engine.follow.ownrows import Changes, OwnRows
from aof2.engine.manifest.format import LogPosition, ManifestIntegrityError
from aof2.engine.opening import VOLUME_STREAM
from aof2.engine.replicate.claim import load_identity
from aof2.engine.replicate.follow import LogFolder
from aof2.engine.replicate.restore import last_ms

if TYPE_CHECKING:
    from aof2.engine.volume import Volume

log = logging.getLogger(__name__)

PACE: Final = 1.12  # with what is asked now and then it is at most a request a tenant and period
VOLUME_EVERY: Final = 30  # periods between two looks at the volume's own log
SNAPSHOT_EVERY: Final = 30  # periods between two looks whether there is a snapshot that is not known
ACTIVE_S: Final = 60.0  # so long after its last chunk a log may be bundled at any time
LIST_AFTER_S: Final = 10.0  # what could not be asked for so long may be bundled by now
TAKEN_MAX: Final = 1024  # chunks, until a newer snapshot takes the place of older ones here
ASK_MAX_S: Final = 5.0  # what a look-up waits for the log's end


class _Walk:
    """To the log's end, for all who asked before it began."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.failed: Exception | None = None


class _Tail:
    """One stream."""

    def __init__(self, stream_id: int, position: LogPosition | None, now_s: float) -> None:
        self.stream_id = stream_id
        self.position = position
        self.next: _Walk | None = None
        self.wake = trio.Event()
        self.taken = 0  # chunks, since it was listed
        self.followed = False  # there is a task for it
        self.lists = False  # what is not there by itself may be bundled: the next walk lists
        self.seen_ms = 0
        self.end_s = now_s  # when the end was last here
        self.chunk_s = now_s  # when the last chunk came
        self.problem = ""

    def ask(self) -> _Walk:
        """A walk that did not begin yet."""
        if self.next is None:
            self.next = _Walk()
        self.wake.set()
        return self.next


class Following:
    """Of one volume. `hear` is told what each replay changed."""

    def __init__(self, volume: Volume, folder: LogFolder, own: OwnRows, mark: FollowerMark, *, away: str) -> None:
        self.volume = volume
        self.mark = mark
        self.requests = 0  # of the tail, for tests and metrics
        self.lists = 0
        self._env = volume.env
        self._folder = folder
        self._own = own
        self._listeners: list[Callable[[Changes], None]] = []
        self._tails: dict[int, _Tail] = {}
        self._uses: dict[int, tuple[int, int]] = {}  # by handle: (stream, how old the state is that it was opened at)
        self._away = away
        self._away_since_ms = volume.env.now_ms() if away else 0
        self._beat_s: float | None = None if away else self._now_s()
        self._began_s = self._now_s()
        self._nursery: trio.Nursery  # while it runs
        folder.alone = self._alone

    def _now_s(self) -> float:
        return self._env.monotonic_s()

    def _alone(self, work: Callable[[], int | None]) -> int | None:
        return self.volume.writer.alone(work).result()

    # -- what others ask ---------------------------------------------------------------------------------------

    def hear(self, listener: Callable[[Changes], None]) -> None:
        """It is told, on the trio thread, after each replay."""
        self._listeners.append(listener)

    async def at_end(self, stream_id: int) -> bool:
        """Asks for the log's end; whether it could be asked. One walk for all who wait; none while the remote is away,
        since each caller would wait for a timeout."""
        tail = self._tails.get(stream_id)
        if tail is None or self._away:
            return False
        walk = tail.ask()
        with trio.move_on_after(ASK_MAX_S):
            await walk.over.wait()
            return walk.failed is None
        return False

    def look_around(self) -> None:
        """The next walk of each stream lists what there is."""
        for tail in self._tails.values():
            tail.lists = True

    @property
    def is_stale(self) -> bool:
        """The writer may think that this follower is gone: the log's end is to be read before anything is served from
        the remote."""
        since_s = self._beat_s if self._beat_s is not None else self._began_s
        return self._now_s() - since_s > heartbeat.LIVE_S

    def opened(self, fh: int, stream_id: int) -> None:
        """A file is open at the state that the rows have now."""
        tail = self._tails.get(stream_id)
        self._uses[fh] = (stream_id, tail.seen_ms if tail is not None else 0)

    def closed(self, fh: int) -> None:
        self._uses.pop(fh, None)

    def position(self, stream_id: int) -> LogPosition | None:
        tail = self._tails.get(stream_id)
        return tail.position if tail is not None else None

    @property
    def is_away(self) -> bool:
        """Whether the remote does not answer."""
        return bool(self._away)

    @property
    def lag_s(self) -> float:
        """Since the end of each log was last seen to be here, the oldest of them; asked for every period."""
        now_s = self._now_s()
        lags = (now_s - tail.end_s for tail in self._tails.values() if tail.stream_id != VOLUME_STREAM)
        return max(0.0, max(lags, default=0.0))

    def status(self) -> FollowStatus:
        now_s, names = self._now_s(), self.volume.tenant_names()
        return FollowStatus(
            id=self.mark.id,
            streams=[
                StreamStatus(
                    stream_id=tail.stream_id,
                    tenant=names.get(tail.stream_id, ""),
                    position=tail.position,
                    seen_ms=tail.seen_ms,
                    behind_s=round(max(0.0, now_s - tail.end_s), 1),
                    problem=tail.problem,
                )
                for tail in self._tails.values()
            ],
            lag_s=round(self.lag_s, 1),
            away_since_ms=self._away_since_ms,
            why_away=self._away,
            heartbeat_s_ago=None if self._beat_s is None else round(now_s - self._beat_s, 1),
            problems=[tail.problem for tail in self._tails.values() if tail.problem],
        )

    # -- the background ----------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_nursery() as nursery:
            self._nursery = nursery
            await trio.to_thread.run_sync(self._find_tails)
            self._follow_all()
            nursery.start_soon(self._beat_forever)
            task_status.started()

    def _follow_all(self) -> None:
        for tail in self._tails.values():
            if not tail.followed:
                tail.followed = True
                self._nursery.start_soon(self._follow, tail)

    def _find_tails(self) -> None:
        """Every stream that has rows, and those that were made since."""
        for stream_id in (VOLUME_STREAM, *self.volume.tenant_names()):
            if stream_id not in self._tails:
                tail = _Tail(stream_id, self._folder.position(stream_id), self._now_s())
                if tail.position is not None:
                    tail.seen_ms = last_ms(self.volume.manifest_dir / str(stream_id))
                self._tails[stream_id] = tail

    async def _follow(self, tail: _Tail) -> None:
        """One stream, for ever: each period, and when a caller asks."""
        period_s, turn = self._period_s(tail), 0
        while True:
            asked = False
            with trio.move_on_after(period_s):
                await tail.wake.wait()
                asked = True
            tail.wake, walk, tail.next = trio.Event(), tail.next or _Walk(), None
            turn += not asked
            walk.failed = await self._go(tail, asked=asked, looks=not asked and turn % SNAPSHOT_EVERY == 0)
            walk.over.set()

    def _period_s(self, tail: _Tail) -> float:
        period_s = self.volume.settings.follow.follow_period_s * PACE
        return period_s * VOLUME_EVERY if tail.stream_id == VOLUME_STREAM else period_s

    async def _go(self, tail: _Tail, *, asked: bool, looks: bool) -> Exception | None:
        """Takes chunks until there are none; what was in the way."""
        try:
            away_s = self._now_s() - tail.end_s
            lists = tail.lists or tail.taken > TAKEN_MAX or away_s > LIST_AFTER_S + 2 * self._period_s(tail)
            while not lists and await trio.to_thread.run_sync(self._take_next, tail):
                self._tell(tail)
            active = self._now_s() - tail.chunk_s < ACTIVE_S
            if not lists and (looks or (asked and active)):
                lists = await trio.to_thread.run_sync(self._has_new_snapshot, tail)
            if lists:
                await trio.to_thread.run_sync(self._list, tail)
                self._tell(tail)
        except ManifestIntegrityError as e:
            return await self._go_around(tail, e)
        except (Aof2Error, OSError) as e:
            return self._could_not(tail, e)
        self._could(tail)
        return None

    async def _go_around(self, tail: _Tail, error: Exception) -> Exception | None:
        """The next chunk is damaged, or of another log: what else is there says how to go on."""
        try:
            await trio.to_thread.run_sync(self._list, tail)
        except (Aof2Error, OSError) as e:
            return self._could_not(tail, e)
        self._tell(tail)
        self._could(tail)
        if tail.problem:
            log.warning("a log cannot be followed", extra={"stream_id": tail.stream_id, "error": str(error)})
        return error if tail.problem else None

    def _could(self, tail: _Tail) -> None:
        tail.lists = False
        tail.end_s = self._now_s()
        if self._away:
            log.info("the remote answers again", extra={"away_ms": self._env.now_ms() - self._away_since_ms})
            self._away, self._away_since_ms = "", 0

    def _could_not(self, tail: _Tail, error: Exception) -> Exception:
        if isinstance(error, TransientError):
            if not self._away:
                self._away, self._away_since_ms = str(error), self._env.now_ms()
                log.warning("the remote is away; what is here is served", extra={"error": str(error)})
        elif tail.problem != str(error):
            tail.problem = str(error)
            log.error("a log cannot be followed", extra={"stream_id": tail.stream_id, "error": str(error)})
        return error

    # -- on worker threads -------------------------------------------------------------------------------------

    def _take_next(self, tail: _Tail) -> bool:
        self.requests += 1
        chunk = self._folder.take_next(tail.stream_id)
        if chunk is None:
            return False
        tail.position = self._folder.position(tail.stream_id)
        tail.seen_ms = max((int(stamp) for stamp in chunk.rows.timestamp_ms), default=tail.seen_ms)
        tail.chunk_s = self._now_s()
        tail.taken += 1
        return True

    def _has_new_snapshot(self, tail: _Tail) -> bool:
        self.requests += 1
        with self.volume.catalog.view() as view:
            known = load_pending(view, tail.stream_id).snapshot
        return self._folder.has_snapshot_after(tail.stream_id, known[0] if known is not None else 0)

    def _list(self, tail: _Tail) -> None:
        self.lists += 1
        tail.taken = 0
        self._folder.check_volume()
        done = self._folder.catch_up_stream(tail.stream_id)
        tail.problem = "; ".join(done.missing)
        if done.position != tail.position:
            tail.chunk_s = self._now_s()
        tail.position = done.position
        tail.seen_ms = max(tail.seen_ms, last_ms(self.volume.manifest_dir / str(tail.stream_id)))

    def _tell(self, tail: _Tail) -> None:
        """On the trio thread: what the replays changed."""
        changes = self._own.take(tail.stream_id)
        if tail.stream_id == VOLUME_STREAM:
            self._new_tenants()
        if changes:
            for listener in self._listeners:
                listener(changes)

    def _new_tenants(self) -> None:
        """Their rows are followed from here on; they are shown after the next mount, which makes their kinds."""
        volume = self.volume
        before = set(volume.tenants.rows)
        volume.tenants.load()
        for stream_id in volume.tenants.rows.keys() - before:
            name = volume.tenants.rows[stream_id].name
            log.warning("the volume has a new tenant; mount again to see it", extra={"tenant": name})
            volume.target.add_stream(open_own(volume.env, volume.catalog, volume.state_dir, stream_id))
        self._find_tails()
        self._follow_all()

    # -- the heartbeat -----------------------------------------------------------------------------------------

    def beat(self) -> heartbeat.Heartbeat:
        """What is said now."""
        identity = load_identity(self.volume.state_dir)
        oldest: dict[int, int] = {}
        for stream_id, seen_ms in list(self._uses.values()):
            oldest[stream_id] = min(oldest.get(stream_id, seen_ms), seen_ms)
        return heartbeat.Heartbeat(
            format_version=heartbeat.FORMAT_VERSION,
            id=self.mark.id,
            host=self.mark.host,
            volume_uuid=identity.volume_uuid if identity is not None else "",
            at_ms=self._env.now_ms(),
            streams={
                tail.stream_id: heartbeat.StreamBeat(
                    position=(tail.position.chunk_index, tail.position.chunk_offset, tail.position.ordinal),
                    seen_ms=tail.seen_ms,
                    oldest_ms=min(tail.seen_ms, oldest.get(tail.stream_id, tail.seen_ms)),
                )
                for tail in self._tails.values()
                if tail.position is not None
            },
        )

    async def _beat_forever(self) -> None:
        while True:
            await self._beat_once()
            await trio.sleep(heartbeat.BEAT_EVERY_S)

    async def _beat_once(self) -> None:
        beat = self.beat()
        try:
            await trio.to_thread.run_sync(heartbeat.put_heartbeat, self.volume.bare_remote, beat)
        except (Aof2Error, OSError) as e:
            log.debug("no heartbeat", extra={"error": str(e)})
            return
        stale, self._beat_s = self.is_stale, self._now_s()
        if stale:
            self.look_around()

    async def leave(self) -> None:
        """A clean end: no heartbeat stays."""
        with contextlib.suppress(Aof2Error, OSError):
            await trio.to_thread.run_sync(heartbeat.delete_heartbeat, self.volume.bare_remote, self.mark.id)
