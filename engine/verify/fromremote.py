"""verify without the volume's disk: the remote against itself, from any machine that can read it.

    logs, as a follower has them → rows → rows against each other · tiers · evictions · listing · audit ranges · pieces

The same checks as on the volume's machine (`run.py`), but for those of that disk. Every object of the logs that is
listed is read, not only those that rows name: the newest is put before the log can say so.

Invariants
- Reads only; a temporary folder, which goes.
- Where a log cannot be read to its end, the rows are of before: what they lack or have too much is not told as missing
  or as an orphan, only what of it is damaged.
- A writer may be at work: unless it left cleanly, a finding counts only if it is found again with the logs read anew.

Owner: the calling thread. A crash leaves a temporary folder.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from aof2.engine.audit.ranges import replay_ranges
from aof2.engine.env import Env
from aof2.engine.errors import Aof2Error, CorruptError, TransientError, UnsupportedError
from aof2.engine.inspect.rows import tenant_names
from aof2.engine.manifest.format import chunk_key, chunk_name
from aof2.engine.remote import keys
from aof2.engine.remote.errors import RemoteMissingError
from aof2.engine.remote.fence import VolumeRecord
from aof2.engine.remote.open import open_remote
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.auditmend import range_starts
from aof2.engine.replicate.follow import Follower, StreamFollowed
from aof2.engine.replicate.listing import Inventory, list_stream
from aof2.engine.replicate.stream import SNAPSHOTS_REMOTE
from aof2.engine.settings import Settings
from aof2.engine.verify import log, remote, rows, tiers
from aof2.engine.verify.context import Context, OneStream
from aof2.engine.verify.findings import Finding, Kind, Report, Severity, finding
from aof2.engine.verify.index import Index
from aof2.engine.verify.pieces import LogPiece, Piece
from aof2.engine.verify.run import Spread

_TOLD_BY_ROWS = (Kind.REMOTE_MISSING, Kind.REMOTE_ORPHAN)


def verify_remote(settings: Settings, spread: Spread, *, env: Env | None = None) -> Report:
    """Everything in the remote. `spread` checks the pieces. Aof2Error: there is no volume, or it is a newer one's."""
    env = env or Env()
    directory = settings.remote.directory
    if directory is not None and not directory.is_dir():
        raise RemoteMissingError(f"{directory}: no such folder; is it the right url, and its disk mounted?")
    with contextlib.closing(open_remote(env, settings.remote)) as store:
        report, closed = _look(env, settings, store, spread)
        if not closed and any(f.severity is not Severity.NOTE for f in report.findings):
            again, _ = _look(env, settings, store, spread)
            seen = {f.identity for f in report.findings}
            again.findings = [f for f in again.findings if f.severity is Severity.NOTE or f.identity in seen]
            report = again
    report.conclude()
    return report


def _look(env: Env, settings: Settings, store: RemoteStore, spread: Spread) -> tuple[Report, bool]:
    """What one look found, and whether the writer had left cleanly then."""
    with tempfile.TemporaryDirectory(prefix="aof2-verify-") as folder:
        state_dir = Path(folder) / "state"
        volume = msgspec.structs.replace(settings.volume, state_dir=state_dir)
        here = msgspec.structs.replace(settings, volume=volume)
        report = Report(state_dir=settings.remote.url, remote="read", findings=[])
        try:
            with Follower(env, store, state_dir, clear_residency=False) as follower:
                record = follower.check_volume()
                ctx = Context(env, here, follower.catalog, report, env.now_ms(), {})
                look = _RemoteLook(ctx, store, spread, record, follower.catch_up())
                look.run(Path(folder))
        except TransientError as e:
            report.remote = "unreachable"
            report.findings.append(finding(Kind.REMOTE_UNREACHABLE, Severity.ERROR, f"the remote was not checked: {e}"))
            return report, True
        return report, bool(record.closed_at_ms)


