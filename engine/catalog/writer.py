"""The one writer: every change of every stream goes through here, log first, then rows.

Callers submit a function and a stream; the thread of `engine/group.py` runs the functions of a group one after the
other inside one LMDB write transaction, appends what they changed to the streams' logs, commits the logs, commits the
transaction with the new log positions, syncs the logs if a caller asked, and answers.

Invariants
- A row change is in the log before it is in LMDB, and in LMDB before its caller is answered.
- A function that raises changes nothing. A group that cannot be logged (no room) changes nothing either: the
  transaction is aborted and the logs are rolled back.
- If LMDB cannot commit what is logged already, replay from the recorded positions brings the rows back: at once where
  the disk was full and the reserve has room, else the catalog takes no more until it is opened again.
- The rows of stream S change only by what stream S's log says.

Owner: the group thread. A crash leaves logs that are ahead of the rows by at most one group.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

import lmdb

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import EVENT_SCHEMA_ID, Batch, Mutation
from aof2.engine.catalog.fold import StreamFold, put_all
from aof2.engine.catalog.lmdb_errors import MAP_FULL, translated
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, FatalIOError, LimitError, ReadOnlyError, os_error
from aof2.engine.group import GroupThread
from aof2.engine.local.reserve import is_no_room
from aof2.engine.manifest.batch import RecordBatch
from aof2.engine.manifest.chunk import count_substantive
from aof2.engine.manifest.format import LogPosition
from aof2.engine.manifest.writer import ManifestLogWriter, SealedChunk
from aof2.engine.observe.transitions import log_transitions

log = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[Batch], T]

GROUP_BYTES_MAX: Final = 4 << 20
SNAPSHOT_EVERY_BYTES: Final = 16 << 20
BRAKE_EVERY_BYTES: Final = 64 << 10
CRASH_POINTS: Final = (
    "catalog.commit.appended",
    "catalog.commit.logged",
    "catalog.commit.applied",
    "catalog.commit.synced",
)


class WriterEvents(Protocol):
    """What the writer tells the engine. Called on the writer thread: hand it on, do not work there."""

    def sealed(self, stream_id: int, chunk: SealedChunk) -> None: ...

    def snapshot_due(self, stream_id: int) -> None: ...

    def changed(self, stream_id: int) -> None:
        """There is more in the stream's change feed."""


class CommitObserver(Protocol):
    """Sees each commit that says more than the log's bookkeeping, after it is in the log and before its rows can be
    seen. Called on the writer thread."""

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
        """`foretold`: row changes of batches that say so of themselves; `needed`: there are others. `awaited`: a caller
        waits for the log up to there. Whether it is to be sealed as soon as the commit is done."""

    def sealed(self, stream_id: int, chunk: SealedChunk) -> None:
        """The chunk, and the log before it, are sealed, and about to be uploaded."""


class Unfolded(Protocol):
    """What callers were answered before the rows have it: it goes into the rows before any other change of its stream.
    Called on the writer thread."""

    def steps(self) -> Iterator[Callable[[Batch], object]]:
        """A batch each; each changes what those before it left, also where a commit in between failed."""


class _Submission(NamedTuple):
    stream_id: int
    work: Callable[[Batch], object]


@dataclass(eq=False)
class StagedRows:
    """What a group changes in the rows of a stream, for its observer."""

    others: list[Mutation] = field(default_factory=list)
    foretold: list[Mutation] = field(default_factory=list)
    needed: bool = False  # a batch that is neither foretold nor the log's bookkeeping is among them
    awaited: bool = False

    def take(self, batch: Batch, mutations: list[Mutation]) -> None:
        rows = self.foretold if batch.foretold else self.others
        rows += mutations
        self.needed |= not batch.foretold and bool(mutations or count_substantive(batch.records))
        self.awaited |= batch.awaited


@dataclass(eq=False)
class StreamState:
    """A stream as the writer holds it: its log, its fold, what the group has staged for it."""

    stream_id: int
    log: ManifestLogWriter
    fold: StreamFold
    staged: RecordBatch = field(default_factory=RecordBatch)
    rows: StagedRows = field(default_factory=lambda: StagedRows())
    subscribed: bool | None = None
    logged_bytes: int = 0  # since the last snapshot was asked for
    observe: Callable[[int, int, bytes], object] | None = None  # (type, segment, payload) of what is committed


