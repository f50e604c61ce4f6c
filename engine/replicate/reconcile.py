"""The log against the listing: which of a stream's objects are on the remote, and whether they are the right ones.

Expected is what the rows say was uploaded (and not deleted). Compared is what is cheap and enough: a chunk or snapshot
that is still here by size and crc64 of the whole object and by its metadata; one that is not, by the etag that was
recorded when it was put. `deep` reads and parses every object.

Invariants
- `examine_stream` reads only. `repair_stream` puts what is missing and still here, under the fence; it never replaces
  an object: one that is different is reported, and stays.
- What is queued for deletion may be there or not: either is right.

Owner: blocking, any thread (repairs: the stream's upload task). A crash leaves what `stream` says of an upload.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec

from aof2 import native
from aof2.engine.catalog.store import Catalog
from aof2.engine.errors import Aof2Error, CorruptError, UnsupportedError
from aof2.engine.manifest import retention
from aof2.engine.manifest.chunk import as_uploaded
from aof2.engine.manifest.format import chunk_name
from aof2.engine.manifest.reader import ChunkFile, chunk_headers
from aof2.engine.manifest.snapshot import SnapshotAt, check_snapshot, local_snapshots, snapshot_name
from aof2.engine.remote import keys
from aof2.engine.remote.store import BlobInfo, RemoteStore
from aof2.engine.replicate.listing import Inventory, RemoteLog, list_stream
from aof2.engine.replicate.stream import (
    LogState,
    StreamUploads,
    log_state,
    sealed_chunk,
)


class Status(StrEnum):
    """What is so with one object. Scripts see these names: they stay."""

    OK = "ok"
    MISSING = "missing"  # not there, but what it held is here: a repair puts it again
    REPUT = "reput"  # was missing, and is there again
    NEEDS_REPAIR = "needs_repair"  # not there, and not here either
    DIVERGENT = "divergent"  # other bytes than ours, or damaged ones
    UNKNOWN = "unknown"  # nothing that the log speaks of


class ObjectFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One object of the stream. `covered`: a newer snapshot is there, so a rebuild does without it."""

    key: str
    status: Status
    detail: str = ""
    size: int = 0
    covered: bool = False


class StreamReport(msgspec.Struct, frozen=True, kw_only=True):
    """A stream compared with the remote. `retention` says which promises of local retention do not hold."""

    stream_id: int
    objects: list[ObjectFinding]
    retention: list[str] = msgspec.field(default_factory=list)

    def of(self, *statuses: Status) -> list[ObjectFinding]:
        return [finding for finding in self.objects if finding.status in statuses]

    @property
    def clean(self) -> bool:
        return not self.retention and not self.of(Status.MISSING, Status.NEEDS_REPAIR, Status.DIVERGENT)


class _Here(NamedTuple):
    """The sealed chunks and the snapshots of the folder."""

    chunks: dict[int, ChunkFile]
    snapshots: dict[int, SnapshotAt]
    next_index: int


def examine_stream(
    store: RemoteStore, catalog: Catalog, directory: Path, stream_id: int, *, deep: bool = False
) -> StreamReport:
    """Compares; changes nothing. TransientError when the remote cannot be asked."""
    state = log_state(catalog, stream_id)
    remote = RemoteLog(store, stream_id, list_stream(store, stream_id))
    return _Examination(store, directory, stream_id, state, remote, deep).run()


def repair_stream(report: StreamReport, uploads: StreamUploads) -> StreamReport:
    """Puts what is missing on the remote and still here. The report as it is afterwards."""
    after = [_reput(finding, uploads) if finding.status is Status.MISSING else finding for finding in report.objects]
    return msgspec.structs.replace(report, objects=after)


