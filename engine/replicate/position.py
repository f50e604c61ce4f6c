"""How far the remote has each stream's log: the position here, the position there, and what lies between.

Positions are record ordinals, which have no holes. `here` is the end of the last commit that says more than the log's
own upload bookkeeping; `there` is the end of the last chunk that the remote took, all before it being there too. What
is committed is durable in the remote when `there` has passed it: the remote alone, copied then, restores it.

For single files the commits between the two are kept by what they touch: the inodes (rows, attributes, names), the
names given out (of ancestors, too), the objects published. The catalog thread notes a commit before its rows can be
seen and before it is answered; an upload takes away what it covers.

A publication may be foretold: the commit of the object's seal said under which key its blob is put. With that commit
there, and the blob, the remote restores the object without the commit that publishes it (`lost.py` looks at the key),
so a caller does not wait for that one: `needed` is the end of the last commit that says anything else. Only a caller
that waits alone has that: a seal's own upload of the log is not shared by those whose seals come a moment later.

Invariants
- `there` never passes what the remote does not have, and no file is called durable before its commits are there. Past
  TOUCHED_MAX inodes the stream forgets which they are: until `there` has passed that place, every file counts as one.
- A waiter asks for a seal and an upload; while one is under way the next waiters gather for the one after it. Where
  it awaits a publication (`awaiting`), the commit of that asks for it, or, where it is foretold, that of the seal.
- What is foretold is noted when it is committed: its blob is there by then. Local bytes go once the commit itself is.

Owner: any thread, under one lock that is held for a few look-ups; waiting is the trio thread's. A crash leaves nothing:
`tail.py` reads it from the log again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import msgspec
import trio

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Mutation
from aof2.engine.catalog.rows import INO_STREAM_SHIFT, DentryRow, InodeRow, ObjectState
from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.locks import thread_lock
from aof2.engine.manifest.writer import SealedChunk
from aof2.engine.replicate.company import Caller, Company

TOUCHED_MAX: Final = 500_000
MARKS_MAX: Final = 4096
DEPTH_MAX: Final = 4096  # of a path, before its parents count as a circle

_NAMESPACE: Final = t.DB_NUMBER["namespace"]
_OWN_TAGS: Final = frozenset(table.tag[0] for table in (t.INODES, t.XATTRS, t.LINKS))
_DENTRY_TAG: Final = t.DENTRIES.tag[0]
_OBJECT_TAG: Final = t.OBJECTS.tag[0]
_PUBLISHED: Final = int(ObjectState.PUBLISHED)
_dentry: Callable[[bytes], DentryRow] = t.DENTRIES.decode

ObjectKey = tuple[int, int]  # inode, generation


class _ObjectHead(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first fields of an ObjectRow: nothing else of it matters here."""

    ino: int
    generation: int
    state: int


_object_head: Final = msgspec.msgpack.Decoder(_ObjectHead).decode


class Touches(NamedTuple):
    """What some row changes are about."""

    inos: set[int]
    """Those of `published` only where they are touched otherwise, too."""
    named: set[int]
    """Inodes that got a name."""
    published: set[ObjectKey]

    def all_inos(self) -> set[int]:
        return self.inos | {ino for ino, _ in self.published}


def touches_of(mutations: Iterable[Mutation]) -> Touches:
    found = Touches(set(), set(), set())
    for number, key, value in mutations:
        if number != _NAMESPACE:
            continue
        tag = key[0]
        if tag in _OWN_TAGS:
            found.inos.add(int.from_bytes(key[1:9], "big"))
        elif tag == _DENTRY_TAG:
            if value is not None:
                found.named.add(_dentry(value).ino)
        elif tag == _OBJECT_TAG:
            if value is not None and (row := _object_head(value)).state == _PUBLISHED:
                found.published.add((row.ino, row.generation))
            else:
                found.inos.add(int.from_bytes(key[1:9], "big"))
    return found


class Standing(NamedTuple):
    """Why a stream's upload does not go on."""

    since_ms: int
    why: str
    refused: bool


