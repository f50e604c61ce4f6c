"""LogReplicator: keeps the remote's copy of every stream's log, and the audit logs, up to date.

    claim → for each stream: reconcile → resume → chunks in order → audit, snapshot, retention, bundles → wait

One task a stream, so that a slow one delays no other; each runs `StreamUploads.step` on a worker thread until there is
nothing left. Events carry no work, only "look again": the folder and the rows say what there is to do, so the queue is
as long as the disk has chunks and memory holds a bounded part of it.

Invariants
- Nothing is put before the claim succeeded. A remote that is away, or refuses us, is asked again, for ever: after a
  failure the fence is asked first, so an outage leaves no byte in the log. A refusal is said once, at ERROR, and so is
  its end; `Replication` says meanwhile since when and why the log stands.
- Who waits for the log (`Replication.want`) does not wait for its timer: between two steps the stream's active chunk is
  sealed, once for all who wait, and goes up next.
- FencedError ends it: `on_fenced(reason)` once, no further write by this component.
- An idle engine: no events, no steps. Upkeep (audit, snapshot, retention) comes when no chunk came for REST_S.
- A log that grows faster than it is uploaded and snapshotted is slowed down (`brake_s`), by a bounded wait, and only
  while the remote takes what it is given.

Owner: the nursery that runs `run`; events come on the trio thread. Cancelling waits for the request under way. A crash
leaves what `stream` and `audit` say.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import trio

from aof2.engine.aio import open_nursery
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.store import Catalog
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import (
    Aof2Error,
    CorruptError,
    FatalIOError,
    LimitError,
    ReadOnlyError,
    TransientError,
    UnsupportedError,
)
from aof2.engine.manifest.format import ReasonCode
from aof2.engine.manifest.upload import UploadGaveUpError
from aof2.engine.manifest.writer import SealedChunk
from aof2.engine.remote.errors import FencedError, RemoteMissingError, RemoteRefusedError
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.audit import TenantAudit
from aof2.engine.replicate.listing import RemoteLog
from aof2.engine.replicate.mend import mend_running
from aof2.engine.replicate.position import Replication
from aof2.engine.replicate.reconcile import Status, StreamReport, examine_stream, repair_stream
from aof2.engine.replicate.stale import take_checked_claim
from aof2.engine.replicate.stream import BUNDLE_CHUNKS, StreamUploads

log = logging.getLogger(__name__)

T = TypeVar("T")
CLAIM: Final = "the claim"
DRAIN_STEP_S: Final = 0.01
DRAIN_ASK_S: Final = 1.0
# Local chunks of a stream: from here on its writer is slowed down, there as much as it ever is.
BRAKE_FROM_BYTES: Final = 32 << 20
BRAKE_FULL_BYTES: Final = 56 << 20
BRAKE_S_MAX: Final = 0.25
STILL_S: Final = 5.0
REST_S: Final = 0.1  # of a stream after a chunk, before audit, snapshot and retention
# What a remote that comes back, or another try, does not mend.
_STUCK: Final = (CorruptError, UnsupportedError, LimitError, RemoteMissingError, RemoteRefusedError)


def _name_of(stream_id: int) -> str:
    return f"the log of stream {stream_id}"


class ReplicateOptions(msgspec.Struct, frozen=True, kw_only=True):
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0
    bundle_chunks: int = BUNDLE_CHUNKS
    heartbeat_s: float = 10.0


class _Stream:
    """A stream's task as the component sees it."""

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.uploads: StreamUploads | None = None
        self.asked_below = 0  # up to here the writer was asked to seal
        self.audit: TenantAudit | None = None
        self.wake = trio.Event()
        self.busy = True
        self.resting = False  # a chunk came a moment ago, and others may follow: upkeep waits for them