@dataclass
class _RemoteLook:
    ctx: Context
    store: RemoteStore
    spread: Spread
    volume: VolumeRecord
    followed: list[StreamFollowed]
    behind: set[int] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    inventories: dict[int, Inventory] = field(default_factory=dict)

    def run(self, folder: Path) -> None:
        ctx = self.ctx
        with contextlib.closing(Index(folder / "index")) as index, ctx.rows.view() as view:
            ctx.tenants = tenant_names(view)
            self._note_lost_streams()
            streams = {one.stream_id: OneStream(ctx, view, one.stream_id) for one in self.followed}
            missing = [one for f in self.followed for one in self._missing_chunks(streams[f.stream_id], f)]
            for s in streams.values():
                self._add(log.check_log(s))
                self._add(log.check_evictions(s))
            tenants = [s for s in streams.values() if s.stream_id in ctx.tenants]
            for s in tenants:
                self._add(rows.check_rows(s, index))
                self._add(tiers.check_tiers(s))
                self._add(check_audit_ranges(s, self.store))
            for s in streams.values():
                index.expect(remote.expected(s))
            self._add(f for f in remote.check_listing(ctx, self.store, index, deep=True) if self._is_sure(f))
            self._add(f for f in missing if f.key not in self.told)
            self._note_behind()
            self.spread(self.store, self._pieces(index, streams, tenants), partial(remote.tell, ctx))

    def _add(self, found: Iterator[Finding]) -> None:
        for one in found:
            self.told.add(one.key)
            self.ctx.add(one)

    def _pieces(self, index: Index, streams: dict[int, OneStream], tenants: list[OneStream]) -> Iterator[Piece]:
        for s in tenants:
            yield from remote.blob_pieces(s, index)
        for info in self.store.list(remote.LOG_PREFIX):
            stream = streams.get(int(number)) if (number := info.key.split("/")[1]).isdecimal() else None
            if stream is not None and keys.parse_key(info.key) is not None:
                yield LogPiece(stream.stream_id, info.key, "", info.size)

    def _note_lost_streams(self) -> None:
        """Streams of which nothing is there any more. Without the volume's own, tenants have no names."""
        known = {one.stream_id for one in self.followed}
        for stream_id in sorted({0, *self.volume.closed_at, *self.ctx.tenants} - known):
            if stream_id and stream_id not in self.volume.closed_at:
                continue  # a tenant whose log was not put yet
            self.behind.add(stream_id)
            key = chunk_key(stream_id, 0)
            what = f"{key}: missing in the remote, and so is all of its log"
            self._add(iter([finding(Kind.REMOTE_LOG, Severity.ERROR, what, key=key)]))
        if 0 in self.behind:
            self.ctx.tenants |= {stream_id: "" for stream_id in known - {0} if stream_id not in self.ctx.tenants}

    # -- logs that do not go on --------------------------------------------------------------------------------

    def _missing_chunks(self, s: OneStream, followed: StreamFollowed) -> Iterator[Finding]:
        """Chunks that the rows could not be brought up with: those that are not there are told here; damaged ones by
        their own check."""
        first = followed.position.chunk_index if followed.position is not None else 0
        lacking = [i for i in range(first, followed.remote_chunk_last + 1) if not (s.log_dir / chunk_name(i)).exists()]
        ended = followed.position.ordinal if followed.position is not None else 0
        closed_at = self.volume.closed_at.get(s.stream_id, 0) if self.volume.closed_at_ms else 0
        if lacking or ended < closed_at:
            self.behind.add(s.stream_id)
        there = {info.key for info in self.store.list(f"{remote.LOG_PREFIX}{s.stream_id}/")} if lacking else set()
        gone = [i for i in lacking if chunk_key(s.stream_id, i) not in there]
        if not lacking and ended < closed_at:
            gone = [followed.remote_chunk_last + 1]
        for index in gone:
            key = chunk_key(s.stream_id, index)
            what = f"{key}: missing in the remote, and the log goes on behind it"
            yield s.say(Kind.REMOTE_LOG, Severity.ERROR, what, key=key)

    def _is_replaced(self, key: str) -> bool:
        """Whether a bundle has the chunk, or a newer snapshot stands for this one: the log's end, which says so, goes
        up with the records of the writer's next change."""
        match keys.parse_key(key):
            case keys.ManifestChunkKey(stream_id, index):
                return self._listed(stream_id).bundle_of(index) is not None
            case keys.ManifestSnapshotKey(stream_id, snapshot_id):
                newer = [n for n in self._listed(stream_id).snapshots if n > snapshot_id]
                return len(newer) >= SNAPSHOTS_REMOTE
        return False

    def _listed(self, stream_id: int) -> Inventory:
        if stream_id not in self.inventories:
            self.inventories[stream_id] = list_stream(self.store, stream_id)
        return self.inventories[stream_id]

    def _is_sure(self, found: Finding) -> bool:
        """Rows that end before their log does not know what came and went since."""
        if found.kind is Kind.REMOTE_LOG and self._is_replaced(found.key):
            return False
        tenants = {self.ctx.tenants.get(stream_id, "") for stream_id in self.behind}
        return found.kind not in _TOLD_BY_ROWS or (found.tenant not in tenants and 0 not in self.behind)

    def _note_behind(self) -> None:
        for one in self.followed:
            if one.stream_id in self.behind and one.position is not None:
                what = f"its log can be read up to record {one.position.ordinal}; what came and went since is not told"
                name = self.ctx.tenants.get(one.stream_id, "the volume")
                self.ctx.add(finding(Kind.REMOTE_LOG, Severity.NOTE, f"{name}: {what}", tenant=name))


def check_audit_ranges(s: OneStream, store: RemoteStore) -> Iterator[Finding]:
    """The ranges of the audit log in the remote: each whole, and one chain from the first."""
    at, last, wrong = 0, 0, ""

    def parts() -> Iterator[tuple[int, bytes]]:
        nonlocal at
        for first in starts:
            at = first
            yield first, store.get_blob(keys.audit_range_key(s.stream_id, first))[1]

    starts = range_starts(store, s.stream_id)
    try:
        for record in replay_ranges(parts()):
            last = record.logseq
    except (CorruptError, UnsupportedError, RemoteMissingError) as e:
        wrong = str(e)
    if not wrong:
        return
    if at > last + 1 and not isinstance(_range_error(s, store, at), Aof2Error):
        at, wrong = last + 1, "missing in the remote"
    yield _audit_finding(s, at, wrong)
    for first in starts:
        error = _range_error(s, store, first) if first > at else None
        if error is not None:
            yield _audit_finding(s, first, str(error))


def _range_error(s: OneStream, store: RemoteStore, first: int) -> Aof2Error | None:
    try:
        store.get_blob(keys.audit_range_key(s.stream_id, first))
    except (CorruptError, RemoteMissingError) as e:
        return e
    return None


def _audit_finding(s: OneStream, first: int, wrong: str) -> Finding:
    key = keys.audit_range_key(s.stream_id, first)
    return s.say(Kind.AUDIT, Severity.ERROR, wrong if wrong.startswith(key) else f"{key}: {wrong}", key=key)