def _reput(finding: ObjectFinding, uploads: StreamUploads) -> ObjectFinding:
    match keys.parse_key(finding.key):
        case keys.ManifestChunkKey(_, index):
            uploads.reput_chunk(index)
        case keys.ManifestSnapshotKey(_, snapshot_id):
            uploads.upload_snapshot(snapshot_id)
        case _:
            return finding
    return msgspec.structs.replace(finding, status=Status.REPUT, detail="put again from the local copy")


class _Examination:
    def __init__(
        self,
        store: RemoteStore,
        directory: Path,
        stream_id: int,
        state: LogState,
        remote: RemoteLog,
        deep: bool,
    ) -> None:
        self.store = store
        self.directory = directory
        self.stream_id = stream_id
        self.state = state
        self.remote = remote
        self.deep = deep
        self.here = _look(directory)

    def run(self) -> StreamReport:
        there = {info.key: info for info in _all(self.remote.inventory)}
        expected = set(self.state.objects) - set(self.state.pending_deletes)
        unlogged = set(there) - set(self.state.objects) - set(self.state.pending_deletes)
        findings = [self._expected(key, there.get(key)) for key in sorted(expected)]
        findings += [self._unlogged(there[key]) for key in sorted(unlogged)]
        findings += [ObjectFinding(key=key, status=Status.UNKNOWN) for key in self.remote.inventory.others]
        snapshots = sorted(self.here.snapshots)
        covered = self.here.snapshots[snapshots[-1]].position if snapshots else None
        headers = [header for _, header in chunk_headers(self.directory)]
        rules = retention.violations(headers, covered)
        return StreamReport(stream_id=self.stream_id, objects=findings, retention=rules)

    def _expected(self, key: str, info: BlobInfo | None) -> ObjectFinding:
        parsed = keys.parse_key(key)
        if info is None:
            return self._missing(key, parsed)
        problem = self._compare(key, parsed, info) or self._parse(parsed)
        status = Status.DIVERGENT if problem else Status.OK
        return ObjectFinding(key=key, status=status, detail=problem, size=info.size, covered=self._covered(parsed))

    def _missing(self, key: str, parsed: keys.RemoteKey | None) -> ObjectFinding:
        covered = self._covered(parsed)
        match parsed:
            case keys.ManifestChunkKey(_, index) if self.remote.inventory.bundle_of(index) is not None:
                return ObjectFinding(key=key, status=Status.OK, detail="in a bundle", covered=covered)
            case keys.ManifestChunkKey(_, index) if local_copy(self.directory, parsed) is not None:
                return ObjectFinding(key=key, status=Status.MISSING, detail="the chunk is here", covered=covered)
            case keys.ManifestSnapshotKey() if local_copy(self.directory, parsed) is not None:
                return ObjectFinding(key=key, status=Status.MISSING, detail="the snapshot is here", covered=covered)
        what = "neither there nor here" + ("; a newer snapshot covers it: only history is lost" if covered else "")
        return ObjectFinding(key=key, status=Status.NEEDS_REPAIR, detail=what, covered=covered)

    def _unlogged(self, info: BlobInfo) -> ObjectFinding:
        """An upload whose end was not logged, what another writer put, or something left over."""
        parsed = keys.parse_key(info.key)
        status, detail = Status.UNKNOWN, "the log does not speak of it"
        if local_copy(self.directory, parsed) is not None:
            detail = self._compare(info.key, parsed, info)
            status = Status.DIVERGENT if detail else Status.OK
        elif isinstance(parsed, keys.ManifestChunkKey) and parsed.chunk_index >= self.here.next_index:
            status, detail = Status.DIVERGENT, f"the log here ends before chunk {self.here.next_index}"
        return ObjectFinding(key=info.key, status=status, detail=detail, size=info.size, covered=self._covered(parsed))

    def _compare(self, key: str, parsed: keys.RemoteKey | None, info: BlobInfo) -> str:
        """What is different, or nothing."""
        data = local_copy(self.directory, parsed)
        if data is not None:
            return self._compare_bytes(key, parsed, info, data)
        recorded = self.state.objects.get(key, "")
        etag = info.etag
        if not etag:
            head = self.store.head_blob(key)
            etag = head.etag if head is not None else ""
        if recorded and etag and recorded != etag:
            if isinstance(parsed, keys.ManifestBundleKey):
                return self._parse(parsed, always=True)  # composed again, perhaps of other parts: its content decides
            return f"its etag is {etag}, {recorded} was put"
        return ""

    def _compare_bytes(self, key: str, parsed: keys.RemoteKey | None, info: BlobInfo, data: bytes) -> str:
        if info.size != len(data):
            return f"{info.size} bytes, the local copy has {len(data)}"
        head = self.store.head_blob(key)
        if head is None:
            return "gone since it was listed"
        if head.crc64 is not None and head.crc64 != native.crc64(data):
            return f"crc64 {head.crc64:016x}, the local copy's is {native.crc64(data):016x}"
        if isinstance(parsed, keys.ManifestChunkKey):
            wanted = self._chunk_metadata(parsed.chunk_index)
            for name, value in wanted.items():
                if head.metadata.get(name, value) != value:
                    return f"its metadata says {name} {head.metadata[name]}, the local copy {value}"
        return ""

    def _chunk_metadata(self, index: int) -> dict[str, str]:
        sealed = sealed_chunk(self.here.chunks[index])
        return {
            "chunk_crc64": f"{sealed.header.chunk_crc64:016x}",
            "base_record": str(sealed.header.base_record),
            "record_count": str(sealed.record_count),
        }

    def _parse(self, parsed: keys.RemoteKey | None, *, always: bool = False) -> str:
        if not (self.deep or always):
            return ""
        try:
            match parsed:
                case keys.ManifestChunkKey(_, index):
                    self.remote.chunk(index)
                case keys.ManifestBundleKey(_, first, last):
                    for index in range(first, last + 1):
                        self.remote.bundled_chunk((first, last), index)
                case keys.ManifestSnapshotKey(_, snapshot_id):
                    self.remote.snapshot(snapshot_id)
        except (CorruptError, UnsupportedError) as e:
            return str(e)
        return ""

    def _covered(self, parsed: keys.RemoteKey | None) -> bool:
        newest = max((s for s in self.remote.inventory.snapshots if s in self.here.snapshots), default=None)
        if newest is None:
            return False
        limit = self.here.snapshots[newest].position.chunk_index
        match parsed:
            case keys.ManifestChunkKey(_, index):
                return index < limit
            case keys.ManifestBundleKey(_, _, last):
                return last < limit
            case keys.ManifestSnapshotKey(_, snapshot_id):
                return snapshot_id < newest
        return False


def local_copy(directory: Path, parsed: keys.RemoteKey | None) -> bytes | None:
    """The bytes that belong under the key, from this folder, checked; None when they are not here or damaged."""
    try:
        match parsed:
            case keys.ManifestChunkKey(_, index):
                chunk = ChunkFile(index, directory / chunk_name(index))
                header = sealed_chunk(chunk).header
                return as_uploaded(chunk.read()[: header.committed_len]) if header.sealed else None
            case keys.ManifestSnapshotKey(_, snapshot_id):
                path = directory / snapshot_name(snapshot_id)
                data = path.read_bytes()
                check_snapshot(data, path=str(path))
                return data
    except (Aof2Error, OSError):
        return None
    return None


def _look(directory: Path) -> _Here:
    found = chunk_headers(directory)
    chunks = {chunk.index: chunk for chunk, header in found if header.sealed}
    next_index = found[-1][0].index + found[-1][1].sealed if found else 0
    return _Here(chunks, {s.snapshot_id: s for s in local_snapshots(directory)}, next_index)


def _all(inventory: Inventory) -> list[BlobInfo]:
    return [*inventory.chunks.values(), *inventory.bundles.values(), *inventory.snapshots.values()]