class LogReplicator:
    """See the module's text. `tenants` gives the streams that have an audit log and their names."""

    def __init__(
        self,
        env: Env,
        store: RemoteStore,
        catalog: Catalog,
        writer: CatalogWriter,
        state_dir: Path,
        *,
        tenants: Callable[[], Mapping[int, str]],
        on_fenced: Callable[[str], None],
        options: ReplicateOptions | None = None,
        fence: Fence | None = None,
        replication: Replication | None = None,
    ) -> None:
        """`fence`: the claim, where it was made already; without one, `run` claims as soon as the remote answers."""
        self.env = env
        self.fence = fence
        self.replication = replication or Replication(env)
        self.replication.on_wanted = self._wanted
        self.replication.on_expected = self._expected
        self.replication.on_sealed = self._note_sealed
        self.fenced = ""
        self.ended = False  # nothing is uploaded any more: another writer took over, or the catalog takes no more
        self.stuck: dict[int, str] = {}
        self.reports: dict[int, StreamReport] = {}
        self.failures = 0
        self.log_retries = 0  # of failures, those of the log's own uploads
        self.mended_files = 0
        self._store = store
        self._catalog = catalog
        self._writer = writer
        self._state_dir = state_dir
        self._tenants = tenants
        self._on_fenced = on_fenced
        self._options = options or ReplicateOptions()
        self._streams: dict[int, _Stream] = {}
        self._nursery: trio.Nursery | None = None
        self._kicked = trio.Event()
        self._moved = trio.Event()
        self._refused: set[str] = set()  # what was refused, and said to be
        self._away: set[str] = set()  # what last failed
        self._draining = 0
        writer.target.observer = self.replication

    # -- events, on the trio thread ----------------------------------------------------------------------------

    def sealed(self, stream_id: int, chunk: SealedChunk | None = None) -> None:
        """A chunk of the stream is sealed."""
        stream = self._stream(stream_id)
        if stream.uploads is not None:
            stream.uploads.note_sealed(chunk)
        stream.resting = not self._draining
        if chunk is not None:
            stream.asked_below = max(stream.asked_below, chunk.header.base_record + chunk.record_count)
        self._wake(stream)

    def _note_sealed(self, stream_id: int, chunk: SealedChunk) -> None:
        """On the writer thread: a step that waits for the chunk need not wait for the trio thread, too."""
        stream = self._streams.get(stream_id)
        if stream is not None and stream.uploads is not None:
            stream.uploads.note_sealed(chunk)

    def _expected(self, stream_id: int) -> None:
        """A caller awaits what is published in a moment: the fence is asked while that is uploaded."""
        stream = self._stream(stream_id)
        if not self.ended and stream.uploads is not None:
            stream.uploads.expect()
            self._wake(stream)

    def _wanted(self, stream_id: int) -> None:
        """A waiter wants the stream's log to be there."""
        if not self.ended:
            self._wake(self._stream(stream_id))

    def snapshot_taken(self, stream_id: int) -> None:
        """`snapshots.take` has stored a snapshot of the stream."""
        stream = self._stream(stream_id)
        if stream.uploads is not None:
            stream.uploads.note_snapshot()
        if stream.audit is not None:
            stream.audit.note_snapshot()
        self._wake(stream)

    def hurry(self) -> None:
        """What waits out a backoff tries again now: a waiter is there."""
        self._kicked.set()
        self._kicked = trio.Event()

    def kick(self) -> None:
        """Whatever waits, tries again now: the operator mended something."""
        self.hurry()
        for stream in self._streams.values():
            if stream.audit is not None:
                stream.audit.retry()
            self._wake(stream)

    def brake_s(self) -> float:
        """How long the log's writer is to wait after each group, so that uploads and snapshots keep up. Any thread.

        0 while a stream's local chunks are few, and whenever waiting would be in vain: no claim, a remote that fails or
        does not move, a stream that is stuck. The log of a volume whose remote is away grows, it does not stop.
        """
        if self.fence is None or self.ended or self._away:
            return 0.0
        still_s = self.env.monotonic_s() - STILL_S
        moving = (s for s in tuple(self._streams.values()) if s.stream_id not in self.stuck)
        uploads = (s.uploads for s in moving if s.uploads is not None and s.uploads.moved_at_s > still_s)
        over = max((u.local_bytes for u in uploads), default=0) - BRAKE_FROM_BYTES
        return BRAKE_S_MAX * min(1.0, max(0, over) / (BRAKE_FULL_BYTES - BRAKE_FROM_BYTES))

    @property
    def idle(self) -> bool:
        """Whether everything that was told is on the remote."""
        return self.fence is not None and not self.stuck and not any(s.busy for s in self._streams.values())

    @property
    def is_there(self) -> bool:
        """Whether the remote has all that is committed."""
        return self.replication.has(self.replication.ends(self._streams))

    @property
    def audit_problems(self) -> dict[int, str]:
        """Tenants whose audit log is damaged, and how."""
        audits = ((s.stream_id, s.audit) for s in self._streams.values())
        return {stream_id: audit.broken for stream_id, audit in audits if audit is not None and audit.broken}

    async def drain(self) -> None:
        """Waits until all that is committed is sealed and on the remote, or `run` ended. Set a time limit around it."""
        self._draining += 1
        try:
            for stream in self._streams.values():
                stream.resting = False
                self._wake(stream)
            while not self.ended:
                moved = self._moved
                self.replication.want(self.replication.ends(self._streams))
                due_s = self._writer.target.due_s()
                if due_s is not None:  # what is asked for does not wait for its timer
                    await trio.sleep(DRAIN_STEP_S)
                    with trio.move_on_after(min(due_s, DRAIN_ASK_S)):  # a commit that came since is asked for, too
                        await moved.wait()
                elif self.idle:
                    # A chunk may be sealed and its event still on its way from the writer's thread. What that thread
                    # did before it answers this is told before this returns.
                    with contextlib.suppress(ReadOnlyError, FatalIOError):
                        await trio.to_thread.run_sync(self._writer.flush)
                    await trio.lowlevel.checkpoint()
                    if self.idle and self._writer.target.due_s() is None:
                        return
                else:
                    with trio.move_on_after(DRAIN_ASK_S):
                        await moved.wait()
        finally:
            self._draining -= 1

    async def leave(self) -> bool:
        """Marks the volume as unmounted in the remote, with where its logs end; False where that would not be true."""
        ends = self.replication.ends(self._streams)
        if self.fence is None or self.fenced or self.ended or not self.replication.has(ends):
            return False
        positions = {stream_id: self.replication.there(stream_id) for stream_id in ends}
        await trio.to_thread.run_sync(self.fence.leave, self.env.now_ms(), positions)
        return True

    # -- the tasks ---------------------------------------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Runs until cancelled, or until another writer took over."""
        task_status.started()
        self._writer.target.brake_s = self.brake_s
        try:
            if self.fence is None:
                claim = partial(take_checked_claim, self.env, self._store, self._catalog, self._state_dir)
                self.fence = await self._attempts(claim, CLAIM)
            with self._catalog.view() as view:
                for stream_id in view.streams():
                    if stream_id not in self._writer.target.read_only_streams:
                        self._stream(stream_id)
            self._tell_moved()
            async with open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._heartbeat, self.fence)
                for stream in list(self._streams.values()):
                    nursery.start_soon(self._run_stream, stream)
                await trio.sleep_forever()
        except Aof2Error as e:
            self._stop(e)
        finally:
            self._nursery = None
            self.ended = True
            self.replication.tell()
            self._tell_moved()
            for stream in self._streams.values():
                if stream.audit is not None:
                    stream.audit.close()

    async def _heartbeat(self, fence: Fence) -> None:
        """Whether the volume is still ours, asked while it is written to: an idle one asks at its next upload."""
        groups = self._writer.groups
        while True:
            await trio.sleep(self._options.heartbeat_s)
            if self._writer.groups == groups and not self._has_dirty():
                continue
            groups = self._writer.groups
            try:
                await trio.to_thread.run_sync(fence.check)
            except TransientError:
                continue  # away: asked again after the next pause

    def _has_dirty(self) -> bool:
        with self._catalog.view() as view:
            return any(next(view.scan(stream_id, t.DIRTY), None) is not None for stream_id in self._tenants())

    def _stop(self, error: Aof2Error) -> None:
        if isinstance(error, ReadOnlyError) and not isinstance(error, FencedError):
            log.info("log replication ends", extra={"error": str(error)})  # the catalog takes no more, and said why
            return
        self.fenced = str(error)
        self.replication.all_stand(self.fenced, refused=False)
        log.error("log replication ends", extra={"error": str(error)})
        self._on_fenced(self.fenced)

    async def _run_stream(self, stream: _Stream) -> None:
        assert self.fence is not None  # noqa: S101 (narrowing: tasks start after the claim)
        directory = self._state_dir / "manifest" / str(stream.stream_id)
        name = self._tenants().get(stream.stream_id)
        if name is not None:
            stream.audit = TenantAudit(
                self.env, self._catalog, self._writer, self._state_dir, stream.stream_id, name, self.fence, self._store
            )
        stream.uploads = StreamUploads(
            self.env,
            self._catalog,
            self._writer,
            self._store,
            self.fence,
            directory,
            stream.stream_id,
            bundle_chunks=self._options.bundle_chunks,
            before_retention=stream.audit.catch_up if stream.audit is not None else None,
            on_put=partial(self._on_put, stream.stream_id),
            is_wanted=lambda: stream.resting or self._is_wanted(stream.stream_id),
        )
        while True:
            stream.wake = trio.Event()
            stream.busy = True
            await self._steps(stream, stream.uploads)
            if stream.wake.is_set():
                continue
            if stream.resting:
                with trio.move_on_after(REST_S):
                    await stream.wake.wait()
                    continue
                stream.resting = False
                continue
            stream.busy = False
            self._tell_moved()
            await stream.wake.wait()

    async def _steps(self, stream: _Stream, uploads: StreamUploads) -> None:
        what = _name_of(stream.stream_id)
        try:
            if stream.stream_id not in self.reports:
                report = await self._attempts(partial(self._reconcile, uploads), what)
                self.reports[stream.stream_id] = report
            prepare = partial(self._seal_wanted, stream)
            prepare()
            while uploads.is_due and await self._attempts(uploads.step, what, prepare=prepare):
                prepare()
            if stream.resting or (self._is_wanted(stream.stream_id) and stream.asked_below):
                return  # sealed any moment: what a waiter waits for goes first
            if stream.audit is not None:
                await self._attempts(stream.audit.upload, f"audit log {stream.stream_id}")
            self.stuck.pop(stream.stream_id, None)
        except _STUCK as e:
            # A damaged local log, say: nothing goes over a good copy. It is tried again when more comes, or kicked.
            if self.stuck.get(stream.stream_id) != str(e):
                log.error("log upload stopped", extra={"stream_id": stream.stream_id, "error": str(e)})  # noqa: TRY400
            self.stuck[stream.stream_id] = str(e)
            self.replication.stands(stream.stream_id, str(e), refused=False)

    def _is_wanted(self, stream_id: int) -> bool:
        """Whether a caller waits for more of the log to be there, or will in a moment."""
        return self.replication.wanted(stream_id) > 0 or self.replication.is_awaited(stream_id)

    def _seal_wanted(self, stream: _Stream) -> None:
        """What a waiter wants and the writer has not been asked to seal yet."""
        wanted = self.replication.wanted(stream.stream_id)
        if wanted > stream.asked_below:
            stream.asked_below = wanted
            if stream.uploads is not None:
                stream.uploads.expect()
            with contextlib.suppress(ReadOnlyError):
                self._writer.seal(stream.stream_id, wanted)

    def _on_put(self, stream_id: int, chunk: SealedChunk) -> None:
        """On the stream's worker thread: the remote has this chunk, and all before it."""
        self.replication.uploaded(stream_id, chunk.header.base_record + chunk.record_count)

    def _reconcile(self, uploads: StreamUploads) -> StreamReport:
        """Once a start: the log against the listing; what is missing there and still here goes up again."""
        mended = mend_running(self.env, self._store, self._catalog, self._writer, self._state_dir, uploads.stream_id)
        self.mended_files += len(mended)
        uploads.finish_bundles(RemoteLog(self._store, uploads.stream_id))
        report = examine_stream(self._store, self._catalog, uploads.directory, uploads.stream_id)
        report = repair_stream(report, uploads)
        for finding in report.of(Status.NEEDS_REPAIR, Status.DIVERGENT):
            log.warning(
                "manifest object on the remote is not what the log says",
                extra={"key": finding.key, "status": finding.status.value, "detail": finding.detail},
            )
        return report

    async def _attempts(self, work: Callable[[], T], what: str, prepare: Callable[[], object] = lambda: None) -> T:
        """The work's result, however long the remote is away or refuses us. `prepare` runs before each attempt."""
        pause_s = self._options.backoff_s
        failed = False
        while True:
            try:
                prepare()
                if failed and self.fence is not None:
                    await trio.to_thread.run_sync(self.fence.check)
                result = await trio.to_thread.run_sync(work)
            except FatalIOError:
                raise
            except (TransientError, UploadGaveUpError, OSError) as e:
                failed = True
                self._away.add(what)
                self.failures += 1
                self.log_retries += what != CLAIM
                reason_code = getattr(e, "reason_code", int(ReasonCode.TRANSIENT))
                self._note_standing(what, e, refused=reason_code == ReasonCode.AUTH)
                await self._wait(what, e, reason_code, pause_s)
                pause_s = min(self._options.backoff_max_s, pause_s * 2)
            else:
                self._away.discard(what)
                if failed and what == CLAIM:
                    self.replication.goes_on()
                if what in self._refused:
                    self._refused.discard(what)
                    log.info("the remote takes our credentials again", extra={"what": what})
                return result

    async def _wait(self, what: str, error: Exception, reason_code: int, pause_s: float) -> None:
        kicked = self._kicked
        self._tell_moved()
        if reason_code == ReasonCode.AUTH and what not in self._refused:
            self._refused.add(what)
            log.error("the remote refuses us; asked again by itself", extra={"what": what, "error": str(error)})
        log.info("upload waits", extra={"what": what, "error": str(error), "pause_s": pause_s})
        with trio.move_on_after(self.env.rng.uniform(pause_s / 2, pause_s)):
            await kicked.wait()

    def _note_standing(self, what: str, error: Exception, *, refused: bool) -> None:
        """The claim holds up every stream, a stream itself."""
        if what == CLAIM:
            self.replication.all_stand(str(error), refused=refused)
        for stream_id in (s for s in self._streams if what == _name_of(s)):
            self.replication.stands(stream_id, str(error), refused=refused)

    # -- inside ------------------------------------------------------------------------------------------------

    def _stream(self, stream_id: int) -> _Stream:
        stream = self._streams.get(stream_id)
        if stream is None:
            stream = self._streams[stream_id] = _Stream(stream_id)
            if self._nursery is not None:
                self._nursery.start_soon(self._run_stream, stream)
        return stream

    def _wake(self, stream: _Stream) -> None:
        stream.busy = True
        stream.wake.set()

    def _tell_moved(self) -> None:
        """`drain` looks again."""
        self._moved.set()
        self._moved = trio.Event()
