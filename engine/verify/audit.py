"""The audit logs against the rows: the chain, what the records claim, and the set of artifacts that exist.

The audit log is derived from sealed chunks of the manifest log, so it may be behind by what came since; a difference in
an object that the log's last chunks changed is no damage. `audit_chunk`, in the rows, says how far back that goes.

Owner: the calling thread; reads only. A crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from aof2.engine.audit.damage import Tail
from aof2.engine.audit.format import ArtifactRef, artifact_ref
from aof2.engine.audit.reader import Replay
from aof2.engine.audit.state import VisibleState
from aof2.engine.catalog import tables as t
from aof2.engine.catalog.batch import EVENT_SCHEMA_ID, decode_event
from aof2.engine.catalog.rows import ObjectState
from aof2.engine.errors import CorruptError, UnsupportedError
from aof2.engine.manifest.batch import Event
from aof2.engine.manifest.format import ManifestIntegrityError
from aof2.engine.manifest.index import ManifestIndex
from aof2.engine.manifest.reader import Stream
from aof2.engine.replicate.audit import AUDIT_CHUNK, AUDIT_LOGSEQ
from aof2.engine.replicate.auditmend import audit_path
from aof2.engine.verify.context import OneStream
from aof2.engine.verify.findings import Finding, Kind, RebuildAudit, Severity

_OBJECTS = (t.OBJECTS.number, t.OBJECTS.tag)


def check_audit(s: OneStream) -> Iterator[Finding]:
    """One tenant's audit log."""
    path = audit_path(s.ctx.state_dir, s.stream_id)

    def say(severity: Severity, message: str, fix: RebuildAudit | None = None) -> Finding:
        return s.say(Kind.AUDIT, severity, message, path=str(path), fix=fix)

    rebuild = RebuildAudit(stream_id=s.stream_id)
    acknowledged = s.get(t.COUNTERS, AUDIT_LOGSEQ) or 0
    if not path.exists():
        if acknowledged:
            yield say(Severity.ERROR, f"{path}: missing; {acknowledged} record(s) were written", rebuild)
        else:
            yield say(Severity.NOTE, f"{path}: no audit log yet")
        return
    replay = Replay(path)
    try:
        state = VisibleState.of(replay)
    except (CorruptError, UnsupportedError) as e:
        yield say(Severity.ERROR, str(e), rebuild)
        return
    end = replay.outcome.position.logseq
    if end <= acknowledged:
        yield say(Severity.ERROR, f"{path}: ends at record {end - 1}, {acknowledged} were written", rebuild)
        return
    if replay.outcome.tail is not Tail.CLEAN:
        what = f"ends in an append that was not finished ({replay.outcome.tail.value})"
        yield say(Severity.NOTE, f"{path}: {what}")
    for problem in state.problems:
        yield say(Severity.ERROR, f"{path}: record {problem.logseq}: {problem.what}")
    for message in _seals(s, state):
        yield say(Severity.ERROR, f"{path}: {message}")
    if s.is_safe:
        for severity, message in _compare(s, state):
            yield say(severity, f"{path}: {message}")


def _seals(s: OneStream, state: VisibleState) -> Iterator[str]:
    for chunk_id, chunk in s.scan(t.CHUNKS):
        sealed = state.sealed_as(chunk_id)
        if sealed is not None and sealed != chunk.sha256:
            yield f"chunk {chunk_id} was sealed as {sealed.hex()}, its row says {chunk.sha256.hex()}"


def _compare(s: OneStream, state: VisibleState) -> Iterator[tuple[Severity, str]]:
    """Published and tombstoned objects, both ways; what the audit log has not been told yet is a note."""
    touched, deleted, visible = _pending(s)
    behind = 0
    for key, row in s.scan(t.OBJECTS):
        if row.state not in (ObjectState.PUBLISHED, ObjectState.TOMBSTONED):
            continue
        ref = artifact_ref(s.tenant, row.ino, row.generation, row.sha256)
        should = row.state == ObjectState.PUBLISHED
        visible.add(ref)
        if state.is_visible(ref) == should and (should or state.is_published(ref)):
            continue
        if key in touched:
            behind += 1
        else:
            says = "visible" if state.is_visible(ref) else "not visible"
            what = f"object {row.ino}.{row.generation} is {row.state.name.lower()}, the audit log has it {says}"
            yield Severity.ERROR, what
    extra = sum(ref not in visible for ref in state)
    if extra > deleted:
        yield Severity.ERROR, f"{extra} artifact(s) are published there that have no row, {deleted} went since"
    elif extra or behind:
        yield Severity.NOTE, f"behind by {extra + behind} object(s); the next mount catches up"


def _pending(s: OneStream) -> tuple[set[tuple[int, int]], int, set[ArtifactRef]]:
    """Objects changed, and how many rows deleted, in chunks of the log that the audit log may not have yet; and what
    was published there: on a running volume the audit log may know it before the rows that we look at."""
    touched: set[tuple[int, int]] = set()
    arrived: set[ArtifactRef] = set()
    deleted = 0

    def on_event(event: Event) -> None:
        nonlocal deleted
        for number, key, value in decode_event(event.body) if event.schema_id == EVENT_SCHEMA_ID else ():
            if (number, key[:1]) == _OBJECTS:
                touched.add(t.OBJECTS.unpack_key(key[1:]))
                deleted += value is None
                row = t.OBJECTS.decode(value) if value is not None else None
                if row is not None and row.state in (ObjectState.PUBLISHED, ObjectState.TOMBSTONED):
                    arrived.add(artifact_ref(s.tenant, row.ino, row.generation, row.sha256))

    from_chunk = s.get(t.COUNTERS, AUDIT_CHUNK) or 0
    index = ManifestIndex()
    index.on_event = on_event
    stream = Stream(s.log_dir)
    stream.chunks = [c for c in stream.chunks if c.index >= from_chunk]
    try:
        for chunk in stream.read():
            index.apply_chunk(chunk)
    except (ManifestIntegrityError, FileNotFoundError):
        pass
    return touched, deleted, arrived