class CatalogTarget:
    """Logs and LMDB as the group thread sees them."""

    def __init__(
        self, env: Env, catalog: Catalog, streams: Mapping[int, StreamState], events: WriterEvents | None
    ) -> None:
        self.env = env
        self.catalog = catalog
        self.streams = dict(streams)
        self.events = events
        self.enabled = True
        self.read_only_streams: dict[int, str] = {}  # whose log is damaged, and how
        self.observer: CommitObserver | None = None
        self.unfolded: dict[int, Unfolded] = {}  # replaced whole: other threads set it
        self._seal_below: dict[int, int] = {}  # by stream: records before this one are to be sealed now
        # The same, as the observer wants it, before callers are answered and after; the writer thread's own.
        self._seal_now: dict[int, int] = {}
        self._seal_next: dict[int, int] = {}
        # Seconds to wait every BRAKE_EVERY_BYTES, for the log not to grow faster than what is done with it. Bounded by
        # the giver. By bytes, not by groups: a caller that does one small thing after the other makes a group of each.
        self.brake_s: Callable[[], float] = lambda: 0.0
        self._unbraked_bytes = 0
        # Brings a stream's rows up to the end of its log, as recovery does.
        self.replay: Callable[[int], object] | None = None
        self._txn: Any = None
        self._poison: Exception | None = None
        self._failed = ""
        self._touched: dict[int, StreamState] = {}
        self._after: list[Callable[[], None]] = []
        self._aborts = 0

    def add_stream(self, stream: StreamState) -> None:
        """A new tenant's. The dictionary is replaced: the writer thread may be walking the old one."""
        self.streams = {**self.streams, stream.stream_id: stream}

    def turn_read_only(self, reason: str) -> None:
        """Every submission from now on is refused, with the reason."""
        if not self._failed:
            self._failed = reason
            log.error("volume is read-only", extra={"reason": reason})

    @property
    def read_only_reason(self) -> str:
        return self._failed

    def before(self, item: _Submission) -> Iterator[None]:
        unfolded, aborts = self.unfolded.get(item.stream_id), self._aborts
        for work in unfolded.steps() if unfolded is not None else ():
            self._take(item.stream_id, work)
            if self.full():
                yield
            if self._aborts != aborts:
                raise os_error(errno.ENOSPC)  # only a full disk refuses one commit and takes the next

    def append(self, item: _Submission) -> Callable[[], object]:
        value = self._take(item.stream_id, item.work)
        return lambda: value

    def _take(self, stream_id: int, work: Callable[[Batch], object]) -> object:
        """Runs one change in the group's transaction, and stages what it changed."""
        self._refuse()
        stream = self.streams.get(stream_id)
        if stream is None and stream_id in self.read_only_streams:
            raise ReadOnlyError(f"the tenant is read-only: {self.read_only_streams[stream_id]}")
        if stream is None:
            raise LimitError(f"there is no stream {stream_id}")
        if self._txn is None:
            if self.catalog.nearly_full():
                raise LimitError(MAP_FULL)
            self.catalog.take_room_ahead()
            self._txn = self.catalog.begin_write()
        view = self.catalog.view_of(self._txn)
        ordinal = stream.log.position.ordinal + len(stream.staged)
        batch = Batch(view, stream_id, self.env.now_ms(), self.env.now_ns(), ordinal)
        value = work(batch)
        subscribed = self._subscribed(stream, batch.view)
        self._stage(stream, batch, batch.finish(subscribed=subscribed))
        self._after += batch.after_commit
        if subscribed and batch.ops and self.events is not None:
            self._after.append(partial(self.events.changed, stream.stream_id))
        return value

    @staticmethod
    def _subscribed(stream: StreamState, view: View) -> bool:
        """Whether the stream's change feed has a subscriber; looked up again when a cursor came or went."""
        if stream.subscribed is None:
            stream.subscribed = next(view.scan(stream.stream_id, t.CURSORS), None) is not None
        return stream.subscribed

    def _stage(self, stream: StreamState, batch: Batch, mutations: list[Mutation]) -> None:
        if not mutations and not batch.records:
            return
        self._touched[stream.stream_id] = stream
        try:
            apply_mutations(self._txn, self.catalog, stream.stream_id, mutations)
            self._fold(stream, batch.records)
        except lmdb.Error as e:
            # The transaction may hold half of it: the whole group fails.
            ours = translated(e, self.catalog.directory)
            self._poison = FatalIOError(str(ours)) if isinstance(ours, CorruptError) else ours
            raise self._poison from e
        stream.staged.extend(batch.records)
        stream.rows.take(batch, mutations)
        if mutations:
            batch_id = stream.log.position.ordinal + len(stream.staged)
            stream.staged.add_event(batch_id, EVENT_SCHEMA_ID, t.encode(mutations))
        if any(number == t.CURSORS.number for number, _, _ in mutations):
            stream.subscribed = None

    def _fold(self, stream: StreamState, records: RecordBatch) -> None:
        if not records:
            return
        stream.fold.view = self.catalog.view_of(self._txn)
        stream.fold.apply_all(records)
        stream.fold.flush(self._txn, self.catalog.db("segments"))

    def full(self) -> bool:
        return sum(s.staged.encoded_len for s in self._touched.values()) >= GROUP_BYTES_MAX

    def commit(self, *, sync: bool) -> None:
        if self._poison is not None:
            poison = self._poison
            self._abort()
            raise poison
        self._refuse()
        if self._txn is not None:
            self._log_and_apply()
        if sync:
            self.sync()
            self.env.failpoint("catalog.commit.synced")
        if self._seal_now:
            # Before the submitters are answered: what they do next takes the interpreter. The commit stands, also where
            # that fails.
            with contextlib.suppress(FatalIOError, ReadOnlyError):
                self._seal_asked_for()
        after, self._after = self._after, []
        for call in after:
            call()

    def _log_and_apply(self) -> None:
        touched = list(self._touched.values())
        began = [stream.log.position for stream in touched]
        try:
            for stream in touched:
                stream.log.append_batch(stream.staged)
                stream.logged_bytes += stream.staged.encoded_len
                self._unbraked_bytes += stream.staged.encoded_len
        except BaseException:
            for stream in touched:
                stream.log.rollback()
            self._abort()
            raise
        self.env.failpoint("catalog.commit.appended")
        for stream in touched:
            before = stream.log.substantive
            position = stream.log.commit(sync=False)
            if stream.observe is not None:
                for kind, segment_id, _, _, payload in stream.staged.rows():
                    stream.observe(kind, segment_id, payload)
            if self.observer is not None and stream.log.substantive != before:
                self._observed(self.observer, stream, position.ordinal)
        self.env.failpoint("catalog.commit.logged")
        try:
            put_positions(self._txn, self.catalog, {s.stream_id: s.log.position for s in touched})
            self._txn.commit()
        except lmdb.Error as e:
            if not self._caught_up(touched, e):
                self._failed = f"the catalog could not take what is already in its log ({e})"
                log.critical("catalog failed", extra={"error": self._failed})
                self._reset()
                raise FatalIOError(self._failed) from e
        self.env.failpoint("catalog.commit.applied")
        for stream, at in zip(touched, began, strict=True):
            log_transitions(stream.stream_id, stream.staged, at)
        self._reset()

    def _observed(self, observer: CommitObserver, stream: StreamState, ordinal: int) -> None:
        rows = stream.rows
        if not observer.committed(
            stream.stream_id,
            ordinal,
            stream.staged.encoded_len,
            rows.others,
            foretold=rows.foretold,
            needed=rows.needed,
            awaited=rows.awaited,
        ):
            return
        if rows.awaited:
            self._seal_next[stream.stream_id] = ordinal  # its submitter has another upload to begin meanwhile
        else:
            self._seal_now[stream.stream_id] = ordinal

    def _caught_up(self, touched: Iterable[StreamState], error: lmdb.Error) -> bool:
        """The disk had no room for rows whose records are in the log: with room from the reserve they come from there,
        as after a restart. Whether that went well."""
        if self.replay is None or not is_no_room(translated(error, self.catalog.directory)):
            return False
        while self.env.reserve is not None and self.env.reserve.give():
            try:
                for stream in touched:
                    self.replay(stream.stream_id)
                with self.catalog.view() as view:
                    for stream in touched:
                        stream.fold.reload(view)
            except OSError:
                continue
            except Aof2Error as e:
                log.warning("rows cannot be taken from the log", extra={"error": str(e)})
                return False
            log.info("rows were taken from the log: the disk was full", extra={"error": str(error)})
            return True
        return False

    def _abort(self) -> None:
        self._aborts += 1
        self._after = []
        if self._txn is not None:
            self._txn.abort()
        touched = list(self._touched.values())
        self._reset()
        with self.catalog.view() as view:
            for stream in touched:
                stream.fold.reload(view)

    def _reset(self) -> None:
        for stream in self._touched.values():
            stream.staged = RecordBatch()
            stream.rows = StagedRows()
        self._txn, self._poison, self._touched = None, None, {}

    def _refuse(self) -> None:
        if self._failed:
            raise ReadOnlyError(f"the volume is read-only: {self._failed}")
        if self._poison is not None:
            raise self._poison
        if not self.enabled:
            raise ReadOnlyError("the manifest log is turned off ([manifest] enabled = false): the volume is read-only")

    def sync(self) -> None:
        for stream in self.streams.values():
            stream.log.sync()

    def seal_below(self, stream_id: int, ordinal: int) -> None:
        """The next housekeeping seals the stream's active chunk if it holds records before that one. Any thread."""
        self._seal_below = {**self._seal_below, stream_id: ordinal}

    def due_s(self) -> float | None:
        if any(self._seal_asked(stream) for stream in self.streams.values()):
            return 0.0
        return min((w for s in self.streams.values() if (w := s.log.rotation_wait_s()) is not None), default=None)

    def _seal_asked(self, stream: StreamState) -> bool:
        asked = (seals.get(stream.stream_id, 0) for seals in (self._seal_below, self._seal_now, self._seal_next))
        return stream.log.holds_below(max(asked))

    def _seal_asked_for(self) -> None:
        for stream in self.streams.values():
            if stream.log.needs_rotation() or self._seal_asked(stream):
                stream.log.rotate(partial(self._tell_sealed, stream.stream_id))
                if stream.stream_id in self._seal_next:
                    stream.log.make_ready()  # a caller waits for another commit, in a moment
        self._seal_now.clear()
        self._seal_next.clear()

    def housekeep(self) -> None:
        self._seal_asked_for()
        for stream in self.streams.values():
            stream.log.sync_name()
            if stream.logged_bytes >= SNAPSHOT_EVERY_BYTES:
                stream.logged_bytes = 0
                if self.events is not None:
                    self.events.snapshot_due(stream.stream_id)
        if self._unbraked_bytes >= BRAKE_EVERY_BYTES:
            self._unbraked_bytes = 0
            pause_s = self.brake_s()
            if pause_s > 0:
                time.sleep(pause_s)

    def _tell_sealed(self, stream_id: int, chunk: SealedChunk) -> None:
        if self.observer is not None:
            self.observer.sealed(stream_id, chunk)
        if self.events is not None:
            self.events.sealed(stream_id, chunk)

    def close(self) -> None:
        if self._txn is not None:
            self._abort()
        for stream in self.streams.values():
            stream.log.close()