class Mark(NamedTuple):
    """A commit: where it ended, when, and how many bytes the log had then."""

    ordinal: int
    at_ms: int
    bytes: int


class StreamReplication(msgspec.Struct, frozen=True, kw_only=True):
    """One stream's log here and there, for `status`. `lag_s`: the age of the oldest commit that is not there."""

    stream_id: int
    tenant: str = ""
    here: int
    there: int
    lag_records: int
    lag_bytes: int
    lag_s: float
    stands_since_ms: int | None = None
    stands_because: str = ""
    refused: bool = False


class _Recent(OrderedDict[t.K, int]):
    """Things and the place of the last commit about them, oldest place first."""

    def note(self, things: Iterable[t.K], ordinal: int) -> None:
        for thing in things:
            self[thing] = ordinal
            self.move_to_end(thing)

    def forget(self, until: int) -> None:
        while self and next(iter(self.values())) <= until:
            self.popitem(last=False)


class _Awaited:
    """Objects whose publication a caller waits for."""

    def __init__(self, keys: Iterable[ObjectKey], caller: Caller | None) -> None:
        self.left = set(keys)
        self.caller = caller
        self.log_due = False  # a publication that was not foretold is among those that are done

    def done(self, key: ObjectKey, *, foretold: bool) -> bool:
        """Whether the log is due: with the last of them, where there is a commit to wait for."""
        self.left.discard(key)
        self.log_due |= not foretold
        return self.log_due and not self.left


class StreamPosition:
    """One stream. Under the lock of its `Replication`."""

    def __init__(self) -> None:
        self.here = self.there = self.wanted = 0
        self.company: Company | None = None
        self.needed = 0  # the end of the last commit that is not foretold
        self.sealed = 0  # up to here the log is sealed: past `there`, an upload is under way
        self.sealing = 0  # up to here a commit had it sealed, which is told when it is done
        self.bytes_here = self.bytes_there = 0
        self.touched: _Recent[int] = _Recent()
        self.named: _Recent[int] = _Recent()
        self.published: _Recent[ObjectKey] = _Recent()
        self.any_until = self.published_until = 0  # up to there the dictionaries are not complete
        self.marks: deque[Mark] = deque()
        self.standing: Standing | None = None

    def note(self, ordinal: int, now_ms: int, size_bytes: int, touches: Touches, *, needed: bool = True) -> None:
        self.here = max(self.here, ordinal)
        self.needed = max(self.needed, ordinal) if needed else self.needed
        self.bytes_here += size_bytes
        self.touched.note(touches.inos, ordinal)
        self.named.note(touches.named, ordinal)
        self.published.note(touches.published, ordinal)
        self._stay_small(ordinal)
        self.marks.append(Mark(ordinal, now_ms, self.bytes_here))
        if len(self.marks) > MARKS_MAX:
            newest = self.marks[-1]
            self.marks = deque(list(self.marks)[:-1:2])  # the times of the others are a little off
            self.marks.append(newest)

    def _stay_small(self, ordinal: int) -> None:
        if len(self.touched) + len(self.named) > TOUCHED_MAX:
            self.touched.clear()
            self.named.clear()
            self.any_until = ordinal
        if len(self.published) > TOUCHED_MAX:
            self.published.clear()
            self.published_until = ordinal

    def advance(self, ordinal: int) -> None:
        if ordinal <= self.there:
            return
        self.there = ordinal
        while self.marks and self.marks[0].ordinal <= ordinal:
            self.bytes_there = self.marks.popleft().bytes
        self.touched.forget(ordinal)
        self.named.forget(ordinal)
        self.published.forget(ordinal)


