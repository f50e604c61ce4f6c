"""The audit log of one tenant, derived from the committed manifest log; caught up exactly once, anchored, uploaded.

Derived from the log's sealed chunks, not from the change feed: names of artifacts come from object rows, which no
ManifestOp carries, and only the log keeps every transition in its order (a tombstone that was lifted again is two
records, in the rows it is nothing). Sealed, because a sealed chunk is durable: the audit log must not know what a power
loss can still take back.

    chunk row put the first time      SEGMENT_SEAL(chunk id, SHA-256)
    object row put as PUBLISHED       ARTIFACT_PUBLISH, and TOMBSTONE_LIFT of what stands on it
    object row put as TOMBSTONED      TOMBSTONE, if it was ever published
    object row deleted                ARTIFACT_UNPUBLISH
    snapshot taken                    SNAPSHOT_ANCHOR, if anything was added since the last one

Exactly once. The counters `audit_logseq` and `audit_chunk` in the tenant's rows say: with the records up to that one,
the log is derived from before that chunk on. They move at anchors only, so that an idle log stays as it is. After a
crash the chunks since are derived again and compared with the records that are there already: equal ones are passed,
what is missing is appended. Where the chunks are gone, or the two disagree, the rows themselves are compared with what
the audit log adds up to, and the difference is appended.

Invariants
- What is appended is durable in the manifest log before. Chunks are derived before retention may take them.
- Ranges are cut at anchors and put under names that no other writer used; each is put once, or again with equal bytes.

Owner: the stream's upload task, one worker thread at a time. A crash leaves a prefix of what was to be appended.
A broken audit chain stops this (`broken`), never the log's own upload.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aof2.engine.audit import format as fmt
from aof2.engine.audit.ondisk import DiskState
from aof2.engine.audit.ranges import LogRange, cut_points
from aof2.engine.audit.reader import LogRecord, Position
from aof2.engine.audit.source import Source
from aof2.engine.audit.writer import AuditWriter
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import Batch, Mutation, mutations_in
from aof2.engine.catalog.rows import ChunkRow, ObjectRow, ObjectState
from aof2.engine.catalog.store import Catalog, View
from aof2.engine.catalog.writer import CatalogWriter
from aof2.engine.env import Env
from aof2.engine.errors import CorruptError
from aof2.engine.fds import opened
from aof2.engine.manifest.reader import chunk_headers, parse_chunk
from aof2.engine.manifest.snapshot import list_snapshots
from aof2.engine.remote import keys
from aof2.engine.remote.fence import Fence
from aof2.engine.remote.store import RemoteStore
from aof2.engine.replicate.auditmend import audit_path, joined_ranges, range_starts, rebuild_audit

log = logging.getLogger(__name__)

AUDIT_LOGSEQ: Final = "audit_logseq"
AUDIT_CHUNK: Final = "audit_chunk"
APPEND_MAX: Final = 10_000
CRASH_POINTS: Final = ("replicate.audit.appended", "replicate.audit.anchored", "replicate.audit.range_put")

ObjectKey = tuple[int, int]


class _DisagreeError(Exception):
    """The next record of the audit log is not what the manifest log gives."""


class Derivation:
    """Changes of rows into audit records, checked against records that are there already, the rest gathered."""

    def __init__(self, tenant: str, state: DiskState, known_logseq: int) -> None:
        self.state = state
        self.fresh: list[fmt.Payload] = []
        self.sweep_due = False
        self.rows_are_newer = True  # than the chunk that is derived: what it deletes may have been published
        self.next_logseq = 0
        self._tenant = tenant
        self._known_logseq = known_logseq
        self._existing: deque[LogRecord] = deque()

    def replayed(self, record: LogRecord) -> None:
        """A record that is in the audit log: accounted for, or to be compared."""
        if record.logseq <= self._known_logseq:
            self.state.apply(record)
        else:
            self._existing.append(record)

    def ref_of(self, row: ObjectRow) -> fmt.ArtifactRef:
        return fmt.artifact_ref(self._tenant, row.ino, row.generation, row.sha256)

    def chunk(self, row: ChunkRow) -> None:
        if len(row.sha256) == 32 and self.state.sealed_as(row.chunk_id) is None:
            self._emit(fmt.SegmentSeal(row.chunk_id, row.sha256))

    def object(self, row: ObjectRow) -> None:
        published = row.state == ObjectState.PUBLISHED
        if not published and not (row.state == ObjectState.TOMBSTONED and row.published_ms):
            return
        ref = self.ref_of(row)
        self.state.remember((row.ino, row.generation), ref)
        if not self.state.is_published(ref):
            self._emit(fmt.ArtifactPublish(ref))
        standing = self.state.tombstones(ref)
        if published:
            for logseq in standing:
                self._emit(fmt.TombstoneLift(ref, logseq))
        elif not standing:
            self._emit(fmt.Tombstone(ref))

    def gone(self, key: ObjectKey) -> None:
        ref = self.state.take(key)
        if ref is not None:
            if self.state.is_published(ref):
                self._emit(fmt.ArtifactUnpublish(ref))
            return
        # Deleted before this process looked at the rows: the audit log may know which one, else the sweep will. Since
        # then every publication was seen, and this one was never published.
        self._pass_anchors()
        head = self._existing[0].payload if self._existing else None
        if isinstance(head, fmt.ArtifactUnpublish) and self.state.is_published(head.artifact):
            self._emit(head)
        elif self.rows_are_newer:
            self.sweep_due = True

    def sweep(self, live: Iterable[fmt.ArtifactRef]) -> None:
        """Whatever is published and has no row any more was purged."""
        for ref in self.state.without(live):
            self._emit(fmt.ArtifactUnpublish(ref))
        self.sweep_due = False

    def accept_rest(self) -> None:
        """Takes what the audit log holds as it is."""
        while self._existing:
            self.state.apply(self._existing.popleft())

    def _emit(self, payload: fmt.Payload) -> None:
        self._pass_anchors()
        if self._existing:
            if self._existing[0].payload != payload:
                raise _DisagreeError(f"logseq {self._existing[0].logseq}: {self._existing[0].payload}, not {payload}")
            self.state.apply(self._existing.popleft())
        else:
            self._add(payload)

    def _pass_anchors(self) -> None:
        while self._existing and isinstance(self._existing[0].payload, fmt.SnapshotAnchor):
            self.state.apply(self._existing.popleft())

    def anchor(self, snapshot_id: int) -> None:
        payload = self.state.anchor(snapshot_id)
        self.accept_rest()
        self._add(payload)

    def _add(self, payload: fmt.Payload) -> None:
        self.state.apply_payload(self.next_logseq, payload)
        self.next_logseq += 1
        self.fresh.append(payload)


@dataclass(eq=False)
class TenantAudit:
    """See the module's text. Opens its log at the first `catch_up`."""

    env: Env
    catalog: Catalog
    writer: CatalogWriter
    state_dir: Path
    tenant_id: int
    tenant: str
    fence: Fence
    store: RemoteStore

    def __post_init__(self) -> None:
        self.path = audit_path(self.state_dir, self.tenant_id)
        self.broken = ""
        self._mended = False
        self._directory = self.state_dir / "manifest" / str(self.tenant_id)
        self._scratch = self.state_dir / "audit_scratch" / str(self.tenant_id)
        self._files = contextlib.ExitStack()  # what is open while there is a derivation
        self._log: AuditWriter
        self._derived: Derivation | None = None
        self._next_chunk = 0
        self._rows_chunk = 0
        self._anchor_due = False
        self._upload_due = True
        self._stored: set[int] | None = None
        self._after: Position | None = None

    def note_snapshot(self) -> None:
        """A snapshot of the tenant's stream was taken: the next `catch_up` anchors. Any thread."""
        self._anchor_due = True

    def retry(self) -> None:
        """The operator mended what `broken` names: the next `catch_up` looks again."""
        self.broken = ""

    def catch_up(self) -> None:
        """Appends what the sealed chunks say and the audit log does not, and an anchor if one is due. Blocks."""
        if self.broken:
            return
        try:
            derived = self._open()
            self._derive_chunks(derived)
            if self._anchor_due:
                self._anchor_due = False
                self._anchor(derived)
        except CorruptError as e:
            self.close()
            if not self._mended and self._mend(e):
                self.catch_up()
                return
            self.broken = str(e)
            log.error("audit log stopped", extra={"tenant_id": self.tenant_id, "error": str(e)})  # noqa: TRY400
            self.close()
        except BaseException:
            self.close()  # what is in memory may be ahead of the file: the next call reads it again
            raise

    def _mend(self, error: CorruptError) -> bool:
        """A log that is damaged here, from its ranges on the remote, once; whether there is anything to go on with."""
        self._mended = True
        acknowledged = self.catalog.get(self.tenant_id, t.COUNTERS, AUDIT_LOGSEQ) or 0
        if joined_ranges(self.store, self.tenant_id).last < acknowledged:
            return False  # not all of it is there: repair decides
        log.warning("audit log is damaged", extra={"tenant_id": self.tenant_id, "error": str(error)})
        rebuild_audit(self.env, self.store, self.path.parent.parent, self.tenant_id)
        return True

    def close(self) -> None:
        self._files.close()
        self._derived = None

    # -- deriving ----------------------------------------------------------------------------------------------

    def _open(self) -> Derivation:
        if self._derived is not None:
            return self._derived
        with self.catalog.view() as view:
            logseq = view.get(self.tenant_id, t.COUNTERS, AUDIT_LOGSEQ)
            chunk = view.get(self.tenant_id, t.COUNTERS, AUDIT_CHUNK)
        self.env.make_dirs(self.path.parent)
        derived = Derivation(self.tenant, DiskState(self._scratch), logseq or 0)
        self._files.callback(derived.state.close)
        self._log = AuditWriter(self.env, self.path, on_record=derived.replayed, acknowledged=logseq or 0)
        self._files.callback(self._log.close)
        derived.next_logseq = self._log.next_logseq
        self._next_chunk = chunk or 0
        self._load_refs(derived)
        oldest = next((c.index for c, _ in chunk_headers(self._directory)), 0)
        if oldest > self._next_chunk:
            self._derive_rows(derived)
        self._derived = derived
        return derived

    def _load_refs(self, derived: Derivation) -> None:
        """Names of what exists: a deletion in the log names a row, not its content."""
        with self.catalog.view() as view:
            self._looked_at(view)
            for key, row in view.scan(self.tenant_id, t.OBJECTS):
                if row.published_ms:
                    derived.state.remember(key, derived.ref_of(row))

    def _looked_at(self, view: View) -> None:
        """The rows are as of now: chunks behind the one that is being written say nothing that was not seen."""
        position = view.position(self.tenant_id)
        self._rows_chunk = position.chunk_index if position is not None else 0

    def _derive_chunks(self, derived: Derivation) -> None:
        for where, header in chunk_headers(self._directory):
            if where.index < self._next_chunk or not header.sealed:
                continue
            chunk = parse_chunk(where.read(), path=str(where.path), last=False, expect_index=where.index)
            if chunk is None:
                return
            derived.rows_are_newer = chunk.index <= self._rows_chunk
            try:
                for mutation in mutations_in((r.type_id, r.payload) for r in chunk.records()):
                    apply_mutation(derived, mutation)
            except _DisagreeError as e:
                what = {"tenant_id": self.tenant_id, "chunk_index": chunk.index, "difference": str(e)}
                log.warning("audit log and manifest log disagree; the rows decide", extra=what)
                self._derive_rows(derived)
                return
            self._next_chunk = chunk.index + 1
            self._append(derived)
        if derived.sweep_due:
            self.writer.flush()  # the rows may be ahead of the sealed chunks: what they say is durable first
            derived.sweep(self._live(derived))
            self._append(derived)

    def _derive_rows(self, derived: Derivation) -> None:
        """The difference between the rows, made durable first, and what the audit log adds up to."""
        derived.accept_rest()
        self.writer.flush()
        with self.catalog.view() as view:
            self._looked_at(view)
            for _, chunk in view.scan(self.tenant_id, t.CHUNKS):
                derived.chunk(chunk)
            for _, row in view.scan(self.tenant_id, t.OBJECTS):
                derived.object(row)
        derived.sweep(self._live(derived))
        self._append(derived)
        self._next_chunk = self._rows_chunk
        self._remember()

    def _live(self, derived: Derivation) -> Iterator[fmt.ArtifactRef]:
        with self.catalog.view() as view:
            for _, row in view.scan(self.tenant_id, t.OBJECTS):
                if row.published_ms:
                    yield derived.ref_of(row)

    def _append(self, derived: Derivation) -> None:
        fresh, derived.fresh = derived.fresh, []
        for start in range(0, len(fresh), APPEND_MAX):
            self._log.append(fresh[start : start + APPEND_MAX])
        if fresh:
            self.env.failpoint("replicate.audit.appended")

    def _anchor(self, derived: Derivation) -> None:
        taken = list_snapshots(self._directory)
        last = derived.state.last_anchor[0] if derived.state.last_anchor else 0
        if not taken or last == self._log.next_logseq - 1:
            return
        derived.anchor(taken[-1])
        self._append(derived)
        self.env.failpoint("replicate.audit.anchored")
        self._remember()
        self._upload_due = True

    def _remember(self) -> None:
        logseq, chunk = self._log.next_logseq - 1, self._next_chunk

        def work(b: Batch) -> None:
            b.put(t.COUNTERS, AUDIT_LOGSEQ, logseq)
            b.put(t.COUNTERS, AUDIT_CHUNK, chunk)

        self.writer.call(self.tenant_id, work, sync=True)

    # -- the remote --------------------------------------------------------------------------------------------

    def upload(self) -> None:
        """Puts the ranges that end at an anchor and are not there yet. Blocks."""
        if not self._upload_due or self.broken or not self.path.exists():
            return
        if self._stored is None:
            self._stored = set(range_starts(self.store, self.tenant_id))
        with opened(self.path) as fd:
            for part in cut_points(Source.of_fd(fd, str(self.path)), start=self._after):
                if part.first_logseq not in self._stored:
                    self._put(fd, part)
                    self._stored.add(part.first_logseq)
                self._after = part.after
        self._upload_due = False

    def _put(self, fd: int, part: LogRange) -> None:
        data = os.pread(fd, part.end - part.start, part.start)
        metadata = {"last_logseq": str(part.after.logseq - 1), "last_hash": part.after.prev_hash.hex()}
        self.fence.put(keys.audit_range_key(self.tenant_id, part.first_logseq), data, metadata)
        self.env.failpoint("replicate.audit.range_put")


_CHUNKS: Final = (t.CHUNKS.number, t.CHUNKS.tag)
_OBJECTS: Final = (t.OBJECTS.number, t.OBJECTS.tag)


def apply_mutation(derived: Derivation, mutation: Mutation) -> None:
    number, key, value = mutation
    table = (number, key[:1])
    if table == _CHUNKS and value is not None:
        derived.chunk(t.CHUNKS.decode(value))
    elif table == _OBJECTS:
        if value is not None:
            derived.object(t.OBJECTS.decode(value))
        else:
            derived.gone(t.OBJECTS.unpack_key(key[1:]))