class CatalogWriter:
    """The way in: `submit` from any thread."""

    def __init__(self, target: CatalogTarget, *, commit_period_ms: int = 100) -> None:
        self.target = target
        self._thread: GroupThread[_Submission] = GroupThread(
            target.env, target, name="aof2-catalog", commit_period_ms=commit_period_ms
        )

    def start(self) -> CatalogWriter:
        self._thread.start()
        return self

    def submit(self, stream_id: int, work: Work[T], *, sync: bool = False) -> Future[T]:
        """Runs `work` on the writer thread; the future gives what it returned, once committed."""
        return cast("Future[T]", self._thread.submit(_Submission(stream_id, work), sync=sync))

    def call(self, stream_id: int, work: Work[T], *, sync: bool = False) -> T:
        """`submit`, waited for. Not on the trio thread."""
        return self.submit(stream_id, work, sync=sync).result()

    def flush(self) -> None:
        """Everything submitted before is durable when this returns."""
        self.flushed().result()

    def flushed(self) -> Future[object]:
        """Done when everything submitted before is durable."""
        return self._thread.flush()

    def take_first(self, stream_id: int, unfolded: Unfolded | None) -> None:
        """From here on a change of the stream comes after what this has to fold. Any thread."""
        others = {stream: one for stream, one in self.target.unfolded.items() if stream != stream_id}
        self.target.unfolded = others if unfolded is None else {**others, stream_id: unfolded}

    def seal(self, stream_id: int, ordinal: int) -> None:
        """What was submitted before and lies before that record is sealed soon: `sealed` tells. Any thread."""
        self.target.seal_below(stream_id, ordinal)
        self._thread.nudge()

    @property
    def groups(self) -> int:
        return self._thread.groups

    def close(self) -> None:
        self._thread.close()


def apply_mutations(txn: Any, catalog: Catalog, stream_id: int, mutations: Iterable[Mutation]) -> None:
    """Row changes into the transaction, of which none are about the same row; the same at run time and at replay."""
    prefix = t.STREAM.pack(stream_id)
    puts: dict[int, list[tuple[bytes, bytes]]] = {}
    for number, key, value in mutations:
        if value is None:
            txn.delete(prefix + key, db=catalog.db(t.DATABASES[number]))
        else:
            puts.setdefault(number, []).append((prefix + key, value))
    for number, rows in puts.items():
        put_all(txn, catalog.db(t.DATABASES[number]), rows)


def put_positions(txn: Any, catalog: Catalog, positions: Mapping[int, LogPosition]) -> None:
    for stream_id, position in positions.items():
        txn.put(t.POSITION_PREFIX + t.STREAM.pack(stream_id), t.encode(tuple(position)), db=catalog.db("meta"))