class Replication:
    """The positions of every stream of a volume."""

    def __init__(
        self,
        env: Env,
        were_published: Callable[[int, Collection[ObjectKey]], Iterable[ObjectKey]] = lambda _stream_id, _keys: (),
    ) -> None:
        """`were_published`: which of these objects the catalog had as published before the commit under way. That one
        does not publish them again: it notes, say, what came back of one, and need not be there for it to leave once
        more."""
        self._env = env
        self._were_published = were_published
        self._lock = thread_lock()
        self._streams: dict[int, StreamPosition] = {}
        self._token: trio.lowlevel.TrioToken | None = None
        self._changed: trio.Event | None = None
        self._awaited: dict[tuple[int, ObjectKey], list[_Awaited]] = {}
        self.on_wanted: Callable[[int], None] = lambda _: None
        self.on_expected: Callable[[int], None] = lambda _: None
        self.on_sealed: Callable[[int, SealedChunk], None] = lambda _stream_id, _chunk: None  # on the writer thread

    # -- told by the log's writer and its uploads, on any thread -------------------------------------------------

    def opened(self, stream_id: int, position: StreamPosition) -> None:
        """What `tail.read_tail` found, before the first commit of this process."""
        with self._lock:
            self._streams[stream_id] = position

    def committed(
        self,
        stream_id: int,
        ordinal: int,
        size_bytes: int,
        mutations: Iterable[Mutation],
        *,
        foretold: Iterable[Mutation] = (),
        needed: bool = True,
        awaited: bool = False,
    ) -> bool:
        """A commit that says more than bookkeeping ends there. Before its rows can be seen. True where a caller awaits
        it, or nothing more than what it publishes, and no upload is under way that others gather behind: the log up to
        there is wanted now."""
        others, told = touches_of(mutations), touches_of(foretold)
        published = others.published | told.published
        inos = others.all_inos() | told.inos
        if published:
            published.difference_update(self._were_published(stream_id, list(published)))
        touches = Touches(inos, others.named | told.named, published)
        now_ms = self._env.now_ms()
        with self._lock:
            position = self._of(stream_id)
            position.note(ordinal, now_ms, size_bytes, touches, needed=needed)
            is_due = awaited or self._is_due_with(stream_id, ordinal, published, told.published)
            if is_due:
                position.wanted = max(position.wanted, ordinal)
            if not is_due or position.sealed > position.there:
                return False
            position.sealing = position.wanted
            return True

    def _is_due_with(
        self, stream_id: int, ordinal: int, published: Iterable[ObjectKey], foretold: Collection[ObjectKey]
    ) -> bool:
        """Whether callers that await nothing more than these are enough for an upload of the log. Under the lock."""
        found = shared = False
        for key in published if self._awaited else ():
            for one in self._awaited.pop((stream_id, key), ()):
                if not one.done(key, foretold=key in foretold):
                    continue
                if one.caller is not None:
                    one.caller.becomes_ready(stream_id, ordinal)
                    shared = True
                else:
                    found = True
        return found or (shared and self._due_end(stream_id) > 0)

    def _due_end(self, stream_id: int) -> int:
        """Up to where callers want the log now, and none has asked for before. Under the lock."""
        position = self._of(stream_id)
        asked = max(position.sealed, position.wanted)
        return position.company.due(asked, self._env.monotonic_s()) if position.company is not None else 0

    def sealed(self, stream_id: int, chunk: SealedChunk) -> None:
        """The log up to the end of the chunk is sealed, and goes up next."""
        with self._lock:
            self._of(stream_id).sealed = chunk.header.base_record + chunk.record_count
        self.on_sealed(stream_id, chunk)

    def uploaded(self, stream_id: int, ordinal: int) -> None:
        """The remote has the log up to there."""
        with self._lock:
            position = self._of(stream_id)
            position.advance(ordinal)
            position.standing = None
        self.tell()

    def stands(self, stream_id: int, why: str, *, refused: bool) -> None:
        """An upload failed: it is asked again, and stands meanwhile."""
        with self._lock:
            position = self._of(stream_id)
            since_ms = position.standing.since_ms if position.standing is not None else self._env.now_ms()
            position.standing = Standing(since_ms, why, refused)
        self.tell()

    def all_stand(self, why: str, *, refused: bool) -> None:
        """No stream can go on: the volume is not claimed, or no longer ours."""
        for stream_id in list(self._streams):
            self.stands(stream_id, why, refused=refused)

    def goes_on(self) -> None:
        """Every stream was let through again."""
        with self._lock:
            for position in self._streams.values():
                position.standing = None

    # -- asked ---------------------------------------------------------------------------------------------------

    def end(self, stream_id: int) -> int:
        """Where everything that was committed so far ends."""
        with self._lock:
            return self._of(stream_id).here

    def ends(self, stream_ids: Iterable[int]) -> dict[int, int]:
        return {stream_id: self.end(stream_id) for stream_id in stream_ids}

    def needed_ends(self, stream_ids: Iterable[int]) -> dict[int, int]:
        """Up to where the remote must have each log for everything that was committed so far to be durable."""
        with self._lock:
            return {stream_id: self._of(stream_id).needed for stream_id in stream_ids}

    def there(self, stream_id: int) -> int:
        with self._lock:
            return self._of(stream_id).there

    def wanted(self, stream_id: int) -> int:
        """Up to where a waiter wants the log to be there; 0 when that is so."""
        with self._lock:
            position = self._of(stream_id)
            return position.wanted if position.wanted > position.there else 0

    def has(self, ends: Mapping[int, int]) -> bool:
        with self._lock:
            return all(self._of(stream_id).there >= end for stream_id, end in ends.items())

    def standing(self, stream_ids: Iterable[int]) -> Standing | None:
        """Why the first of these streams that stands does so."""
        with self._lock:
            found = [s for stream_id in stream_ids if (s := self._of(stream_id).standing) is not None]
        return min(found, default=None)

    def has_published(self, stream_id: int, ino: int, generation: int) -> bool:
        """Whether the commit that published this object is there: only then its bytes here may go."""
        with self._lock:
            position = self._of(stream_id)
            if position.published_until > position.there:
                return False
            return (ino, generation) not in position.published

    def has_all_of(self, view: View, inode: InodeRow) -> bool:
        """Whether every commit about the inode, its names and the names of its ancestors is there."""
        stream_id = inode.ino >> INO_STREAM_SHIFT
        ancestors = _ancestors(view, stream_id, inode)
        with self._lock:
            volume, position = self._of(0), self._of(stream_id)
            if volume.there < volume.here or position.any_until > position.there:
                return False
            if inode.ino in position.touched or inode.ino in position.named:
                return False
            return not any(ino in position.named for ino in ancestors)

    def lags(self, names: Mapping[int, str]) -> list[StreamReplication]:
        """Every stream for `status`."""
        now_ms = self._env.now_ms()
        with self._lock:
            return [
                as_status(stream_id, names.get(stream_id, ""), position, now_ms)
                for stream_id, position in sorted(self._streams.items())
            ]

    # -- waiting, on the trio thread -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def waited_for(self, stream_ids: Collection[int]) -> Iterator[Caller]:
        """While a caller waits for what is written there to be durable: from before it is sealed on."""
        caller = Caller(self._env.monotonic_s())
        with self._lock:
            for stream_id in stream_ids:
                self._company_of(stream_id).joins(caller)
        try:
            yield caller
        finally:
            with self._lock:
                for stream_id in stream_ids:
                    self._company_of(stream_id).leaves(caller)
                ends = {stream_id: end for stream_id in stream_ids if (end := self._due_end(stream_id))}
            self.want(ends)  # those that are left may be enough without it

    def is_lone(self, stream_id: int) -> bool:
        """Whether a caller waits there, and no other would share an upload of the log with it."""
        with self._lock:
            position = self._of(stream_id)
            sealed = max(position.sealed, position.wanted)
            return position.company is not None and position.company.is_lone(sealed, self._env.monotonic_s())

    @contextlib.contextmanager
    def awaiting(
        self, stream_id: int, keys: Collection[ObjectKey], *, soon: bool, caller: Caller | None = None
    ) -> Iterator[None]:
        """While a caller waits for these objects to be published, and then for the log: with the last of them the log
        is sealed, in the same turn of its writer. `soon`: that is a matter of milliseconds. `caller`: who shares its
        uploads of the log."""
        group = _Awaited(keys, caller)
        with self._lock:
            if caller is not None and keys:
                caller.begins(stream_id, soon=soon)
            for key in keys:
                self._awaited.setdefault((stream_id, key), []).append(group)
            position = self._of(stream_id)
            # Else the log is on its way since the seal, or there: of what is foretold there is no more to come.
            is_coming = position.wanted <= position.there < position.needed
        if soon and group.left and is_coming:
            self.on_expected(stream_id)
        try:
            yield
        finally:
            with self._lock:
                for slot in [(stream_id, key) for key in group.left]:
                    others = [other for other in self._awaited.pop(slot, ()) if other is not group]
                    if others:
                        self._awaited[slot] = others
            if group.left:
                self.on_wanted(stream_id)  # what was put off for this caller is done now

    def expect(self, stream_id: int) -> None:
        """A caller is about to await something small: what can be asked of the remote ahead is asked now."""
        self.on_expected(stream_id)

    def is_awaited(self, stream_id: int) -> bool:
        """Whether a caller awaits what this stream is about to publish."""
        with self._lock:
            return any(stream == stream_id for stream, _ in self._awaited)

    def want(self, ends: Mapping[int, int], caller: Caller | None = None) -> None:
        """Asks for the log up to there to be sealed and uploaded: now, or, for a caller that shares its uploads, when
        enough others are ready."""
        for stream_id, end in ends.items():
            with self._lock:
                position = self._of(stream_id)
                if caller is not None and position.company is not None and caller in position.company:
                    caller.becomes_ready(stream_id, end)
                    end = self._due_end(stream_id)
                position.wanted = max(position.wanted, end)
                needed = position.there < end and position.sealing < end
            if needed:
                self.on_wanted(stream_id)

    def next(self) -> trio.Event:
        """Set when a position or its standing changes. Take it before looking (`has`, `want`), then wait for it."""
        self._token = trio.lowlevel.current_trio_token()
        if self._changed is None:
            self._changed = trio.Event()
        return self._changed

    def tell(self) -> None:
        """Waiters look again. Any thread."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._fire, idempotent=True)

    def _fire(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    def _company_of(self, stream_id: int) -> Company:
        """Under the lock."""
        position = self._of(stream_id)
        if position.company is None:
            position.company = Company(stream_id)
        return position.company

    def _of(self, stream_id: int) -> StreamPosition:
        """Under the lock."""
        position = self._streams.get(stream_id)
        if position is None:
            position = self._streams[stream_id] = StreamPosition()
        return position


def as_status(stream_id: int, tenant: str, position: StreamPosition, now_ms: int) -> StreamReplication:
    behind = position.there < position.here
    oldest_ms = position.marks[0].at_ms if behind and position.marks else now_ms
    standing = position.standing if behind else None
    return StreamReplication(
        stream_id=stream_id,
        tenant=tenant,
        here=position.here,
        there=position.there,
        lag_records=max(0, position.here - position.there),
        lag_bytes=max(0, position.bytes_here - position.bytes_there) if behind else 0,
        lag_s=max(0, now_ms - oldest_ms) / 1000 if behind else 0.0,
        stands_since_ms=standing.since_ms if standing is not None else None,
        stands_because=standing.why if standing is not None else "",
        refused=standing.refused if standing is not None else False,
    )


def _ancestors(view: View, stream_id: int, inode: InodeRow) -> set[int]:
    """The directories above every name of the inode."""
    parents = [inode.parent]
    if inode.nlink > 1:
        prefix = inode.ino.to_bytes(8, "big")
        parents += [parent for (_, parent, _), _ in view.scan(stream_id, t.LINKS, prefix=prefix)]
    found: set[int] = set()
    for ino in parents:
        for _ in range(DEPTH_MAX):
            if not ino or ino in found:
                break
            found.add(ino)
            row = view.get(stream_id, t.INODES, ino)
            ino = row.parent if row is not None else 0
    return found
