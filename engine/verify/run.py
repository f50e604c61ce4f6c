"""verify: every check, in order, on as many threads as asked; on a running volume what is found is looked at twice.

    rows from the logs ← compared with the catalog
    logs · evictions · audit · rows · tiers · local bytes · strays · remote

Without the volume's disk, from the remote alone: `fromremote.py`.

Invariants
- Read-only, and without the writer's lock, unless it repairs; then the lock is held from before the first look.
- Memory is bounded: rows and sets lie in a temporary folder, work is handed out as it is done.
- On a running volume a finding counts only if it is found again, with rows read anew: what was on its way the first
  time has arrived, or it is damage.

Owner: the calling thread and its pool. A crash leaves a temporary folder.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from aof2.engine.catalog import tables as t
from aof2.engine.catalog.recovery import stream_ids
from aof2.engine.catalog.store import View
from aof2.engine.env import Env
from aof2.engine.errors import ReadOnlyError, TransientError
from aof2.engine.follow.mark import load_mark
from aof2.engine.inspect.paths import files_below, resolve
from aof2.engine.inspect.rows import MANIFEST_DIR, check_state_dir, is_live, tenant_names
from aof2.engine.opening import lock_state_dir
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.settings import Settings
from aof2.engine.verify import audit, local, log, remote, rows, tiers
from aof2.engine.verify.context import Context, OneStream
from aof2.engine.verify.findings import Finding, Kind, Report, Severity, finding
from aof2.engine.verify.index import Index
from aof2.engine.verify.logcopies import check_audit_copies
from aof2.engine.verify.mendlogs import mend_logs
from aof2.engine.verify.pieces import Checked, Piece, check_piece
from aof2.engine.verify.repair import repair_findings
from aof2.engine.verify.truth import open_truth

Progress = Callable[[int, int], None]
"""Called with (pieces of work done, pieces known so far)."""
Told = Callable[[Piece | None, Checked], None]
Spread = Callable[[RemoteStore, Iterator[Piece], Told], None]
"""Checks every piece, somewhere, and tells of each; on any thread."""
QUEUED_PER_JOB = 4
MOUNTED = "the volume is mounted; stop the daemon or run it through the daemon"


def default_jobs() -> int:
    return min(4, os.cpu_count() or 1)


def verify(
    settings: Settings,
    *,
    deep_remote: bool = False,
    repair: bool = False,
    jobs: int | None = None,
    paths: Sequence[str] = (),
    env: Env | None = None,
    on_progress: Progress | None = None,
) -> Report:
    """Checks the volume, and mends what is safe to. ReadOnlyError: repair was asked for while it is mounted."""
    env = env or Env()
    state_dir = check_state_dir(settings.volume.state_dir)
    if repair and load_mark(state_dir) is not None:
        raise ReadOnlyError(
            f"{state_dir} follows a volume: what is damaged here is fetched anew, "
            "the rest is repaired where its writer is"
        )
    with contextlib.ExitStack() as stack:
        if repair:
            stack.callback(os.close, lock_state_dir(state_dir, MOUNTED))
        store, unreachable = _open_remote(env, settings)
        if store is not None:
            stack.callback(store.close)
        mended = mend_logs(env, settings, store) if repair and store is not None else []
        look = partial(_Look, env, settings, store, deep_remote, jobs or default_jobs(), paths, on_progress)
        live = not repair and is_live(state_dir)
        report = look(live, unreachable).run()
        if live and any(f.severity is not Severity.NOTE for f in report.findings):
            again = look(live, unreachable).run()
            seen = {f.identity for f in report.findings}
            again.findings = [f for f in again.findings if f.severity is Severity.NOTE or f.identity in seen]
            report = again
        if repair:
            report.findings = [*mended, *repair_findings(env, settings, store, report.findings)]
    report.conclude()
    return report


@dataclass
class _Look:
    """One pass over everything."""

    env: Env
    settings: Settings
    store: RemoteStore | None
    deep: bool
    jobs: int
    paths: Sequence[str]
    on_progress: Progress | None
    live: bool
    unreachable: str
    done: int = 0
    total: int = 0

    def run(self) -> Report:
        state_dir = self.settings.volume.state_dir
        report = Report(state_dir=str(state_dir), live=self.live, findings=[])
        started_ms = self.env.now_ms()
        with (
            tempfile.TemporaryDirectory(prefix="aof2-verify-") as folder,
            open_truth(self.env, state_dir, Path(folder), live=self.live) as truth,
            contextlib.closing(Index(Path(folder) / "index")) as index,
            truth.rows.view() as view,
        ):
            self.ctx = Context(self.env, self.settings, truth.rows, report, started_ms, truth.damaged)
            self._add(truth.findings)
            self._look(view, index)
        return report

    def _look(self, view: View, index: Index) -> None:
        ctx = self.ctx
        ctx.tenants = tenant_names(view)
        ctx.scope = self._scope(view)
        in_scope = stream_ids(ctx.state_dir / MANIFEST_DIR)
        if ctx.scope is not None:
            in_scope = [s for s in in_scope if any(s == stream_id for stream_id, _ in ctx.scope)]
        streams = [OneStream(ctx, view, stream_id) for stream_id in in_scope]
        for s in streams:
            self._add(log.check_log(s))
            self._add(log.check_evictions(s))
        tenants = [s for s in streams if s.stream_id in ctx.tenants]
        for s in tenants:
            self._add(rows.check_rows(s, index))
            if not ctx.follows:  # whose logs tell of the writer's tiers
                self._add(tiers.check_tiers(s))
                self._add(audit.check_audit(s))
        self._spread(self._local_work(tenants))
        if ctx.scope is None:
            self._add(local.check_strays(ctx, view))
        self._look_remote(index, streams, tenants)

    def _scope(self, view: View) -> set[tuple[int, int]] | None:
        if not self.paths:
            return None
        scope: set[tuple[int, int]] = set()
        for text in self.paths:
            place = resolve(view, self.settings.volume.mountpoint, text)
            if place is None:
                return None
            scope |= {(file.tenant_id, file.inode.ino) for file in files_below(view, place)}
        return scope

    def _local_work(self, tenants: Iterable[OneStream]) -> Iterator[Callable[[], None]]:
        ctx = self.ctx
        for s in tenants:
            for row in s.objects():
                if any(row.chunks):
                    yield partial(local.check_object, ctx, s.stream_id, row)
            for chunk_id, stored_bytes in s.scan(t.WARM):
                chunk = s.get(t.CHUNKS, chunk_id)
                if chunk is not None and (ctx.scope is None or (s.stream_id, chunk.ino) in ctx.scope):
                    yield partial(local.check_warm_blob, ctx, s.stream_id, chunk, stored_bytes)

    # -- the remote --------------------------------------------------------------------------------------------

    def _look_remote(self, index: Index, streams: list[OneStream], tenants: list[OneStream]) -> None:
        ctx, store = self.ctx, self.store
        if store is None:
            self._remote_failed(self.unreachable)
            return
        ctx.report.remote = "read" if self.deep else "listed"
        try:
            if ctx.scope is not None:
                self._spread(self._scoped_work(store, tenants))
                return
            for s in streams:
                index.expect(remote.expected(s))
            self._add(remote.check_listing(ctx, store, index, deep=self.deep))
            for s in tenants if not ctx.follows else ():
                self._add(check_audit_copies(s, store, deep=self.deep))
            if self.deep:
                self._on_threads(store, self._pieces(index, streams, tenants), partial(remote.tell, ctx))
            for s in streams if ctx.follows else ():
                remote.excuse_behind(s, store)
        except TransientError as e:
            self._remote_failed(str(e))

    def _pieces(self, index: Index, streams: list[OneStream], tenants: list[OneStream]) -> Iterator[Piece]:
        for tenant in tenants:
            yield from remote.blob_pieces(tenant, index)
        for stream in streams:
            yield from remote.log_pieces(stream)

    def _on_threads(self, store: RemoteStore, pieces: Iterator[Piece], told: Told) -> None:
        def check(piece: Piece) -> None:
            told(piece, check_piece(store, piece))

        self._spread(partial(check, piece) for piece in pieces)

    def _scoped_work(self, store: RemoteStore, tenants: Iterable[OneStream]) -> Iterator[Callable[[], None]]:
        """The blobs of the files that were named, one by one."""
        for s in tenants:
            for row in s.objects():
                for chunk_id in row.data_chunks:
                    yield partial(remote.check_chunk_blob, self.ctx, store, s.stream_id, chunk_id, deep=self.deep)

    def _remote_failed(self, why: str) -> None:
        """Asked to read the remote and cannot: the run failed. Not asked: the rest is still worth knowing."""
        self.ctx.report.remote = "unreachable"
        severity = Severity.ERROR if self.deep else Severity.NOTE
        self.ctx.add(finding(Kind.REMOTE_UNREACHABLE, severity, f"the remote was not checked: {why}"))

    # -- work --------------------------------------------------------------------------------------------------

    def _add(self, found: Iterable[Finding]) -> None:
        for one in found:
            self.ctx.add(one)

    def _spread(self, work: Iterable[Callable[[], None]]) -> None:
        """Runs the pieces on the pool, a bounded number ahead."""
        pending: deque[Future[None]] = deque()
        with ThreadPoolExecutor(self.jobs, thread_name_prefix="aof2-verify") as pool:
            try:
                for piece in work:
                    self.total += 1
                    pending.append(pool.submit(piece))
                    while len(pending) >= self.jobs * QUEUED_PER_JOB:
                        self._finish(pending.popleft())
                while pending:
                    self._finish(pending.popleft())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _finish(self, future: Future[None]) -> None:
        future.result()
        self.done += 1
        if self.on_progress is not None:
            self.on_progress(self.done, self.total)


def _open_remote(env: Env, settings: Settings) -> tuple[RemoteStore | None, str]:
    r = settings.remote
    if r.directory is not None and not r.directory.is_dir():
        return None, f"{r.directory}: no such folder"  # opening would make it
    try:
        return open_remote(env, r), ""
    except TransientError as e:
        return None, str(e)
